//! What one process may use, as the configuration spells it: `"2c4g"`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::ByteSize;

const CPUS: RangeInclusive<u32> = 1..=1024;

/// Processors and memory: `"2c4g"`, `"1c512m"`, `"4c"`, `"8g"`. What it does not name, or all if it is empty, is what
/// the process finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceLimit {
    /// 1 to 1024.
    pub cpus: Option<u32>,
    /// 128 MiB or more, in whole MiB.
    pub memory: Option<ByteSize>,
}

impl ResourceLimit {
    /// From 128 MiB, with which a process does its work, to 1 PiB.
    pub(crate) const MEMORY_MIB: RangeInclusive<u64> = 128..=1 << 30;
}

impl FromStr for ResourceLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = |why: String| format!("\"{text}\" {why}");
        let (cpus, memory) = match text.split_once('c') {
            Some((cpus, memory)) => (Some(cpus), memory),
            None => (None, text),
        };
        let cpus = match cpus {
            Some(cpus) => {
                let number = whole(cpus).and_then(|number| u32::try_from(number).ok());
                let wrong = || {
                    let (least, most) = (CPUS.start(), CPUS.end());
                    refused(format!("has no number of processors before the \"c\" ({least} to {most}): write \"2c4g\""))
                };
                Some(number.filter(|number| CPUS.contains(number)).ok_or_else(wrong)?)
            }
            None => None,
        };
        if memory.is_empty() {
            return Ok(Self { cpus, memory: None });
        }
        let mib = match (memory.strip_suffix('m'), memory.strip_suffix('g')) {
            (Some(mib), _) => whole(mib),
            (None, Some(gib)) => whole(gib).and_then(|gib| gib.checked_mul(1024)),
            (None, None) => None,
        };
        let wrong = || {
            refused(format!(
                "is no limit: write processors and memory in MiB (m) or GiB (g), {}m or more, as \"2c4g\", \"1c512m\", \
                 \"4c\" or \"8g\"",
                Self::MEMORY_MIB.start()
            ))
        };
        let mib = mib.filter(|mib| Self::MEMORY_MIB.contains(mib)).ok_or_else(wrong)?;
        Ok(Self { cpus, memory: Some(ByteSize::mib(mib)) })
    }
}

/// A number of digits alone.
fn whole(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

impl fmt::Display for ResourceLimit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cpus) = self.cpus {
            write!(out, "{cpus}c")?;
        }
        match self.memory.map(|memory| memory.bytes() >> 20) {
            Some(mib) if mib.is_multiple_of(1024) => write!(out, "{}g", mib / 1024),
            Some(mib) => write!(out, "{mib}m"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn processors_and_memory_are_read_together_and_alone() {
        let limit = |cpus, memory| ResourceLimit { cpus, memory };
        let cases = [
            ("", limit(None, None)),
            ("2c4g", limit(Some(2), Some(ByteSize::gib(4)))),
            ("1c512m", limit(Some(1), Some(ByteSize::mib(512)))),
            ("16c", limit(Some(16), None)),
            ("8g", limit(None, Some(ByteSize::gib(8)))),
            ("128m", limit(None, Some(ByteSize::mib(128)))),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(expected), "{text}");
            assert_eq!(expected.to_string(), text);
        }
    }

    #[test]
    fn mistakes_are_answered_with_what_would_be_right() {
        for text in ["c4g", "0c4g", "+1c4g", "1025c", "xc", "1.5c"] {
            let error = text.parse::<ResourceLimit>().unwrap_err();
            assert!(error.starts_with(&format!("\"{text}\"")) && error.contains("(1 to 1024)"), "{error}");
        }
        for text in ["4", "4G", "2c4", "4GiB", "127m", "0g", "2c4g ", "-1g", "99999999999999999999g", "4g2c", "2c2c"] {
            let error = text.parse::<ResourceLimit>().unwrap_err();
            assert!(error.starts_with(&format!("\"{text}\"")), "{error}");
        }
        assert!("4".parse::<ResourceLimit>().unwrap_err().contains("128m or more, as \"2c4g\""));
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_back(
            cpus in prop::option::of(CPUS),
            mib in prop::option::of(ResourceLimit::MEMORY_MIB),
        ) {
            let limit = ResourceLimit { cpus, memory: mib.map(ByteSize::mib) };
            prop_assert_eq!(limit.to_string().parse::<ResourceLimit>(), Ok(limit));
        }

        #[test]
        fn any_text_is_a_limit_or_an_error(text in "[0-9cgm+ .-]{0,12}") {
            if let Ok(limit) = text.parse::<ResourceLimit>() {
                prop_assert_eq!(limit.to_string().parse::<ResourceLimit>(), Ok(limit));
            }
        }
    }
}
