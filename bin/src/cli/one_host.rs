//! `cv fuse s3://BUCKET/PREFIX DIR`: a bucket as a directory of this host, without a configuration and a cluster.

mod options;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use cavern_conf::{AllowedEndpoint, Interval, schema};
use cavern_proto::master::{AccessMode, AttributePolicy, Consistency, Existing, Mount, Names, WriteType};
use cavern_proto::s3_options::{ACCESS, ANONYMOUS, ENDPOINT, PROFILE, SOURCE, STS_ENDPOINT};
use cavern_proto::{Scheme, StoreUri, azblob_options, gs_options};
use cavern_ufs::{Contents, Ufs, UfsError, found_options};
use clap::Args;
use tokio::time::{Instant, sleep, timeout};

pub use self::options::helper_arguments;
use self::options::{MountWords, cache_dir, default_cache_dir};
use super::mount::{CredentialArgs, METADATA_TTL, WriteTypeArg, key_value};
use crate::console;
use crate::error::CliError;
use crate::local::one_host::{CacheDir, OneHost, configuration};
use crate::runtime::block_on;

/// For the bucket to answer before anything is started: in one of two attempts, and in both. Ten seconds are promised,
/// of which a busy host has two to start and end this process.
const ATTEMPT_LIMIT: Interval = Interval::millis(3900);
const CONNECT_LIMIT: Interval = Interval::millis(2000);
const REACH_LIMIT: Duration = Duration::from_secs(8);
/// Between two attempts of one who waits for it.
const REACH_PAUSE: Duration = Duration::from_secs(1);
const BLOCK_BYTES: u64 = 64 << 20;

#[derive(Args)]
pub struct OneHostArgs {
    /// Show this bucket, without a cluster: s3://BUCKET[/PREFIX], or another that `cv mount` takes.
    #[arg(value_name = "URI", requires = "mount_point", conflicts_with = "conf")]
    uri: Option<String>,
    /// Where to show it; made if it is not there.
    #[arg(value_name = "DIR")]
    mount_point: Option<PathBuf>,
    /// Where what has been read is kept, also for the next time, and how much of it [default: 10GiB in a directory of
    /// its own in ~/.cache/cavern, or in /var/cache/cavern for root].
    #[arg(long, value_name = "DIR[:SIZE]", requires = "uri", value_parser = cache_dir)]
    cache: Option<CacheDir>,
    /// Have the mount written, too, and say which side is the truth [default: read only; cache-mode with -o rw].
    #[arg(long, value_enum, requires = "uri")]
    write_type: Option<WriteTypeArg>,
    /// Mount options as in /etc/fstab, with commas in between; several times.
    #[arg(short = 'o', value_name = "OPTION,…", requires = "uri")]
    mount_options: Vec<String>,
    /// Option of the bucket, as `cv mount` takes them; several times.
    #[arg(short = 'c', long = "option", value_name = "KEY=VALUE", requires = "uri", value_parser = key_value)]
    bucket_options: Vec<(String, String)>,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// In cache-mode: how long a directory's listing is trusted [default: 60s].
    #[arg(long, value_name = "TIME", requires = "uri")]
    metadata_ttl: Option<Interval>,
    /// Stay until the mount is gone, with the log on stderr; SIGTERM and SIGINT unmount.
    #[arg(short, long, requires = "uri")]
    foreground: bool,
    /// Wait for a bucket that cannot be reached yet.
    #[arg(long, requires = "uri")]
    wait: bool,
}

impl OneHostArgs {
    pub fn is_given(&self) -> bool {
        self.uri.is_some()
    }

