//! Multipart uploads. Parts are files of the upload's directory; completing one appends them to a draft (the kernel
//! copies) and commits that like any object.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use md5::{Digest, Md5};

use super::bucket::{Bucket, PutCondition, Version};
use super::object::Object;
use super::object_file::Draft;
use super::record::{Attributes, UploadRecord, check_key, hex, now_s, seal};
use super::upload::{Part, Upload};
use crate::error::DevS3Error;

/// Parts other than the last must not be smaller.
const PART_MIN_BYTES: u64 = 5 << 20;

/// A part, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartInfo {
    pub number: u32,
    pub size: u64,
    pub etag: String,
    pub modified_s: i64,
}

/// An upload, as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadInfo {
    pub key: String,
    pub id: String,
    pub initiated_s: i64,
}

/// Uploads of a bucket, in the order of key and id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UploadPage {
    pub uploads: Vec<UploadInfo>,
    pub truncated: bool,
}

impl Bucket {
    /// Begins an upload and returns its id.
    ///
    /// # Errors
    /// [`DevS3Error::InvalidKey`], [`DevS3Error::Io`].
    pub fn create_upload(&self, key: &str, attributes: Attributes) -> Result<String, DevS3Error> {
        check_key(key)?;
        let record = UploadRecord { key: key.to_owned(), initiated_s: now_s(), attributes: Some(attributes) };
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        // The time keeps ids apart across restarts, where the highest sequence number may have gone with its file.
        let id = format!("{:08x}{sequence:016x}", record.initiated_s);
        let draft = self.tmp.path();
        fs::create_dir(&draft).map_err(DevS3Error::io("create", &draft))?;
        let file = draft.join("upload");
        fs::write(&file, seal(&record)).map_err(DevS3Error::io("write", &file))?;
        let dir = self.upload_dir(&id);
        fs::rename(&draft, &dir).map_err(DevS3Error::io("rename to", &dir))?;
        self.uploads.lock().insert(id.clone(), Upload::new(record));
        Ok(id)
    }

    /// Makes `draft` part `number` of an upload, in place of an earlier one, and returns its ETag.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchUpload`], [`DevS3Error::Io`].
    pub fn put_part(
        &self,
        key: &str,
        id: &str,
        number: u32,
        draft: Draft,
        md5: [u8; 16],
    ) -> Result<String, DevS3Error> {
        self.with_upload(key, id, |_| ())?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let part = Part { md5, size: draft.size(), modified_s: now_s(), sequence };
        let path = self.upload_dir(id).join(part.file_name(number));
        draft.place(&path).map_err(|_| DevS3Error::NoSuchUpload(id.to_owned()))?;
        if let Some(old) = self.with_upload(key, id, |upload| upload.take_part(number, part))? {
            // The upload may be completed or aborted at this moment, which removes its files.
            let _ = fs::remove_file(self.upload_dir(id).join(old));
        }
        Ok(hex(&md5))
    }

    /// Joins the parts `(number, ETag)` into the object, whose ETag is the MD5 of the parts' MD5s, `-` and their
    /// number.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchUpload`], [`DevS3Error::InvalidPart`], [`DevS3Error::InvalidPartOrder`],
    /// [`DevS3Error::PartTooSmall`] and those of [`Bucket::commit`].
    pub fn complete_upload(
        &self,
        key: &str,
        id: &str,
        listed: &[(u32, String)],
        condition: &PutCondition,
    ) -> Result<Arc<Object>, DevS3Error> {
        let (parts, attributes) = self.with_upload(key, id, |upload| {
            let parts = check_parts(&upload.parts, listed)?;
            Ok::<_, DevS3Error>((parts, upload.record.attributes.clone().unwrap_or_default()))
        })??;
        let dir = self.upload_dir(id);
        let mut draft = Draft::create(self.tmp.path())?;
        let mut digest = Md5::new();
        for (number, part) in &parts {
            let path = dir.join(part.file_name(*number));
            // Not there: replaced, or the upload was completed or aborted by another request.
            let file = File::open(&path).map_err(|_| DevS3Error::InvalidPart(*number))?;
            draft.append(&file, 0, part.size)?;
            digest.update(part.md5);
        }
        let etag = format!("{}-{}", hex(&digest.finalize()), parts.len());
        let object = self.commit(draft, key, Version { etag, attributes }, condition)?;
        self.remove_upload(id)?;
        Ok(object)
    }

