//! Reading a bucket back at start.

use std::fs::{self, DirEntry, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::bucket::Bucket;
use super::key_space::KeySpace;
use super::object::Object;
use super::object_file::Tmp;
use super::record::{BucketRecord, ObjectRecord, UploadRecord, now_s, unseal};
use super::upload::{Part, Upload};
use crate::error::DevS3Error;

/// Reads one bucket and removes versions that were replaced but not yet removed. A damaged file is left where it is and
/// reported.
pub(super) fn read_bucket(name: &str, dir: &Path, tmp: &Tmp, sequence: &Arc<AtomicU64>) -> Result<Bucket, DevS3Error> {
    let record = dir.join("bucket");
    let file = File::open(&record).map_err(DevS3Error::io("open", &record))?;
    let record = unseal::<BucketRecord>(&file).map_err(DevS3Error::io("read", &record))?.map(|(record, _)| record);
    let created_s = record.as_ref().map_or_else(now_s, |record| record.created_s);
    let bucket = Bucket::new(name, dir.to_path_buf(), created_s, tmp.clone(), Arc::clone(sequence));
    if let Some(rule) = record.and_then(|record| record.key_space) {
        bucket.contents.write().space = Some(Arc::new(KeySpace::from_json(&rule)?));
    }
    let groups = entries(&dir.join("objects"))?;
    // Opening a file and reading its last block is mostly waiting, so a few threads share the directories.
    let next = AtomicU64::new(0);
    let read_groups = || -> Result<(), DevS3Error> {
        while let Some(group) = groups.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            for entry in entries(&group.path())? {
                read_object(&bucket, &entry)?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(read_groups)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    for entry in entries(&dir.join("uploads"))? {
        read_upload(&bucket, &entry)?;
    }
    Ok(bucket)
}

fn entries(dir: &Path) -> Result<Vec<DirEntry>, DevS3Error> {
    fs::read_dir(dir).and_then(Iterator::collect).map_err(DevS3Error::io("read", dir))
}

fn read_object(bucket: &Bucket, entry: &DirEntry) -> Result<(), DevS3Error> {
    let path = entry.path();
    let sequence = entry.file_name().to_str().and_then(|name| u64::from_str_radix(name, 16).ok());
    let file = File::open(&path).map_err(DevS3Error::io("open", &path))?;
    let record = unseal::<ObjectRecord>(&file).map_err(DevS3Error::io("read", &path))?;
    let (Some(sequence), Some((record, data_len))) = (sequence, record) else {
        tracing::warn!(path = %path.display(), "not a whole object file; it is ignored");
        return Ok(());
    };
    bucket.sequence.fetch_max(sequence + 1, Ordering::Relaxed);
    if record.size != data_len {
        tracing::warn!(path = %path.display(), "the object's record and its file disagree on its size; it is ignored");
        return Ok(());
    }
    let (key, object) = Object::from_record(record, sequence);
    match bucket.recover(&key, object) {
        Some(superseded) => bucket.unlink(superseded),
        None => Ok(()),
    }
}

fn read_upload(bucket: &Bucket, entry: &DirEntry) -> Result<(), DevS3Error> {
    let dir = entry.path();
    let record = dir.join("upload");
    let found = File::open(&record).and_then(|file| unseal::<UploadRecord>(&file));
    let Ok(id) = entry.file_name().into_string() else { return Ok(()) };
    let Some((record, _)) = found.map_err(DevS3Error::io("read", &record))? else {
        tracing::warn!(path = %dir.display(), "not a whole multipart upload; it is ignored");
        return Ok(());
    };
    let mut upload = Upload::new(record);
    for entry in entries(&dir)? {
        let name = entry.file_name();
        let Some((number, part)) = name.to_str().and_then(Part::from_file_name) else { continue };
        bucket.sequence.fetch_max(part.sequence + 1, Ordering::Relaxed);
        let metadata = entry.metadata().map_err(DevS3Error::io("read", &entry.path()))?;
        let part = Part { size: metadata.len(), modified_s: metadata.mtime(), ..part };
        if let Some(old) = upload.take_part(number, part) {
            let path = dir.join(old);
            fs::remove_file(&path).map_err(DevS3Error::io("remove", &path))?;
        }
    }
    bucket.uploads.lock().insert(id, upload);
    Ok(())
}
