//! What an object keeps of the attributes of a file, beside its bytes: in its metadata. Names and spellings are those
//! of s3fs, which other programs understand.

use cavern_posix::mode::TYPE_BITS;

use crate::object::Metadata;

/// Attributes of a file or a directory that its object keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectAttributes {
    /// Permissions and type, as `stat` has them.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Nanoseconds since the epoch; `None` for the time when the object was written.
    pub mtime_ns: Option<i64>,
}

impl ObjectAttributes {
    /// What the metadata of an object say; `None` when they say nothing of a file with this type in its mode.
    pub fn read(metadata: &Metadata, type_bits: u32) -> Option<Self> {
        let number = |name: &str| metadata.get(name).and_then(|text| text.parse::<u32>().ok());
        // All ones are no id: whoever wrote that has left no owner.
        let id = |name: &str| number(name).filter(|id| *id != u32::MAX).unwrap_or_default();
        let mode = number("mode").filter(|mode| mode & TYPE_BITS == type_bits)?;
        Some(Self {
            mode,
            uid: id("uid"),
            gid: id("gid"),
            mtime_ns: metadata.get("mtime").and_then(|text| nanoseconds(text)),
        })
    }

    /// Puts them into the metadata of an object, which may have others.
    pub fn write(&self, metadata: &mut Metadata) {
        for (name, number) in [("mode", self.mode), ("uid", self.uid), ("gid", self.gid)] {
            metadata.insert(name.to_owned(), number.to_string());
        }
        match self.mtime_ns {
            Some(ns) => metadata.insert("mtime".to_owned(), seconds(ns)),
            None => metadata.remove("mtime"),
        };
    }
}

/// A time in seconds, with nine decimals.
pub fn seconds(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

/// A time as [`seconds`] writes it; other programs leave the decimals out.
pub fn nanoseconds(text: &str) -> Option<i64> {
    let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1, digits));
    let (whole, decimals) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty()
        || decimals.len() > 9
        || !whole.bytes().chain(decimals.bytes()).all(|byte| byte.is_ascii_digit())
    {
        return None;
    }
    let decimals: i128 = format!("{decimals:0<9}").parse().ok()?;
    let whole = i128::from(whole.parse::<i64>().ok()?);
    i64::try_from(sign * (whole * 1_000_000_000 + decimals)).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FILE: u32 = 0o100_000;

    #[test]
    fn what_is_written_is_read_again_and_leaves_the_rest() {
        let mut metadata = Metadata::from([("other".to_owned(), "kept".to_owned())]);
        for mtime_ns in [Some(1_800_000_000_000_000_007), Some(-1), None] {
            let attributes = ObjectAttributes { mode: FILE | 0o4640, uid: 7, gid: 8, mtime_ns };
            attributes.write(&mut metadata);
            assert_eq!(ObjectAttributes::read(&metadata, FILE), Some(attributes));
            assert_eq!(ObjectAttributes::read(&metadata, 0o040_000), None, "of another type");
        }
        let expected = [("gid", "8"), ("mode", "35232"), ("other", "kept"), ("uid", "7")];
        let expected: Metadata = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        assert_eq!(metadata, expected);
    }

    #[test]
    fn an_owner_that_is_none_is_left() {
        let metadata = [("mode", "33188"), ("uid", "4294967295"), ("gid", "7")];
        let metadata: Metadata = metadata.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let read = ObjectAttributes::read(&metadata, FILE).unwrap();
        assert_eq!((read.uid, read.gid), (0, 7));
    }

    proptest! {
        #[test]
        fn whatever_an_object_says_is_understood_or_left(
            values in prop::collection::vec(prop_oneof![".{0,24}", "-?[0-9]{0,21}(\\.[0-9]{0,11})?"], 4),
            type_bits: u32,
        ) {
            let names = ["mode", "uid", "gid", "mtime"].map(str::to_owned);
            let metadata: Metadata = names.into_iter().zip(values).collect();
            if let Some(read) = ObjectAttributes::read(&metadata, type_bits & TYPE_BITS) {
                let mut written = Metadata::new();
                read.write(&mut written);
                prop_assert_eq!(ObjectAttributes::read(&written, type_bits & TYPE_BITS), Some(read));
            }
        }

        #[test]
        fn every_time_comes_back(ns: i64) {
            prop_assert_eq!(nanoseconds(&seconds(ns)), Some(ns));
        }
    }

    #[test]
    fn times_have_nine_decimals_or_fewer() {
        assert_eq!(
            ["1", "1.5", "-1.000000001"].map(nanoseconds),
            [Some(1_000_000_000), Some(1_500_000_000), Some(-1_000_000_001)]
        );
        assert_eq!(["", "1.0000000001", "1.x", "99999999999", "--1", "0x1"].map(nanoseconds), [None; 6]);
        assert_eq!([0, -1, 1_500_000_000].map(seconds), ["0.000000000", "-0.000000001", "1.500000000"]);
    }
}
