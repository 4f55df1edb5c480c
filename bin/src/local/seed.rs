//! `cv local seed`: a directory of files into a bucket of the cluster's object store.

use std::fs;
use std::path::{Path, PathBuf};

use cavern_plain_s3::PlainS3;
use cavern_proto::{Scheme, StoreUri};
use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::record::S3;
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

/// Objects on their way at a time.
const UPLOADS: usize = 16;

/// What has been copied.
#[derive(Default)]
pub struct Copied {
    pub objects: u64,
    pub bytes: u64,
}

/// Copies every file below `source` to `target` (`s3://BUCKET[/PREFIX]`), under its relative path. Makes the bucket.
pub fn seed(s3: &S3, source: &Path, target: &str) -> Result<Copied, CliError> {
    let wrong = |reason: &str| {
        let form = Scheme::S3.form();
        CliError::Usage(format!("{target} is no bucket of the object store ({reason}): write it as {form}"))
    };
    let (bucket, prefix) = match StoreUri::parse(target).map_err(|error| wrong(error.reason))? {
        StoreUri::Bucket { scheme: Scheme::S3, name, prefix } => (name, prefix),
        _ => return Err(wrong("its scheme is another one")),
    };
    let files = files_below(source)?;
    let client = PlainS3::new(&format!("http://{}", s3.listen), &s3.access_key, &s3.secret_key);
    let client = client.context("cannot speak to the object store")?;
    block_on(async {
        client.create_bucket(&bucket).await.map_err(|error| CliError::Unreachable(error.to_string()))?;
        let uploads = files.iter().map(|file| upload(&client, &bucket, &prefix, source, file));
        stream::iter(uploads)
            .buffer_unordered(UPLOADS)
            .try_fold(Copied::default(), async |copied, bytes| {
                Ok(Copied { objects: copied.objects + 1, bytes: copied.bytes + bytes })
            })
            .await
    })
}

async fn upload(client: &PlainS3, bucket: &str, prefix: &str, source: &Path, path: &Path) -> Result<u64, CliError> {
    let relative = path.strip_prefix(source).unwrap_or(path).to_str();
    let name = relative.ok_or_else(|| CliError::Failed(format!("{}: the name is not UTF-8", path.display())))?;
    let key = format!("{prefix}{name}");
    let unread = format!("cannot read {}", path.display());
    let file = tokio::fs::File::open(path).await.context(&unread)?;
    let bytes = file.metadata().await.context(&unread)?.len();
    let stored = client.put_file(bucket, &key, file, bytes).await;
    stored.context(format_args!("cannot store {}", path.display()))?;
    Ok(bytes)
}

fn files_below(source: &Path) -> Result<Vec<PathBuf>, CliError> {
    let mut files = Vec::new();
    let mut pending = vec![source.to_owned()];
    while let Some(directory) = pending.pop() {
        let what = format!("cannot list {}", directory.display());
        for entry in fs::read_dir(&directory).context(&what)? {
            let entry = entry.context(&what)?;
            let kind = entry.file_type().context(&what)?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_no_bucket_is_told_the_form_of_one() {
        let [listen, access_key, secret_key] = ["127.0.0.1:1", "", ""].map(str::to_owned);
        let s3 = S3 { listen, admin: None, access_key, secret_key, root: PathBuf::new() };
        for target in ["bucket/prefix", "gs://bucket", "file:///tree", "memory://name", "s3://", "s3://a b"] {
            let Err(CliError::Usage(text)) = seed(&s3, Path::new("nowhere"), target) else {
                panic!("{target} is taken")
            };
            assert!(text.starts_with(&format!("{target} is no bucket of the object store (")), "{text}");
            assert!(text.ends_with(": write it as s3://BUCKET[/PREFIX]"), "{text}");
        }
    }
}
