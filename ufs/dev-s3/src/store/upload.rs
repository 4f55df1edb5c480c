//! A multipart upload in progress: its parts, which are files of its directory.

use std::collections::BTreeMap;

use super::record::{UploadRecord, hex};

/// An upload in progress.
pub(super) struct Upload {
    pub record: UploadRecord,
    pub parts: BTreeMap<u32, Part>,
}

/// A part that was received.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub md5: [u8; 16],
    pub size: u64,
    pub modified_s: i64,
    pub sequence: u64,
}

impl Part {
    pub fn file_name(&self, number: u32) -> String {
        format!("{number:05}-{}-{:016x}", hex(&self.md5), self.sequence)
    }

    /// The part that a file name speaks of; its size and time are in the file's metadata.
    pub fn from_file_name(name: &str) -> Option<(u32, Self)> {
        let mut fields = name.split('-');
        let number = fields.next()?.parse().ok()?;
        let md5 = u128::from_str_radix(fields.next()?, 16).ok()?.to_be_bytes();
        let sequence = u64::from_str_radix(fields.next()?, 16).ok()?;
        Some((number, Self { md5, size: 0, modified_s: 0, sequence }))
    }
}

impl Upload {
    pub fn new(record: UploadRecord) -> Self {
        Self { record, parts: BTreeMap::new() }
    }

    /// Takes a part and returns the name of the file that lost its place to another of the same number.
    pub fn take_part(&mut self, number: u32, part: Part) -> Option<String> {
        match self.parts.get(&number) {
            Some(present) if present.sequence > part.sequence => Some(part.file_name(number)),
            _ => self.parts.insert(number, part).map(|old| old.file_name(number)),
        }
    }
}
