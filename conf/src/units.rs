//! Sizes and durations as the configuration file spells them: a whole number and a unit, `"64MiB"`, `"10s"`; and counts
//! of things.
//!
//! Parsing is strict, because a forgotten or misspelt unit is the commonest mistake in such a file and a silent guess
//! the dearest: no bare numbers (but zero), no fractions, no spaces inside, and units spelled exactly. Printing picks
//! the unit that gives the shortest number, so that what is printed parses back to the same value.

mod resource_limit;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use self::resource_limit::ResourceLimit;

/// A number of things, one or several: `1 file`, `2 entries`. `what` is the word for one of them.
pub fn counted(count: u64, what: &str) -> String {
    match what.strip_suffix('y') {
        _ if count == 1 => format!("1 {what}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{count} {stem}ies"),
        _ => format!("{count} {what}s"),
    }
}

/// A kind of quantity: its units from the smallest to the largest, each with its size in the smallest.
struct Scale {
    units: &'static [(&'static str, u64)],
    listed: &'static str,
    example: &'static str,
    example_unit: &'static str,
}

const BYTES: Scale = Scale {
    units: &[
        ("B", 1),
        ("kB", 1000),
        ("KB", 1000),
        ("KiB", 1 << 10),
        ("MB", 1_000_000),
        ("MiB", 1 << 20),
        ("GB", 1_000_000_000),
        ("GiB", 1 << 30),
        ("TB", 1_000_000_000_000),
        ("TiB", 1 << 40),
        ("PB", 1_000_000_000_000_000),
        ("PiB", 1 << 50),
    ],
    listed: "B, KiB, MiB, GiB, TiB, PiB, or the decimal kB, MB, GB, TB, PB",
    example: "64MiB",
    example_unit: "MiB",
};

const TIME: Scale = Scale {
    units: &[
        ("ns", 1),
        ("us", 1000),
        ("ms", 1_000_000),
        ("s", 1_000_000_000),
        ("m", 60_000_000_000),
        ("h", 3_600_000_000_000),
        ("d", 86_400_000_000_000),
    ],
    listed: "ns, us, ms, s, m, h, d",
    example: "10s",
    example_unit: "s",
};

impl Scale {
    /// The error is a clause that says what would be right.
    fn parse(&self, text: &str) -> Result<u64, String> {
        let Self { example, example_unit, listed, .. } = self;
        if text.is_empty() {
            return Err(format!("is empty: write a whole number and a unit, as \"{example}\""));
        }
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err(format!("\"{text}\" does not start with a whole number: write it as \"{example}\""));
        }
        let too_large = || format!("\"{text}\" is too large");
        let number: u64 = number.parse().map_err(|_| too_large())?;
        if unit.is_empty() && number == 0 {
            // Nothing is nothing in every unit.
            return Ok(0);
        }
        if unit.is_empty() {
            return Err(format!("\"{text}\" has no unit: write it as \"{text}{example_unit}\" (units: {listed})"));
        }
        if unit.starts_with(['.', ',']) {
            return Err(format!("\"{text}\" has a fraction: write a whole number of a smaller unit (units: {listed})"));
        }
        let Some((_, size)) = self.units.iter().find(|(name, _)| *name == unit) else {
            let nearest = self.nearest(unit.trim()).map(|unit| format!(", did you mean \"{unit}\"?"));
            let nearest = nearest.unwrap_or_default();
            return Err(format!("\"{text}\" has the unknown unit \"{unit}\"{nearest} (units: {listed})"));
        };
        number.checked_mul(*size).ok_or_else(too_large)
    }

    /// The unit that was probably meant: the same letters in another case, or the largest unit with this initial.
    fn nearest(&self, unit: &str) -> Option<&'static str> {
        let first = unit.chars().next()?;
        let other = if first.is_ascii_lowercase() { first.to_ascii_uppercase() } else { first.to_ascii_lowercase() };
        let with_initial = |initial: char| self.units.iter().rev().find(move |(name, _)| name.starts_with(initial));
        let same_letters = self.units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        same_letters.or_else(|| with_initial(first)).or_else(|| with_initial(other)).map(|(name, _)| *name)
    }

    /// The shortest exact spelling; of two equal ones the larger unit.
    fn format(&self, value: u64, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut best = (value, self.units[0].0);
        for (name, size) in self.units.iter().filter(|(name, _)| *name != "KB") {
            if value != 0 && value.is_multiple_of(*size) && value / size <= best.0 {
                best = (value / size, name);
            }
        }
        if value == 0 {
            best = (0, if self.units[0].0 == "B" { "B" } else { "s" });
        }
        out.pad(&format!("{}{}", best.0, best.1))
    }
}

