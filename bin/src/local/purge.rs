//! `cv local down --purge`: removes what the cluster has made, and nothing else.
//!
//! In the cluster's directory these are the folders and files below, by name: `up` begins in empty directories only, so
//! that none of them was there before. Of mount points, and of the directory itself, the record says whether `up` has
//! made them; they go when they are empty. Whatever else is found stays, and is named. Symbolic links are not followed,
//! and where something is mounted, nothing is removed at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::certificates;
use super::child::Role;
use super::files::{self, lock};
use super::mounted::mounts_below;
use super::record::Cluster;
use crate::console;
use crate::error::{CliError, Context as _};

/// Removes a cluster of which nothing runs; says what is in its directory, or at its mount points, and was not made by
/// it. Whatever stops it, it goes on where it was when it is called again.
///
/// # Errors
/// Before anything is removed: something is mounted below, or the record is of another directory.
pub fn purge(cluster: &Cluster, directory: &Path) -> Result<Vec<PathBuf>, CliError> {
    let name = directory.display();
    let directory = directory.canonicalize().context(format_args!("cannot use the directory {name}"))?;
    if directory != cluster.directory {
        return Err(CliError::Failed(format!(
            "{name} holds the record of the cluster in {}: it was copied or moved, and nothing of it is removed",
            cluster.directory.display()
        )));
    }
    let _lock = lock(&directory)?;
    let trees: Vec<PathBuf> = trees(cluster).into_iter().map(|tree| directory.join(tree)).collect();
    let mounts = mounts_below(&trees).context("cannot read the mount table")?;
    if let Some(mount) = mounts.first() {
        return Err(CliError::Failed(format!(
            "something is mounted at {}: nothing was removed; unmount it first",
            mount.display()
        )));
    }
    let mut left = Vec::new();
    for tree in trees {
        // Of a cluster that has cached much each takes a while.
        console::remark(format_args!("removing {}", tree.display()));
        remove_tree(&tree, &mut left)?;
    }
    let of_children = |endings: &[&str]| -> Vec<String> {
        let children = cluster.children().into_iter();
        children.flat_map(|child| endings.iter().map(move |end| format!("{child}.{end}"))).collect()
    };
    let mut folders = vec![("run", of_children(&["json", "stop", "tmp", "sock"])), ("log", of_children(&["log"]))];
    if cluster.secure {
        folders.push(("certificates", certificates::names(cluster)));
    }
    for (folder, names) in folders {
        let folder = directory.join(folder);
        remove_files(&folder, names)?;
        remove_empty(&folder, &mut left)?;
    }
    for mount_point in cluster.made.iter().rev().filter(|made| **made != directory) {
        remove_empty(mount_point, &mut left)?;
    }
    remove_files(&directory, ["cluster.toml", "cluster.tmp", "cluster.json", "lock"].map(str::to_owned))?;
    for entry in fs::read_dir(&directory).context(format_args!("cannot list {name}"))? {
        left.push(entry.context(format_args!("cannot list {name}"))?.path());
    }
    left.sort();
    left.dedup();
    if cluster.made.contains(&directory) {
        remove_empty(&directory, &mut Vec::new())?;
    }
    Ok(left)
}

/// Folders that nobody but the processes of the cluster has written to.
fn trees(cluster: &Cluster) -> Vec<String> {
    let kept = cluster.children().into_iter().filter(|child| child.role != Role::Fuse);
    kept.map(|child| child.to_string()).collect()
}

fn remove_tree(tree: &Path, left: &mut Vec<PathBuf>) -> Result<(), CliError> {
    match fs::symlink_metadata(tree) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        // Below it symbolic links are removed, not followed.
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(tree),
        Ok(_) => {
            left.push(tree.to_owned());
            return Ok(());
        }
        Err(error) => Err(error),
    }
    .context(format_args!("cannot remove {}", tree.display()))
}

fn remove_files(folder: &Path, names: impl IntoIterator<Item = String>) -> Result<(), CliError> {
    if !fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    names.into_iter().try_for_each(|name| files::remove(&folder.join(name)))
}

