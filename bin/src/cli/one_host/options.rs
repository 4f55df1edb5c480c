//! `-o OPTION,…` and `--cache DIR:SIZE` of `cv fuse`, and what mount(8) says to `mount.cavern`: that is this executable
//! under another name.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use cavern_conf::ByteSize;
use cavern_proto::master::AccessMode;
use cavern_proto::{Scheme, StoreUri};
use clap::ValueEnum as _;
use rustix::process::geteuid;

use crate::cli::mount::WriteTypeArg;
use crate::error::CliError;
use crate::local::one_host::CacheDir;

/// The name under which mount(8) looks for this executable: `mount -t cavern`.
const HELPER: &str = "mount.cavern";
/// How much is kept where nobody says so.
const CACHE_SIZE: ByteSize = ByteSize::gib(10);
/// Words about when and by whom something is mounted, which mount(8) and systemd heed; and those that ask for what a
/// mount of Cavern is anyway, or cannot be.
const HEEDED_BY_OTHERS: &str = "_netdev async atime auto defaults dev diratime dirsync group lazytime loud mand \
                                noatime noauto nodev nodiratime nofail nogroup nolazytime nomand noowner norelatime \
                                nostrictatime nosuid nouser nousers owner relatime silent strictatime suid sync user \
                                users";
/// How those begin that have a value.
const OTHERS_BEGIN: [&str; 4] = ["x-", "X-", "comment=", "user="];

/// What `-o` says.
#[derive(Default, Debug)]
pub struct MountWords {
    /// `ro` or `rw`: the last of them.
    pub access: Option<AccessMode>,
    pub write_type: Option<WriteTypeArg>,
    pub cache: Option<CacheDir>,
    /// `wait`.
    pub is_patient: bool,
    /// Options of the bucket, without the name of its store before them: `endpoint_url`.
    pub bucket: Vec<(&'static str, String)>,
    /// Of the configuration: as in an environment.
    pub settings: Vec<(String, String)>,
}

impl MountWords {
    /// # Errors
    /// `Usage`: a word that is none, or a value that is wrong.
    pub fn parse(options: &[String]) -> Result<Self, CliError> {
        let mut words = Self::default();
        for word in options.iter().flat_map(|options| options.split(',')).filter(|word| !word.is_empty()) {
            words.take(word).map_err(|wrong| CliError::Usage(format!("mount option {word}: {wrong}")))?;
        }
        Ok(words)
    }

