//! ListObjects in both versions, and ListObjectVersions. A continuation token is the last name of the page before, in
//! base64.

use std::sync::Arc;

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::backend::Backend;
use super::reply::{etag, timestamp};
use crate::store::{self, ListPage, ListQuery, VersionRow};

/// Names on a page at most, whatever is asked for.
const PAGE_MAX: i32 = 1000;
/// What `encoding-type=url` leaves as it is. A space becomes `%20`, which clients decode whether or not they take `+`
/// for one.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');

/// How names are written in an answer.
#[derive(Clone, Copy)]
enum Encoding {
    Plain,
    Url,
}

impl Encoding {
    fn of(wanted: Option<&EncodingType>) -> S3Result<Self> {
        match wanted.map(EncodingType::as_str) {
            None => Ok(Self::Plain),
            Some(EncodingType::URL) => Ok(Self::Url),
            Some(_) => Err(s3_error!(InvalidArgument, "encoding-type takes only url.")),
        }
    }

    fn write(self, name: &str) -> String {
        match self {
            Self::Plain => name.to_owned(),
            Self::Url => utf8_percent_encode(name, PLAIN).to_string(),
        }
    }

    fn write_all<'n>(self, name: Option<&'n String>) -> Option<String> {
        name.map(|name: &'n String| self.write(name))
    }
}

fn page_size(wanted: Option<i32>) -> S3Result<i32> {
    let wanted = wanted.unwrap_or(PAGE_MAX);
    if wanted < 0 {
        return Err(s3_error!(InvalidArgument, "max-keys must not be negative."));
    }
    Ok(wanted.min(PAGE_MAX))
}

/// The bucket, when its profile has the next page begin.
async fn paced(backend: &Backend, bucket: &str, prefix: Option<&str>) -> S3Result<Arc<store::Bucket>> {
    let bucket = backend.bucket(bucket)?;
    let latency = bucket.admit_page(prefix.unwrap_or_default())?;
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    Ok(bucket)
}

fn token_of(name: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(name)
}

fn name_of(token: &str) -> S3Result<String> {
    let name = BASE64_URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    name.ok_or_else(|| s3_error!(InvalidArgument, "The continuation token provided is incorrect."))
}

fn objects(page: &ListPage, encoding: Encoding) -> ObjectList {
    let object = |(key, object): &(String, Arc<store::Object>)| Object {
        key: Some(encoding.write(key)),
        size: Some(object.size as i64),
        e_tag: Some(etag(&object.etag)),
        last_modified: Some(timestamp(object.modified_s)),
        storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
        ..Default::default()
    };
    page.objects.iter().map(object).collect()
}

pub(super) async fn list_objects_v2(backend: &Backend, input: ListObjectsV2Input) -> S3Result<ListObjectsV2Output> {
    let bucket = paced(backend, &input.bucket, input.prefix.as_deref()).await?;
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let limit = page_size(input.max_keys)?;
    let resumed = input.continuation_token.as_deref().map(name_of).transpose()?;
    let page = bucket.list(&ListQuery {
        prefix: input.prefix.as_deref().unwrap_or_default(),
        delimiter: input.delimiter.as_deref().unwrap_or_default(),
        after: resumed.as_deref().or(input.start_after.as_deref()).unwrap_or_default(),
        limit: limit as usize,
    });
    let common = |prefix: &String| CommonPrefix { prefix: Some(encoding.write(prefix)) };
    let output = ListObjectsV2Output {
        name: Some(input.bucket),
        prefix: Some(encoding.write(input.prefix.as_deref().unwrap_or_default())),
        delimiter: encoding.write_all(input.delimiter.as_ref()),
        start_after: encoding.write_all(input.start_after.as_ref()),
        max_keys: Some(limit),
        key_count: Some((page.objects.len() + page.prefixes.len()) as i32),
        contents: Some(objects(&page, encoding)),
        common_prefixes: Some(page.prefixes.iter().map(common).collect()),
        is_truncated: Some(page.next.is_some()),
        continuation_token: input.continuation_token,
        next_continuation_token: page.next.as_deref().map(token_of),
        encoding_type: input.encoding_type,
        ..Default::default()
    };
    Ok(output)
}

/// A page as of version 2; the name that the next one begins after is not hidden in a token.
pub(super) async fn list_objects(backend: &Backend, input: ListObjectsInput) -> S3Result<ListObjectsOutput> {
    let page = list_objects_v2(backend, input.into()).await?;
    let encoding = Encoding::of(page.encoding_type.as_ref())?;
    let next = page.next_continuation_token.as_deref().map(name_of).transpose()?;
    let output = ListObjectsOutput {
        name: page.name,
        prefix: page.prefix,
        marker: Some(page.start_after.unwrap_or_default()),
        delimiter: page.delimiter,
        max_keys: page.max_keys,
        contents: page.contents,
        common_prefixes: page.common_prefixes,
        is_truncated: page.is_truncated,
        next_marker: next.map(|name| encoding.write(&name)),
        encoding_type: page.encoding_type,
        ..Default::default()
    };
    Ok(output)
}

/// One page, of which nothing follows.
pub(super) async fn list_object_versions(
    backend: &Backend,
    input: ListObjectVersionsInput,
) -> S3Result<ListObjectVersionsOutput> {
    let begins_later = input.key_marker.is_some_and(|marker| !marker.is_empty());
    if begins_later || input.delimiter.is_some_and(|delimiter| !delimiter.is_empty()) {
        return Err(s3_error!(NotImplemented, "Versions are listed in one page, and without a delimiter."));
    }
    let prefix = input.prefix.unwrap_or_default();
    let bucket = paced(backend, &input.bucket, Some(prefix.as_str())).await?;
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let limit = page_size(input.max_keys)?;
    let (rows, is_truncated) = bucket.list_versions(&prefix, limit as usize);
    let (mut versions, mut delete_markers) = (ObjectVersionList::new(), DeleteMarkers::new());
    for VersionRow { key, version, is_latest } in rows {
        let (key, id) = (Some(encoding.write(&key)), Some(version.version_id()));
        let (is_latest, last_modified) = (Some(is_latest), Some(timestamp(version.modified_s)));
        if version.is_deleted() {
            let marker = DeleteMarkerEntry { key, version_id: id, is_latest, last_modified, ..Default::default() };
            delete_markers.push(marker);
            continue;
        }
        versions.push(ObjectVersion {
            key,
            version_id: id,
            is_latest,
            last_modified,
            e_tag: Some(etag(&version.etag)),
            size: Some(version.size as i64),
            storage_class: Some(ObjectVersionStorageClass::from_static(ObjectVersionStorageClass::STANDARD)),
            ..Default::default()
        });
    }
    let output = ListObjectVersionsOutput {
        name: Some(input.bucket),
        prefix: Some(encoding.write(&prefix)),
        max_keys: Some(limit),
        versions: Some(versions),
        delete_markers: Some(delete_markers),
        is_truncated: Some(is_truncated),
        encoding_type: input.encoding_type,
        ..Default::default()
    };
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_and_garbage_is_refused() {
        for name in ["", "a", "a b/é/", "\u{10ffff}"] {
            assert_eq!(name_of(&token_of(name)).unwrap(), name);
        }
        for garbage in ["a", "zz", "ff", "é", "0é0"] {
            assert!(name_of(garbage).is_err(), "{garbage}");
        }
    }

    #[test]
    fn url_encoding_keeps_slashes() {
        assert_eq!(Encoding::Url.write("a b/+%é\n~"), "a%20b/%2B%25%C3%A9%0A~");
        assert_eq!(Encoding::Plain.write("a b"), "a b");
    }
}
