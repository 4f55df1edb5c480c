//! A key space by rule: as many objects as a benchmark wants, of which nothing is kept but the rule.
//!
//! Key number `n` is `PREFIX[DIRECTORY/…]NUMBER[-FILLER]SUFFIX`. Numbers have one width, so the order of the keys is
//! that of their numbers, and the first key at or after any string is found by bisection: a page of a listing costs
//! what it holds and some thirty comparisons, wherever it begins and however many keys there are.
//!
//! Each number has two *places* in that order: that of its key, and right after it that of a key which a change adds.
//! Size, ETag and bytes follow from the seed and the place. An ETag looks like an MD5 and is none.

use std::fmt::Write as _;
use std::ops::Bound;

use serde::{Deserialize, Serialize};

use super::object::{Object, Origin, mix};
use super::record::{KEY_MAX_BYTES, hex};
use crate::error::DevS3Error;

/// Keys at most.
pub const KEYS_MAX: u64 = 100_000_000;
/// Digits of a key's number.
const NUMBER_WIDTH: usize = 8;
/// Levels of directories at most.
const DEPTH_MAX: u32 = 8;
/// Longest file name, as file systems have it.
const NAME_MAX_BYTES: usize = 255;
/// Largest object, in bytes, as in S3.
const SIZE_MAX: u64 = 5 << 40;
/// With more than this share of changed keys a page might have to pass many that are deleted.
const CHANGED_MAX: f64 = 0.5;
/// What the name of an added key ends in.
const ADDED: &str = ".new";
/// By how many seconds a change makes an object younger.
const CHANGED_AFTER_S: i64 = 86_400;

/// Which objects there are. In JSON every key may be left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeySpaceRule {
    /// How many, 1 to [`KEYS_MAX`].
    pub keys: u64,
    /// What all keys begin with.
    pub prefix: String,
    /// What all keys end in.
    pub suffix: String,
    /// Files of one directory; 0 for a flat key space.
    pub files_per_directory: u64,
    /// Levels of directories, 1 to 8. Files are in the deepest ones alone.
    pub depth: u32,
    /// Bytes of a file's name with its suffix, at most 255: hexadecimal digits by seed follow the number. 0 for the
    /// number alone.
    pub name_bytes: usize,
    /// Bytes of the smallest object.
    pub size_min: u64,
    /// Bytes of the largest object, at most 5 TiB. The logarithms of sizes are spread evenly between the two.
    pub size_max: u64,
    /// What sizes, ETags and bytes follow from.
    pub seed: u64,
    /// Time of all objects but those that changed, in seconds since the epoch.
    pub modified_s: i64,
    pub changes: KeySpaceChanges,
}

/// What is another than the rest of the rule says. The shares, 0 to 0.5 together, are of all keys, drawn by seed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeySpaceChanges {
    /// Other seeds draw other keys, and give those that are modified other bytes.
    pub seed: u64,
    /// Share of keys with another ETag, size, time and content.
    pub modified: f64,
    /// Share of keys that are gone.
    pub deleted: f64,
    /// Share of keys that are followed by a new one, named after it with `.new` at the end.
    pub added: f64,
}

impl Default for KeySpaceRule {
    fn default() -> Self {
        Self {
            keys: 1000,
            prefix: "img/".to_owned(),
            suffix: ".jpg".to_owned(),
            files_per_directory: 0,
            depth: 1,
            name_bytes: 0,
            size_min: 50_000,
            size_max: 50_000,
            seed: 0,
            modified_s: 1_704_067_200,
            changes: KeySpaceChanges::default(),
        }
    }
}

impl KeySpaceRule {
    fn check(&self) -> Result<(), String> {
        let Self { keys, depth, name_bytes, size_min, size_max, .. } = self;
        if !(1..=KEYS_MAX).contains(keys) {
            return Err(format!("keys is {keys}; use 1 to {KEYS_MAX}"));
        }
        if !(1..=DEPTH_MAX).contains(depth) {
            return Err(format!("depth is {depth}; use 1 to {DEPTH_MAX}"));
        }
        let shortest = NUMBER_WIDTH + self.suffix.len();
        if *name_bytes != 0 && !(shortest..=NAME_MAX_BYTES - ADDED.len()).contains(name_bytes) {
            let longest = NAME_MAX_BYTES - ADDED.len();
            return Err(format!(
                "name_bytes is {name_bytes}; use {shortest} to {longest}, or 0 for the shortest names"
            ));
        }
        if size_min > size_max || *size_max > SIZE_MAX {
            return Err(format!("sizes from {size_min} to {size_max} are not from small to large, up to {SIZE_MAX}"));
        }
        let KeySpaceChanges { modified, deleted, added, .. } = self.changes;
        let is_sound = [modified, deleted, added].iter().all(|share| *share >= 0.0);
        if !is_sound || modified + deleted + added > CHANGED_MAX {
            return Err(format!("changes are shares of all keys, 0 to {CHANGED_MAX} together"));
        }
        Ok(())
    }
}

