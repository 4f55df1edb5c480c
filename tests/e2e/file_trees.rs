//! `file://` mounts: a directory tree that nothing leads out of, and in which nothing is waited for.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually, within};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

const PATIENCE: Duration = Duration::from_secs(60);

/// Files that something else takes the places of: more than a process has threads that may be blocked.
const REPLACED: usize = 150;

#[test]
fn a_tree_with_fifos_sockets_and_links_shows_its_own_files_only() {
    let cluster = Cluster::up(Options::default());
    let (source, outside) = (cluster.directory().join("source"), cluster.directory().join("outside"));
    fs::create_dir_all(source.join("folder")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    fs::write(source.join("folder/file"), "content").unwrap();
    symlink("folder/file", source.join("within")).unwrap();
    symlink("../outside", source.join("out")).unwrap();
    symlink("../outside/secret", source.join("out-file")).unwrap();
    symlink(&outside, source.join("folder/absolute")).unwrap();
    mknodat(CWD, source.join("folder/fifo"), FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
    // Zeroes without end; whoever is not root makes none.
    let zero = mknodat(CWD, source.join("zero"), FileType::CharacterDevice, Mode::from_raw_mode(0o644), makedev(1, 5));
    let _socket = UnixListener::bind(source.join("socket")).unwrap();
    let replaced = |number: usize| source.join(format!("folder/{number}"));
    for number in 0..REPLACED {
        fs::write(replaced(number), "content").unwrap();
    }
    let uri = format!("file://{}", source.display());
    cluster.cv(&["mount", &uri, "/read", "--write-type", "cache_mode", "--metadata-ttl", "1h"]);
    let shown = cluster.path("read");
    eventually("the mount appears", PATIENCE, || shown.is_dir().then_some(()));
    let names = |path: &str| {
        let mut names: Vec<String> = fs::read_dir(shown.join(path))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names("."), ["folder", "within"]);
    assert_eq!((names("folder").len(), names("folder").last().unwrap().as_str()), (REPLACED + 1, "file"));
    for name in ["within", "folder/file"] {
        assert_eq!(fs::read_to_string(shown.join(name)).unwrap(), "content", "{name}");
    }
    // Something else takes the places of files that have been listed.
    for number in 0..REPLACED {
        let path = replaced(number);
        fs::remove_file(&path).unwrap();
        match number % 2 {
            0 => mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap(),
            _ => symlink("../../outside/secret", &path).unwrap(),
        }
    }
    for number in 0..REPLACED {
        let path = shown.join(format!("folder/{number}"));
        let read = within("an answer", PATIENCE, move || fs::read(path));
        assert!(read.is_err(), "{number}: {read:?}");
    }
    assert_eq!(fs::read_to_string(shown.join("folder/file")).unwrap(), "content", "somebody still answers");

    // Anew, so that the whole tree is looked at.
    cluster.cv(&["umount", "/read"]);
    cluster.cv(&["mount", &uri, "/kept", "--write-type", "cache_mode"]);
    let hidden = eventually("the tree is indexed", PATIENCE, || {
        let mounts = cluster.cv(&["mount", "--json"]).json();
        let mount = mounts.as_array().unwrap().iter().find(|mount| mount["path"] == "/kept").unwrap().clone();
        (mount["status"]["indexing"] == false).then(|| mount["status"]["hidden_keys"].as_u64().unwrap())
    });
    assert_eq!(
        hidden,
        3 + 2 + REPLACED as u64 + u64::from(zero.is_ok()),
        "two links, the socket and the device, a link and a FIFO, and what took the places of files"
    );
}