/// A number of bytes, spelled `"64MiB"`, `"1TB"`, `"0B"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(u64);

impl ByteSize {
    /// Exactly this many bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// So many times 1024 bytes; the largest size where that overflows.
    pub const fn kib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 10))
    }

    /// So many times 1024² bytes; the largest size where that overflows.
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// So many times 1024³ bytes; the largest size where that overflows.
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(1 << 30))
    }

    /// In bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        BYTES.parse(text).map(Self)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        BYTES.format(self.0, out)
    }
}

/// A length of time, spelled `"500ms"`, `"10s"`, `"1h"`; at most 584 years, in whole nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interval {
    nanos: u64,
}

impl Interval {
    /// So many nanoseconds.
    pub const fn nanos(count: u64) -> Self {
        Self { nanos: count }
    }

    /// So many milliseconds; the longest interval where that overflows.
    pub const fn millis(count: u64) -> Self {
        Self { nanos: count.saturating_mul(1_000_000) }
    }

    /// So many seconds; the longest interval where that overflows.
    pub const fn secs(count: u64) -> Self {
        Self { nanos: count.saturating_mul(1_000_000_000) }
    }

    /// As the standard library's duration.
    pub const fn get(self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// In milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.nanos / 1_000_000
    }

    /// No time at all.
    pub const fn is_zero(self) -> bool {
        self.nanos == 0
    }
}

impl From<Interval> for Duration {
    fn from(interval: Interval) -> Self {
        interval.get()
    }
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        TIME.parse(text).map(Self::nanos)
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        TIME.format(self.nanos, out)
    }
}

/// Reads a quantity from a string; anything else is answered with what the string should look like.
struct QuantityVisitor<T> {
    expecting: &'static str,
    quantity: std::marker::PhantomData<T>,
}

impl<T: FromStr<Err = String>> serde::de::Visitor<'_> for QuantityVisitor<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expecting)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! spelled_as_string {
    ($quantity:ty, $expecting:literal) => {
        impl Serialize for $quantity {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $quantity {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer
                    .deserialize_str(QuantityVisitor { expecting: $expecting, quantity: std::marker::PhantomData })
            }
        }
    };
}