/// What becomes of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Modified,
    Deleted,
    Added,
}

/// How directories are named.
struct Directories {
    files: u64,
    depth: u32,
    /// Directories of one directory.
    base: u64,
    /// Digits of a directory's number.
    width: usize,
}

impl Directories {
    fn of(rule: &KeySpaceRule) -> Option<Self> {
        let (files, depth) = (rule.files_per_directory, rule.depth);
        if files == 0 {
            return None;
        }
        let count = rule.keys.div_ceil(files);
        let mut base = ((count as f64).powf(1.0 / f64::from(depth)) as u64).max(1);
        while base.checked_pow(depth).is_some_and(|places| places < count) {
            base += 1;
        }
        let width = (base - 1).checked_ilog10().unwrap_or(0) as usize + 1;
        Some(Self { files, depth, base, width })
    }

    /// Writes the directories above key number `number`, from the first to the deepest.
    fn write(&self, number: u64, key: &mut String) {
        let directory = number / self.files;
        for level in (0..self.depth).rev() {
            let name = directory / self.base.pow(level) % self.base;
            // Writing to a string cannot fail.
            let _ = write!(key, "{name:0width$}/", width = self.width);
        }
    }
}

/// The keys of a rule, and the objects that they stand for.
pub(super) struct KeySpace {
    rule: KeySpaceRule,
    directories: Option<Directories>,
    /// Bytes between a key's number and its suffix.
    filler: usize,
}

impl KeySpace {
    /// Takes a rule.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidKeySpace`].
    pub fn new(rule: KeySpaceRule) -> Result<Self, DevS3Error> {
        rule.check().map_err(DevS3Error::InvalidKeySpace)?;
        let filler = rule.name_bytes.saturating_sub(NUMBER_WIDTH + rule.suffix.len());
        let space = Self { directories: Directories::of(&rule), filler, rule };
        let mut longest = String::new();
        space.write_key(1, &mut longest);
        if longest.len() > KEY_MAX_BYTES {
            let message = format!("keys of {} bytes are longer than {KEY_MAX_BYTES}", longest.len());
            return Err(DevS3Error::InvalidKeySpace(message));
        }
        Ok(space)
    }

    /// Takes a rule as it is kept with its bucket.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidKeySpace`].
    pub fn from_json(rule: &str) -> Result<Self, DevS3Error> {
        Self::new(serde_json::from_str(rule).map_err(|error| DevS3Error::InvalidKeySpace(error.to_string()))?)
    }

    /// The rule as it is kept with its bucket.
    pub fn to_json(&self) -> Result<String, DevS3Error> {
        serde_json::to_string(&self.rule).map_err(|error| DevS3Error::InvalidKeySpace(error.to_string()))
    }

    pub fn rule(&self) -> &KeySpaceRule {
        &self.rule
    }

    /// The object under `key`.
    pub fn object(&self, key: &str) -> Option<Object> {
        self.place_of(key).map(|place| self.object_at(place))
    }

    pub fn contains(&self, key: &str) -> bool {
        self.place_of(key).is_some()
    }

