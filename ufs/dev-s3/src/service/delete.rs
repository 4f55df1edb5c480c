//! Deleting one key or a batch. What is not there counts as deleted. Versions are kept or not, and none is deleted by
//! its id.

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::backend::{Backend, on_blocking_thread};

/// Keys of one batch at most.
const BATCH_MAX: usize = 1000;

pub(super) async fn delete_object(backend: &Backend, input: DeleteObjectInput) -> S3Result<DeleteObjectOutput> {
    if input.version_id.is_some() {
        return Err(s3_error!(NotImplemented, "Versions are not deleted by their ids."));
    }
    let etag = input.if_match.map(|condition| condition.as_etag().map_or("*", |etag| etag.value()).to_owned());
    let bucket = backend.bucket(&input.bucket)?;
    on_blocking_thread(move || bucket.delete(&input.key, etag.as_deref())).await?;
    Ok(DeleteObjectOutput::default())
}

pub(super) async fn delete_objects(backend: &Backend, input: DeleteObjectsInput) -> S3Result<DeleteObjectsOutput> {
    if input.delete.objects.len() > BATCH_MAX {
        return Err(s3_error!(MalformedXML, "More than {BATCH_MAX} keys in one request."));
    }
    if input.delete.objects.iter().any(|object| object.version_id.is_some()) {
        return Err(s3_error!(NotImplemented, "Versions are not deleted by their ids."));
    }
    let quiet = input.delete.quiet.unwrap_or(false);
    let bucket = backend.bucket(&input.bucket)?;
    let work = move || {
        let (mut deleted, mut errors) = (DeletedObjects::new(), Errors::new());
        for object in input.delete.objects {
            let etag = object.e_tag.as_ref().map(ETag::value);
            match bucket.delete(&object.key, etag) {
                Ok(()) => deleted.push(DeletedObject { key: Some(object.key), ..Default::default() }),
                Err(error) => {
                    let message = error.to_string();
                    let code = s3s::S3Error::from(error).code().as_str().to_owned();
                    let error =
                        Error { key: Some(object.key), code: Some(code), message: Some(message), ..Default::default() };
                    errors.push(error);
                }
            }
        }
        Ok((deleted, errors))
    };
    let (deleted, errors) = on_blocking_thread(work).await?;
    let output = DeleteObjectsOutput {
        deleted: (!quiet).then_some(deleted),
        errors: (!errors.is_empty()).then_some(errors),
        ..Default::default()
    };
    Ok(output)
}