    fn take(&mut self, word: &str) -> Result<(), String> {
        let mut set = |key: &str, value: &str| self.settings.push((format!("CV_FUSE__{key}"), value.to_owned()));
        let mut of_bucket = |key: &'static str, value: &str| self.bucket.push((key, value.to_owned()));
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        match (name, value) {
            ("ro", None) => self.access = Some(AccessMode::ReadOnly),
            ("rw", None) => self.access = Some(AccessMode::ReadWrite),
            ("wait", None) => self.is_patient = true,
            ("allow_other", None) => set("ALLOW_OTHER", "true"),
            ("exec", None) => set("EXEC", "true"),
            ("noexec", None) => set("EXEC", "false"),
            ("anonymous", None) => of_bucket("anonymous", "true"),
            ("uid", Some(id)) => set("UID", &number(id, 10)?.to_string()),
            ("gid", Some(id)) => set("GID", &number(id, 10)?.to_string()),
            ("file_mode", Some(mode)) => set("FILE_MODE", &number(mode, 8)?.to_string()),
            ("dir_mode", Some(mode)) => set("DIR_MODE", &number(mode, 8)?.to_string()),
            ("umask", Some(mask)) => {
                let mask = number(mask, 8)?;
                set("FILE_MODE", &(0o666 & !mask).to_string());
                set("DIR_MODE", &(0o777 & !mask).to_string());
            }
            ("cache", Some(text)) => self.cache = Some(cache_dir(text)?),
            ("write_type", Some(text)) => self.write_type = Some(WriteTypeArg::from_str(text, false)?),
            ("endpoint_url", Some(url)) => of_bucket("endpoint_url", url),
            ("region", Some(region)) => of_bucket("region_name", region),
            ("profile", Some(profile)) => of_bucket("credentials.profile", profile),
            ("account", Some(account)) => of_bucket("account", account),
            _ if HEEDED_BY_OTHERS.split(' ').any(|heeded| heeded == word) => {}
            _ if OTHERS_BEGIN.iter().any(|begin| word.starts_with(begin)) => {}
            _ => {
                let known = "ro, rw, wait, allow_other, exec, noexec, anonymous, uid=, gid=, umask=, file_mode=, \
                             dir_mode=, cache=DIR:SIZE, write_type=, endpoint_url=, region=, profile=, account=";
                return Err(format!("there is none of this name: use {known}, or those of mount(8)"));
            }
        }
        Ok(())
    }
}

fn number(text: &str, radix: u32) -> Result<u32, String> {
    let base = if radix == 8 { "an octal number, as 022" } else { "a number" };
    u32::from_str_radix(text, radix).map_err(|_| format!("write {base}"))
}

/// `DIR` or `DIR:SIZE`.
///
/// # Errors
/// What would be right.
pub fn cache_dir(text: &str) -> Result<CacheDir, String> {
    let is_size = |tail: &str| tail.starts_with(|first: char| first.is_ascii_digit());
    let (directory, size) = match text.rsplit_once(':').filter(|(_, tail)| is_size(tail)) {
        Some((directory, size)) => (directory, ByteSize::from_str(size).map_err(|wrong| format!("the size {wrong}"))?),
        None => (text, CACHE_SIZE),
    };
    if directory.is_empty() || size.bytes() == 0 {
        return Err("write it as DIR:SIZE, as /var/cache/images:50GiB".to_owned());
    }
    let directory = std::path::absolute(directory).map_err(|error| error.to_string())?;
    Ok(CacheDir { directory, size })
}

/// A directory for what is mounted at a place, the same each time.
///
/// # Errors
/// `Usage`: this user has no home.
pub fn default_cache_dir(uri: &str, mount_point: &Path) -> Result<CacheDir, CliError> {
    let own = || {
        let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        named.or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
    };
    let top = if geteuid().is_root() { Some(PathBuf::from("/var/cache")) } else { own() };
    let none = || CliError::Usage("this user has no home directory: name one for the cache with --cache".to_owned());
    let mount_point = std::path::absolute(mount_point).map_err(|error| CliError::Usage(error.to_string()))?;
    let place = format!("{uri}\0{}", mount_point.display());
    let parsed = StoreUri::parse(uri).ok();
    let name = parsed.as_ref().and_then(StoreUri::bucket).or(Scheme::of(uri).map(Scheme::name)).unwrap_or("data");
    // Short enough for the sockets below.
    let name: String = name.chars().take(24).collect();
    let mark = blake3::hash(place.as_bytes()).to_hex();
    let directory = top.ok_or_else(none)?.join("cavern").join(format!("{name}-{}", &mark[..8]));
    Ok(CacheDir { directory, size: CACHE_SIZE })
}

/// The arguments of this process. Those of mount(8), which begin with the name of its helper, become the ones of
/// `cv fuse`; `None` where mount(8) wants to know only what would be done (`mount --fake`).
///
/// mount(8) says `rw` where nobody has said anything, so that this word counts for nothing here.
///
/// # Errors
/// `Usage`: mount(8) asks for what is not offered.
pub fn helper_arguments(arguments: Vec<OsString>) -> Result<Option<Vec<OsString>>, CliError> {
    let is_helper = |name: &OsString| Path::new(name).file_name().is_some_and(|name| name == HELPER);
    if !arguments.first().is_some_and(is_helper) {
        return Ok(Some(arguments));
    }
    let mut translated: Vec<OsString> = ["cv", "fuse"].map(OsString::from).to_vec();
    let mut arguments = arguments.into_iter().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("-o") => {
                let options = arguments.next().unwrap_or_default().to_string_lossy().into_owned();
                let words: Vec<&str> = options.split(',').filter(|word| *word != "rw").collect();
                translated.push("-o".into());
                translated.push(words.join(",").into());
            }
            // The type, which brought mount(8) here.
            Some("-t") => _ = arguments.next(),
            Some("-N") => {
                let text = "mount.cavern: -N is not offered: use `nsenter --mount` for another mount namespace";
                return Err(CliError::Usage(text.to_owned()));
            }
            Some(flags) if flags.len() > 1 && flags.starts_with('-') && flags[1..].chars().all(is_flag) => {
                if flags.contains('f') {
                    return Ok(None);
                }
            }
            _ => translated.push(argument),
        }
    }
    Ok(Some(translated))
}