    /// The keys from a bound on, in their order.
    pub fn keys_from(&self, from: Bound<&[u8]>) -> Keys<'_> {
        Keys { space: self, next: self.first_place(from) }
    }

    fn places(&self) -> u64 {
        2 * self.rule.keys
    }

    /// Where a key with `bytes` is, or would be.
    fn first_place(&self, from: Bound<&[u8]>) -> u64 {
        let is_before = |key: &[u8]| match from {
            Bound::Included(first) => key < first,
            Bound::Excluded(last) => key <= last,
            Bound::Unbounded => false,
        };
        let (mut low, mut high, mut key) = (0, self.places(), String::new());
        while low < high {
            let middle = low + (high - low) / 2;
            self.write_key(middle, &mut key);
            if is_before(key.as_bytes()) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    fn place_of(&self, key: &str) -> Option<u64> {
        let place = self.first_place(Bound::Included(key.as_bytes()));
        if place >= self.places() || !self.exists(place) {
            return None;
        }
        let mut found = String::new();
        self.write_key(place, &mut found);
        (found == key).then_some(place)
    }

    fn write_key(&self, place: u64, key: &mut String) {
        let number = place / 2;
        key.clear();
        key.push_str(&self.rule.prefix);
        if let Some(directories) = &self.directories {
            directories.write(number, key);
        }
        let _ = write!(key, "{number:0NUMBER_WIDTH$}");
        let mut digits = 0;
        for at in 0..self.filler {
            if at.is_multiple_of(16) {
                digits = mix(self.rule.seed ^ mix(number ^ ((at as u64 / 16) << 32)));
            }
            let digit = char::from_digit((digits >> (at % 16 * 4)) as u32 & 15, 16);
            key.push(digit.filter(|_| at > 0).unwrap_or('-'));
        }
        key.push_str(&self.rule.suffix);
        if place % 2 == 1 {
            key.push_str(ADDED);
        }
    }

    fn change(&self, number: u64) -> Change {
        let KeySpaceChanges { seed, modified, deleted, added } = self.rule.changes;
        if modified + deleted + added == 0.0 {
            return Change::None;
        }
        match share(mix(seed.wrapping_add(mix(number)))) {
            share if share < modified => Change::Modified,
            share if share < modified + deleted => Change::Deleted,
            share if share < modified + deleted + added => Change::Added,
            _ => Change::None,
        }
    }

    fn exists(&self, place: u64) -> bool {
        let change = self.change(place / 2);
        if place.is_multiple_of(2) { change != Change::Deleted } else { change == Change::Added }
    }

    fn object_at(&self, place: u64) -> Object {
        let original = mix(self.rule.seed ^ mix(place));
        let is_modified = self.change(place / 2) == Change::Modified;
        let seed = if is_modified { mix(original ^ mix(!self.rule.changes.seed)) } else { original };
        let [high, low] = [mix(seed ^ 1), mix(seed ^ 2)].map(u64::to_be_bytes);
        let age_s = if is_modified || place % 2 == 1 { CHANGED_AFTER_S } else { 0 };
        Object {
            size: self.size(seed),
            etag: hex(&[high, low].concat()),
            modified_s: self.rule.modified_s.saturating_add(age_s),
            attributes: None,
            sequence: 0,
            origin: Origin::Generated { seed },
        }
    }

    fn size(&self, seed: u64) -> u64 {
        let (least, most) = (self.rule.size_min, self.rule.size_max);
        if least == most {
            return least;
        }
        let first = least.max(1) as f64;
        let size = first * (most as f64 / first).powf(share(mix(seed ^ 3)));
        (size as u64).clamp(least, most)
    }
}

/// An even share of 1 for each value.
fn share(value: u64) -> f64 {
    (value >> 11) as f64 / (1u64 << 53) as f64
}

/// Keys in their order.
pub(super) struct Keys<'s> {
    space: &'s KeySpace,
    next: u64,
}

impl<'s> Iterator for Keys<'s> {
    type Item = GeneratedKey<'s>;

    fn next(&mut self) -> Option<GeneratedKey<'s>> {
        let place = (self.next..self.space.places()).find(|place| self.space.exists(*place))?;
        self.next = place + 1;
        // Most are no longer.
        let mut key = String::with_capacity(64);
        self.space.write_key(place, &mut key);
        Some(GeneratedKey { key, space: self.space, place })
    }
}

/// A key that was come across; its object is made when it is wanted.
pub(super) struct GeneratedKey<'s> {
    pub key: String,
    space: &'s KeySpace,
    place: u64,
}