    /// Makes the mount, which can be used when this returns; or, in the foreground, gives what is to serve it.
    pub fn run(self) -> Result<Option<(OneHost, Mount)>, CliError> {
        let began = Instant::now();
        let words = MountWords::parse(&self.mount_options)?;
        let uri = self.uri.as_deref().unwrap_or_default();
        let uri = StoreUri::parse(uri).map_err(|error| CliError::Usage(error.to_string()))?;
        let mount = self.mount(&uri, &words)?;
        let mut config = configuration(words.settings.clone())?;
        config.fuse.path.clone_from(&mount.path);
        config.fuse.source.clone_from(&mount.uri);
        let mount_point = self.mount_point.clone().unwrap_or_default();
        allow(&mut config.ufs, &uri, &mount.options);
        let cache = match self.cache.clone().or_else(|| words.cache.clone()) {
            Some(cache) => cache,
            None => default_cache_dir(&mount.uri, &mount_point)?,
        };
        let contents = block_on(reach(&mount, &config.ufs, self.wait || words.is_patient))?;
        if contents == Contents::Nothing {
            console::remark(format_args!(
                "nothing is there yet under {}: see that it is spelled right if there should be objects",
                mount.uri
            ));
        }
        let host = OneHost::prepare(&cache, &mount_point, config)?;
        if self.foreground {
            return Ok(Some((host, mount)));
        }
        host.start(&mount)?;
        let how = if mount.access_mode() == AccessMode::ReadOnly { "read-only, " } else { "" };
        let (at, kept) = (host.mount_point().display(), host.directory().display());
        console::line(format_args!(
            "{} is mounted at {at} ({how}up to {} are kept in {kept}) after {:.1} s; `umount {at}` ends it",
            mount.uri,
            cache.size,
            began.elapsed().as_secs_f64()
        ))?;
        Ok(None)
    }

    /// The mount in the namespace of this host.
    fn mount(&self, uri: &StoreUri, words: &MountWords) -> Result<Mount, CliError> {
        let (write_type, access_mode) = modes(self.write_type.or(words.write_type), words.access)?;
        Ok(Mount {
            path: format!("/{}", uri.bucket().unwrap_or("data")),
            uri: uri.to_string(),
            write_type: write_type.into(),
            options: self.options(uri.scheme(), words)?,
            block_size: BLOCK_BYTES,
            replicas: 1,
            metadata_ttl_ms: self.metadata_ttl.unwrap_or(METADATA_TTL).as_millis(),
            consistency: Consistency::Ttl.into(),
            access_mode: access_mode.into(),
            attributes: AttributePolicy::Refuse.into(),
            existing: Existing::None.into(),
            names: Names::Delegated.into(),
            ..Mount::default()
        })
    }

    /// The options of the bucket. What is said nowhere else comes from where other programs find it.
    fn options(&self, scheme: Scheme, words: &MountWords) -> Result<HashMap<String, String>, CliError> {
        let mut options = self.credentials.options_with(&self.bucket_options)?;
        // The last of those of one name.
        for (name, value) in words.bucket.iter().rev().cloned() {
            options.entry(format!("{}.{name}", scheme.name())).or_insert(value);
        }
        complete(scheme, &mut options);
        Ok(options)
    }
}

/// Adds what programs for AWS find by themselves: region and endpoint, and that credentials are looked for.
pub fn complete(scheme: Scheme, options: &mut HashMap<String, String>) {
    if scheme != Scheme::S3 {
        return;
    }
    for (key, value) in found_options(options.get(PROFILE).map(String::as_str)) {
        options.entry(key.to_owned()).or_insert(value);
    }
    if ![ACCESS, PROFILE, SOURCE, ANONYMOUS].into_iter().any(|name| options.contains_key(name)) {
        options.insert(SOURCE.to_owned(), "default".to_owned());
    }
}

/// What a mount is: read only unless somebody says otherwise.
fn modes(write_type: Option<WriteTypeArg>, access: Option<AccessMode>) -> Result<(WriteType, AccessMode), CliError> {
    let is_read_only = access == Some(AccessMode::ReadOnly) || (access.is_none() && write_type.is_none());
    match write_type.unwrap_or(WriteTypeArg::CacheMode) {
        WriteTypeArg::FsMode if is_read_only => {
            let text = "an fs-mode mount is there to be written to: leave out ro, or --write-type fs-mode";
            Err(CliError::Usage(text.to_owned()))
        }
        WriteTypeArg::FsMode => Ok((WriteType::FsMode, AccessMode::Unspecified)),
        WriteTypeArg::CacheMode if is_read_only => Ok((WriteType::CacheMode, AccessMode::ReadOnly)),
        WriteTypeArg::CacheMode => Ok((WriteType::CacheMode, AccessMode::ReadWrite)),
    }
}