/// Of mount(8): tolerant, fake, without mtab, talkative.
fn is_flag(flag: char) -> bool {
    matches!(flag, 's' | 'f' | 'n' | 'v')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> MountWords {
        MountWords::parse(&[text.to_owned()]).unwrap()
    }

    #[test]
    fn words_of_fstab_are_taken_or_left_to_others() {
        let words = parse(
            "defaults,_netdev,x-systemd.automount,noauto,nofail,user,noexec,nosuid,nodev,uid=7,umask=027,\
             cache=/c:2GiB,write_type=fs-mode,endpoint_url=http://h:1,profile=lab,ro,rw",
        );
        let setting = |name: &str, value: &str| (format!("CV_FUSE__{name}"), value.to_owned());
        let modes = [setting("FILE_MODE", "416"), setting("DIR_MODE", "488")];
        let expected = [vec![setting("EXEC", "false"), setting("UID", "7")], modes.to_vec()].concat();
        assert_eq!(words.settings, expected);
        assert_eq!((words.access, words.is_patient), (Some(AccessMode::ReadWrite), false));
        assert_eq!(words.write_type, Some(WriteTypeArg::FsMode));
        assert_eq!(words.cache.unwrap(), CacheDir { directory: "/c".into(), size: ByteSize::gib(2) });
        assert_eq!(words.bucket.len(), 2);
        for (wrong, part) in [("uid=me", "a number"), ("umask=9", "octal"), ("noexce", "noexec"), ("ro=1", "none of")] {
            let error = MountWords::parse(&[wrong.to_owned()]).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains(part), "{error}");
        }
    }

    #[test]
    fn words_for_buckets_are_options_of_stores() {
        let words = parse("endpoint_url=http://h:1,region=r,profile=p,account=a,anonymous").bucket;
        let is_known = |word: &str| {
            let has = |scheme: Scheme| scheme.options().contains(&format!("{}.{word}", scheme.name()).as_str());
            Scheme::ALL.into_iter().any(has)
        };
        assert!(words.len() == 5 && words.iter().all(|(word, _)| is_known(word)), "{words:?}");
    }

    #[test]
    fn a_cache_is_a_directory_with_or_without_a_size() {
        let taken = |text: &str| cache_dir(text).map(|cache| (cache.directory, cache.size));
        assert_eq!(taken("/a/b").unwrap(), (PathBuf::from("/a/b"), CACHE_SIZE));
        assert_eq!(taken("/a:b:50GB").unwrap(), (PathBuf::from("/a:b"), "50GB".parse().unwrap()));
        assert!(taken("/a:50").unwrap_err().contains("no unit"));
        assert!(taken(":1GiB").unwrap_err().contains("DIR:SIZE"));
        let of = |uri, at| default_cache_dir(uri, Path::new(at)).unwrap().directory;
        assert_eq!(of("s3://b/p", "/mnt"), of("s3://b/p", "/mnt"));
        assert_ne!(of("s3://b/p", "/mnt"), of("s3://b/p", "/mnt2"));
    }

    #[test]
    fn mount_8_says_what_cv_fuse_is_told() {
        let told = |arguments: &[&str]| {
            let told = helper_arguments(arguments.iter().map(OsString::from).collect()).unwrap()?;
            Some(told.into_iter().map(|argument| argument.into_string().unwrap()).collect::<Vec<_>>().join(" "))
        };
        let said = ["/sbin/mount.cavern", "s3://b/p", "/mnt", "-n", "-v", "-o", "rw,nofail,uid=7", "-t", "cavern"];
        assert_eq!(told(&said).unwrap(), "cv fuse s3://b/p /mnt -o nofail,uid=7");
        assert_eq!(told(&["mount.cavern", "s3://b", "/mnt", "-f"]), None);
        assert_eq!(told(&["cv", "fuse", "-f"]).unwrap(), "cv fuse -f");
        let refused = helper_arguments(["mount.cavern", "s3://b", "/mnt", "-N", "1"].map(OsString::from).to_vec());
        assert!(refused.unwrap_err().to_string().contains("nsenter"));
    }
}