    /// Drops an upload and its parts.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchUpload`], [`DevS3Error::Io`].
    pub fn abort_upload(&self, key: &str, id: &str) -> Result<(), DevS3Error> {
        self.with_upload(key, id, |_| ())?;
        self.remove_upload(id)
    }

    /// Up to `limit` parts with numbers above `after`, and whether more follow.
    ///
    /// # Errors
    /// [`DevS3Error::NoSuchUpload`].
    pub fn list_parts(
        &self,
        key: &str,
        id: &str,
        after: u32,
        limit: usize,
    ) -> Result<(Vec<PartInfo>, bool), DevS3Error> {
        self.with_upload(key, id, |upload| {
            let mut parts = upload.parts.range(after.saturating_add(1)..).map(|(number, part)| PartInfo {
                number: *number,
                size: part.size,
                etag: hex(&part.md5),
                modified_s: part.modified_s,
            });
            let listed: Vec<_> = parts.by_ref().take(limit).collect();
            (listed, parts.next().is_some())
        })
    }

    /// Up to `limit` uploads of keys with `prefix`, after the key and id given.
    pub fn list_uploads(&self, prefix: &str, after: (&str, &str), limit: usize) -> UploadPage {
        let uploads = self.uploads.lock();
        let mut all: Vec<_> = uploads
            .iter()
            .filter(|(_, upload)| upload.record.key.starts_with(prefix))
            .filter(|(id, upload)| {
                let key = upload.record.key.as_str();
                key > after.0 || (key == after.0 && !after.1.is_empty() && id.as_str() > after.1)
            })
            .map(|(id, upload)| UploadInfo {
                key: upload.record.key.clone(),
                id: id.clone(),
                initiated_s: upload.record.initiated_s,
            })
            .collect();
        all.sort_by(|one, other| (&one.key, &one.id).cmp(&(&other.key, &other.id)));
        let truncated = all.len() > limit;
        all.truncate(limit);
        UploadPage { uploads: all, truncated }
    }

    fn with_upload<T>(&self, key: &str, id: &str, act: impl FnOnce(&mut Upload) -> T) -> Result<T, DevS3Error> {
        let mut uploads = self.uploads.lock();
        let upload = uploads.get_mut(id).filter(|upload| upload.record.key == key);
        upload.map(act).ok_or_else(|| DevS3Error::NoSuchUpload(id.to_owned()))
    }

    fn remove_upload(&self, id: &str) -> Result<(), DevS3Error> {
        if self.uploads.lock().remove(id).is_none() {
            return Ok(());
        }
        let (dir, gone) = (self.upload_dir(id), self.tmp.path());
        fs::rename(&dir, &gone).map_err(DevS3Error::io("remove", &dir))?;
        fs::remove_dir_all(&gone).map_err(DevS3Error::io("remove", &gone))
    }

    fn upload_dir(&self, id: &str) -> PathBuf {
        self.dir.join("uploads").join(id)
    }
}

fn check_parts(present: &BTreeMap<u32, Part>, listed: &[(u32, String)]) -> Result<Vec<(u32, Part)>, DevS3Error> {
    if listed.is_empty() {
        return Err(DevS3Error::InvalidPart(1));
    }
    if !listed.is_sorted_by(|one, next| one.0 < next.0) {
        return Err(DevS3Error::InvalidPartOrder);
    }
    let mut parts = Vec::with_capacity(listed.len());
    for (position, (number, etag)) in listed.iter().enumerate() {
        let part = present.get(number).filter(|part| hex(&part.md5) == *etag);
        let part = part.ok_or(DevS3Error::InvalidPart(*number))?;
        if part.size < PART_MIN_BYTES && position + 1 < listed.len() {
            return Err(DevS3Error::PartTooSmall { number: *number, size: part.size });
        }
        parts.push((*number, part.clone()));
    }
    Ok(parts)
}