impl GeneratedKey<'_> {
    pub fn object(&self) -> Object {
        self.space.object_at(self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(rule: KeySpaceRule) -> Vec<String> {
        KeySpace::new(rule).unwrap().keys_from(Bound::Unbounded).map(|found| found.key).collect()
    }

    #[test]
    fn keys_are_named_as_the_rule_says() {
        let rule = KeySpaceRule { keys: 3, ..KeySpaceRule::default() };
        assert_eq!(keys(rule.clone()), ["img/00000000.jpg", "img/00000001.jpg", "img/00000002.jpg"]);
        let rule = KeySpaceRule { keys: 25, files_per_directory: 2, depth: 2, ..rule };
        let nested = keys(rule.clone());
        assert_eq!((nested[1].as_str(), nested[2].as_str()), ("img/0/0/00000001.jpg", "img/0/1/00000002.jpg"));
        assert_eq!(nested[24], "img/3/0/00000024.jpg");
        let long = keys(KeySpaceRule { name_bytes: 30, ..rule });
        let names: Vec<_> = long.iter().map(|key| key.rsplit('/').next().unwrap()).collect();
        assert!(names.iter().all(|name| name.len() == 30 && name[8..].starts_with('-') && name.ends_with(".jpg")));
        assert_ne!(names[0][9..26], names[1][9..26]);
    }

    #[test]
    fn changes_are_shares_of_all_keys_and_change_nothing_else() {
        let rule = KeySpaceRule { keys: 100_000, size_min: 1, size_max: 1 << 20, ..KeySpaceRule::default() };
        let changes = KeySpaceChanges { seed: 7, modified: 0.02, deleted: 0.01, added: 0.01 };
        let before = KeySpace::new(rule.clone()).unwrap();
        let after = KeySpace::new(KeySpaceRule { changes, ..rule }).unwrap();
        let (mut modified, mut added) = (0, 0);
        for found in after.keys_from(Bound::Unbounded) {
            match before.object(&found.key) {
                Some(object) if object == found.object() => {}
                Some(object) => {
                    modified += 1;
                    assert_ne!(object.etag, found.object().etag);
                    assert!(object.modified_s < found.object().modified_s);
                }
                None => added += 1,
            }
        }
        let deleted = before.keys_from(Bound::Unbounded).filter(|found| !after.contains(&found.key)).count();
        assert!((1800..2200).contains(&modified) && (850..1150).contains(&added), "{modified} {added}");
        assert!((850..1150).contains(&deleted), "{deleted}");
    }

    #[test]
    fn sizes_are_spread_by_their_logarithms() {
        let rule = KeySpaceRule { keys: 10_000, size_min: 1000, size_max: 100_000, ..KeySpaceRule::default() };
        let space = KeySpace::new(rule).unwrap();
        let sizes: Vec<_> = space.keys_from(Bound::Unbounded).map(|found| found.object().size).collect();
        assert!(sizes.iter().all(|size| (1000..=100_000).contains(size)));
        let small = sizes.iter().filter(|size| **size < 10_000).count();
        assert!((4500..5500).contains(&small), "{small}");
    }

    #[test]
    fn a_hundred_million_keys_are_found_at_once() {
        let rule = KeySpaceRule { keys: KEYS_MAX, files_per_directory: 1000, depth: 3, ..KeySpaceRule::default() };
        let space = KeySpace::new(rule).unwrap();
        let mut last = String::new();
        space.write_key(space.places() - 2, &mut last);
        assert!(last.ends_with("/99999999.jpg") && space.contains(&last), "{last}");
        assert_eq!(space.keys_from(Bound::Excluded(last.as_bytes())).count(), 0);
        assert_eq!(space.keys_from(Bound::Unbounded).take(3).count(), 3);
        assert!(!space.contains("img/") && !space.contains(&format!("{last}.new")));
    }

    #[test]
    fn nonsense_is_refused() {
        let nan = KeySpaceChanges { modified: f64::NAN, ..KeySpaceChanges::default() };
        let many = KeySpaceChanges { modified: 0.3, deleted: 0.3, ..KeySpaceChanges::default() };
        let rule = KeySpaceRule::default();
        for rule in [
            KeySpaceRule { keys: 0, ..rule.clone() },
            KeySpaceRule { keys: KEYS_MAX + 1, ..rule.clone() },
            KeySpaceRule { depth: 0, ..rule.clone() },
            KeySpaceRule { name_bytes: 11, ..rule.clone() },
            KeySpaceRule { name_bytes: 256, ..rule.clone() },
            KeySpaceRule { size_min: 60_000, ..rule.clone() },
            KeySpaceRule { size_max: SIZE_MAX + 1, ..rule.clone() },
            KeySpaceRule { prefix: "p".repeat(1020), ..rule.clone() },
            KeySpaceRule { changes: nan, ..rule.clone() },
            KeySpaceRule { changes: many, ..rule },
        ] {
            let refused = KeySpace::new(rule.clone());
            assert!(matches!(refused, Err(DevS3Error::InvalidKeySpace(_))), "{rule:?}");
        }
    }
}
