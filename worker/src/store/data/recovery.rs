//! The data blocks of a directory, found by their files.

use std::io;
use std::path::Path;

use tracing::warn;

use crate::store::directory::{DataName, parse_data_name};
use crate::store::sealing::Cipher;
use crate::store::slab::Entry;

fn is_draft(name: &str) -> bool {
    name.strip_suffix(super::draft::SUFFIX).is_some_and(|name| parse_data_name(name).is_some())
}

/// Every data block of the directory at `position`, each with what it takes of the disk. Files that are not ours are
/// left alone.
pub(in crate::store) fn scan(directory: &Path, position: u8, cipher: Option<&Cipher>) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut strange = (0u64, None);
    for folder in 0..=255u8 {
        for item in std::fs::read_dir(directory.join(format!("data/{folder:02x}")))? {
            let item = item?;
            let stat = item.metadata()?;
            let name = item.file_name();
            let ours = name.to_str().and_then(parse_data_name).filter(|_| stat.is_file());
            match ours {
                // The worker died before the file had its length, and so before anything was answered.
                Some(_) if cipher.is_some() && stat.len() == 0 => std::fs::remove_file(item.path())?,
                // However much of the block the file has: nothing at all, if what was answered last was that there is
                // room, or that the block ends where it begins.
                Some(DataName { id, incarnation, mount_id, length }) => {
                    let mut entry = Entry::of_data(id, incarnation, length, mount_id, position);
                    entry.units = super::reservations::units_on_disk(&stat);
                    entries.push(entry);
                }
                // A block that was being made when the worker died.
                None if name.to_str().is_some_and(is_draft) => std::fs::remove_file(item.path())?,
                None => {
                    strange.0 += 1;
                    strange.1.get_or_insert_with(|| item.path());
                }
            }
        }
    }
    if let (files, Some(first)) = strange {
        warn!(files, first = %first.display(), "files among the data blocks that are none: left alone");
    }
    Ok(entries)
}