/// Removes a directory; what is none, or is not empty, is left.
fn remove_empty(folder: &Path, left: &mut Vec<PathBuf>) -> Result<(), CliError> {
    use io::ErrorKind::{DirectoryNotEmpty, NotADirectory, NotFound, ResourceBusy};

    match fs::remove_dir(folder) {
        Err(error) if error.kind() == NotFound => Ok(()),
        Err(error) if matches!(error.kind(), DirectoryNotEmpty | NotADirectory | ResourceBusy) => {
            left.push(folder.to_owned());
            Ok(())
        }
        removed => removed.context(format_args!("cannot remove {}", folder.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::record::{Fuse, Master, S3, Worker};

    fn cluster(directory: &Path) -> Cluster {
        let address = || "127.0.0.1:1".to_owned();
        let root = directory.join("s3");
        let s3 = S3 { listen: address(), admin: None, access_key: String::new(), secret_key: String::new(), root };
        let mut cluster = Cluster { directory: directory.to_owned(), s3, ..Cluster::default() };
        cluster.masters =
            vec![Master { grpc: address(), http: address(), data_dir: directory.join("master0"), joins: false }];
        let socket = directory.join("run/worker0.sock");
        cluster.workers = vec![Worker { data: address(), http: address(), socket, dirs: vec![] }];
        cluster.fuse = vec![Fuse { http: address(), mount_point: directory.join("mnt") }];
        for path in ["s3/objects/1", "master0/log/1", "worker0/disk0/blocks/1", "run/s3.json", "log/worker0.log"] {
            let path = directory.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        fs::create_dir(directory.join("mnt")).unwrap();
        cluster.store().unwrap();
        cluster
    }

    #[test]
    fn what_the_cluster_made_goes_and_nothing_else() {
        let outside = tempfile::tempdir().unwrap();
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap();
        let kept = outside.path().join("kept");
        fs::write(&kept, "kept").unwrap();
        let mut made = cluster(&directory);
        made.made = vec![directory.join("mnt"), directory.clone()];
        fs::write(directory.join("thesis"), "mine").unwrap();
        fs::write(directory.join("log/notes"), "mine").unwrap();
        // It has none of its own.
        fs::create_dir(directory.join("certificates")).unwrap();
        fs::write(directory.join("mnt/written while nothing was mounted"), "mine").unwrap();
        std::os::unix::fs::symlink(outside.path(), directory.join("worker0/disk0/link")).unwrap();
        fs::remove_dir_all(directory.join("s3")).unwrap();
        std::os::unix::fs::symlink(outside.path(), directory.join("s3")).unwrap();

        let left = ["certificates", "log", "mnt", "s3", "thesis"].map(|name| directory.join(name));
        assert_eq!(purge(&made, &directory).unwrap(), left);
        assert_eq!(fs::read(&kept).unwrap(), b"kept");
        assert_eq!(fs::read(directory.join("thesis")).unwrap(), b"mine");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 5);
        assert_eq!(fs::read_dir(directory.join("log")).unwrap().count(), 1);
    }

    #[test]
    fn the_directory_goes_only_if_it_was_made() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap().join("d");
        for is_made in [false, true] {
            fs::create_dir_all(&directory).unwrap();
            let mut cluster = cluster(&directory);
            cluster.made = vec![directory.join("mnt")];
            cluster.made.extend(is_made.then(|| directory.clone()));
            assert_eq!(purge(&cluster, &directory).unwrap(), [""; 0].map(PathBuf::from));
            assert_eq!(directory.exists(), !is_made);
        }
    }

    #[test]
    fn certificates_go_with_the_cluster_and_those_of_others_stay() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap();
        let mut secure = cluster(&directory);
        secure.secure = true;
        certificates::ensure(&secure, "lab").unwrap();
        let other = secure.certificates().join("admin-alice-key.pem");
        fs::write(&other, "a key").unwrap();
        let left = purge(&secure, &directory).unwrap();
        assert!(left.contains(&secure.certificates()), "{left:?}");
        assert_eq!(fs::read_dir(secure.certificates()).unwrap().count(), 1);
        assert!(other.exists());
    }

    #[test]
    fn a_record_of_another_directory_removes_nothing() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap();
        let mut cluster = cluster(&directory);
        cluster.directory = "/nonexistent".into();
        assert!(purge(&cluster, &directory).is_err());
        assert!(directory.join("s3/objects/1").exists());
    }
}