spelled_as_string!(ByteSize, "a size in quotes with its unit, as \"64MiB\"");
spelled_as_string!(Interval, "a duration in quotes with its unit, as \"10s\"");
spelled_as_string!(ResourceLimit, "processors and memory in quotes, as \"2c4g\"");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_thing_is_not_several() {
        let said = [(1, "file"), (0, "file"), (2, "entry"), (1, "directory"), (3, "hidden key")];
        let said = said.map(|(count, what)| counted(count, what));
        assert_eq!(said, ["1 file", "0 files", "2 entries", "1 directory", "3 hidden keys"]);
    }

    #[test]
    fn sizes_parse_in_every_unit() {
        let cases = [
            ("0", 0),
            ("0B", 0),
            ("1B", 1),
            ("3kB", 3000),
            ("3KB", 3000),
            ("3KiB", 3072),
            ("64MiB", 64 << 20),
            ("8GB", 8_000_000_000),
            ("1TB", 1_000_000_000_000),
            ("2TiB", 2 << 40),
            ("1PiB", 1 << 50),
            ("18446744073709551615B", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(text.parse::<ByteSize>().map(ByteSize::bytes), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn durations_parse_in_every_unit() {
        let cases = [
            ("0", Duration::ZERO),
            ("5ns", Duration::from_nanos(5)),
            ("5us", Duration::from_micros(5)),
            ("500ms", Duration::from_millis(500)),
            ("10s", Duration::from_secs(10)),
            ("2m", Duration::from_secs(120)),
            ("1h", Duration::from_secs(3600)),
            ("7d", Duration::from_secs(7 * 86_400)),
        ];
        for (text, duration) in cases {
            assert_eq!(text.parse::<Interval>().map(Interval::get), Ok(duration), "{text}");
        }
    }

    #[test]
    fn mistakes_are_answered_with_what_would_be_right() {
        let size = |text: &str| text.parse::<ByteSize>().unwrap_err();
        assert!(size("").contains("as \"64MiB\""));
        assert!(size("64").contains("has no unit: write it as \"64MiB\""));
        assert!(size("64mib").contains("did you mean \"MiB\"?"));
        assert!(size("64M").contains("did you mean \"MiB\"?"));
        assert!(size("64 MiB").contains("did you mean \"MiB\"?"));
        assert!(size("1.5GiB").contains("fraction"));
        assert!(size("-1GiB").contains("whole number"));
        assert!(size("99999999PiB").contains("too large"));
        assert!(size("99999999999999999999999B").contains("too large"));
        let time = |text: &str| text.parse::<Interval>().unwrap_err();
        assert!(time("10").contains("write it as \"10s\""));
        assert!(time("10sec").contains("did you mean \"s\"?"));
        assert!(time("10S").contains("did you mean \"s\"?"));
        assert!(time("10min").contains("did you mean \"m\"?"));
        assert!(time("soon").contains("as \"10s\""));
        assert!(time("600000000000000h").contains("too large"));
    }

    #[test]
    fn printing_picks_the_shortest_exact_spelling() {
        assert_eq!(ByteSize::mib(64).to_string(), "64MiB");
        assert_eq!(ByteSize::from_bytes(1_000_000_000_000).to_string(), "1TB");
        assert_eq!(ByteSize::from_bytes(1023).to_string(), "1023B");
        assert_eq!(ByteSize::default().to_string(), "0B");
        assert_eq!(Interval::millis(60_000).to_string(), "1m");
        assert_eq!(Interval::millis(1500).to_string(), "1500ms");
        assert_eq!(Interval::default().to_string(), "0s");
        assert_eq!(format!("{:>7}", ByteSize::mib(1)), "   1MiB");
    }

    proptest! {
        #[test]
        fn printed_sizes_parse_back(bytes in any::<u64>(), shift in 0u32..64) {
            let size = ByteSize::from_bytes(bytes >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
        }

        #[test]
        fn printed_durations_parse_back(count in any::<u32>(), unit in 0usize..7) {
            let interval = Interval::nanos(u64::from(count).saturating_mul(TIME.units[unit].1));
            prop_assert_eq!(interval.to_string().parse::<Interval>(), Ok(interval));
        }

        #[test]
        fn any_text_is_a_value_or_an_error(text in ".{0,24}") {
            // A value that was accepted means the same when it is printed and read again.
            if let Ok(size) = text.parse::<ByteSize>() {
                prop_assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
            }
            if let Ok(interval) = text.parse::<Interval>() {
                prop_assert_eq!(interval.to_string().parse::<Interval>(), Ok(interval));
            }
        }

        #[test]
        fn serde_spells_like_display(bytes in any::<u64>()) {
            let size = ByteSize::from_bytes(bytes);
            let json = serde_json::to_string(&size).unwrap();
            prop_assert_eq!(&json, &format!("\"{size}\""));
            prop_assert_eq!(serde_json::from_str::<ByteSize>(&json).unwrap(), size);
        }
    }
}
