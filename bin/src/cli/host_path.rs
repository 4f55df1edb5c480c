//! A path of this host where one of the namespace is meant: what a mount point shows has one name here, and another
//! there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ArgMatches;

use super::connect::ClusterArgs;
use crate::error::CliError;
use crate::local::mounted;

/// The error of a command, which says more where the path that is not there is one of this host.
pub fn explained(error: CliError, arguments: impl Iterator<Item = OsString>, matches: &ArgMatches) -> CliError {
    let CliError::NotFound(message) = &error else { return error };
    if matches.subcommand_name() == Some("bench") {
        // It takes paths of this host only.
        return error;
    }
    let mut paths = arguments.skip(1).map(PathBuf::from).filter(|path| path.is_absolute());
    let Some(path) = paths.find(|path| is_named(message, path)) else { return error };
    let hint = match mounted::cavern_mount_above(&path) {
        Some(mount_point) => {
            let there = of_namespace(&path, &mount_point, &shown_directory(matches));
            format!("{} is a path of this host: in the namespace it is {there}", path.display())
        }
        None if path.symlink_metadata().is_ok() => {
            format!("{} is a path of this host, and not of the namespace: `cv fs ls /` lists that", path.display())
        }
        None => return error,
    };
    CliError::NotFound(format!("{message}; {hint}"))
}

/// The path in the namespace of a file that is named there, or on this host where a mount of Cavern shows it. `shown`
/// is the directory that mounts show (`fuse.path`).
pub fn in_namespace(path: &str, shown: &str) -> String {
    let here = std::path::absolute(path).ok();
    let mounted = here.and_then(|here| Some((mounted::cavern_mount_above(&here)?, here)));
    mounted.map_or_else(|| path.to_owned(), |(mount_point, here)| of_namespace(&here, &mount_point, shown))
}

/// Whether a message is about a path: it has the path, or what it begins with.
fn is_named(message: &str, path: &Path) -> bool {
    let mut words = message.split_whitespace().map(|word| word.trim_end_matches([':', ',', ';']));
    words.any(|word| word != "/" && path.ancestors().any(|above| above.as_os_str() == word))
}

/// The path in the namespace of what a mount point shows at a path: `shown` is the directory that it shows.
fn of_namespace(path: &Path, mount_point: &Path, shown: &str) -> String {
    let below = path.strip_prefix(mount_point).unwrap_or(path);
    match below.as_os_str().is_empty() {
        true => shown.to_owned(),
        false => format!("{}/{}", shown.trim_end_matches('/'), below.display()),
    }
}

/// The directory of the namespace that the clients of the cluster show (`fuse.path`).
fn shown_directory(matches: &ArgMatches) -> String {
    let mut command = matches;
    while let Some((_, below)) = command.subcommand() {
        command = below;
    }
    let path = |name| command.try_get_one::<PathBuf>(name).ok().flatten().cloned();
    let config = ClusterArgs::of(path("conf"), path("local")).config();
    config.map_or_else(|_| "/".to_owned(), |config| config.fuse.path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_a_path_or_what_it_begins_with() {
        let path = Path::new("/mnt/cv/train");
        assert!(is_named("/mnt is not there", path));
        assert!(is_named("/mnt/cv/train: no such file or directory", path));
        assert!(!is_named("/mnt2 is not there", path));
        assert!(!is_named("/ has no such name", path));
    }

    #[test]
    fn the_mount_point_stands_for_the_directory_that_it_shows() {
        let of = |path: &str, shown: &str| of_namespace(Path::new(path), Path::new("/mnt/cv"), shown);
        assert_eq!(of("/mnt/cv/train/a", "/"), "/train/a");
        assert_eq!(of("/mnt/cv/a", "/train"), "/train/a");
        assert_eq!((of("/mnt/cv", "/").as_str(), of("/mnt/cv/", "/train").as_str()), ("/", "/train"));
    }
}