/// Lets the processes of this host go where its user has said that they are to go.
pub fn allow(ufs: &mut schema::Ufs, uri: &StoreUri, options: &HashMap<String, String>) {
    if let StoreUri::File { directory } = uri {
        ufs.file_roots.push(PathBuf::from(directory));
    }
    let names = [ENDPOINT, STS_ENDPOINT, gs_options::ENDPOINT, azblob_options::ENDPOINT];
    let endpoints = names.map(|name| options.get(name).cloned());
    let endpoints = endpoints.into_iter().chain([std::env::var("AWS_ENDPOINT_URL_STS").ok()]).flatten();
    // One that is none is refused where it is used, by its own name.
    ufs.endpoints.extend(endpoints.filter(|endpoint| AllowedEndpoint::parse(endpoint).is_ok()));
}

/// Asks the bucket for one name, before anything is started.
///
/// # Errors
/// What it has said, within ten seconds; with `is_patient` only what does not pass.
async fn reach(mount: &Mount, conf: &schema::Ufs, is_patient: bool) -> Result<Contents, CliError> {
    let conf = schema::Ufs {
        connect_timeout: CONNECT_LIMIT,
        request_timeout: ATTEMPT_LIMIT,
        io_timeout: ATTEMPT_LIMIT,
        retries: 1,
        ..conf.clone()
    };
    let bucket = Ufs::open(&mount.uri, &mount.options, &conf).map_err(refused)?;
    let mut has_said = false;
    loop {
        let cause = match timeout(REACH_LIMIT, bucket.check()).await {
            Ok(Ok(probe)) => return Ok(probe.contents),
            Ok(Err(error)) if is_patient && error.is_outage() => error.to_string(),
            Ok(Err(error)) => return Err(refused(error)),
            Err(_late) => {
                let (uri, seconds) = (&mount.uri, REACH_LIMIT.as_secs());
                let cause = format!("{uri} has not answered for {seconds} s: check the endpoint and the network");
                if !is_patient {
                    return Err(CliError::Unreachable(cause));
                }
                cause
            }
        };
        if !std::mem::replace(&mut has_said, true) {
            console::remark(format_args!("{cause}; waiting for it"));
        }
        sleep(REACH_PAUSE).await;
    }
}

fn refused(error: UfsError) -> CliError {
    let text = match error.is_outage() {
        true => format!("{error}; --wait waits for it"),
        false => error.to_string(),
    };
    match error {
        UfsError::NoBucket { .. } => CliError::NotFound(text),
        UfsError::Invalid { .. } | UfsError::NotAllowed { .. } => CliError::Usage(text),
        _ if error.is_outage() => CliError::Unreachable(text),
        _ => CliError::Failed(text),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_mount_is_read_unless_somebody_says_otherwise() {
        use AccessMode::{ReadOnly, ReadWrite, Unspecified};
        use WriteTypeArg::{CacheMode, FsMode};

        for (write_type, access, expected) in [
            (None, None, (WriteType::CacheMode, ReadOnly)),
            (None, Some(ReadWrite), (WriteType::CacheMode, ReadWrite)),
            (Some(CacheMode), None, (WriteType::CacheMode, ReadWrite)),
            (Some(CacheMode), Some(ReadOnly), (WriteType::CacheMode, ReadOnly)),
            (Some(FsMode), None, (WriteType::FsMode, Unspecified)),
        ] {
            assert_eq!(modes(write_type, access).unwrap(), expected);
        }
        assert!(modes(Some(FsMode), Some(ReadOnly)).is_err());
    }

    #[test]
    fn the_host_goes_where_its_user_says() {
        let mut ufs = schema::Ufs::default();
        for name in [ENDPOINT, azblob_options::ENDPOINT] {
            let options = [(name.to_owned(), "http://127.0.0.1:9000".to_owned())].into();
            allow(&mut ufs, &StoreUri::File { directory: "/data".to_owned() }, &options);
            assert_eq!(std::mem::take(&mut ufs.endpoints)[0], "http://127.0.0.1:9000");
        }
        assert_eq!(ufs.file_roots[0], Path::new("/data"));
    }
}
