//! Files that are opened again: nobody is asked where their bytes are, until somebody else has changed them, and what
//! is removed gives its room back though its descriptor was kept.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cavern_tests::{Options, eventually};

use crate::fs_mode_delegations::Mounts;

const PATIENCE: Duration = Duration::from_secs(30);
/// Sooner than an idle descriptor is closed.
const SOON: Duration = Duration::from_secs(15);
const FILES: usize = 60;

fn content(file: usize, version: usize) -> Vec<u8> {
    (0..50_000_usize).map(|at| (at * 7 + file * 31 + version * 101) as u8).collect()
}

/// The bytes as the daemon has them: the kernel keeps no page of them.
fn read_past_pages(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What the first mount has asked for: where bytes are, and descriptors.
fn asked(mounts: &Mounts) -> (u64, u64) {
    (mounts.counter("cavern_client_layout_misses_total"), mounts.counter("cavern_client_local_opens_total"))
}

fn up() -> Mounts {
    let mounts = Mounts::up(Options::default());
    fs::create_dir(mounts.there.join("set")).unwrap();
    for file in 0..FILES {
        fs::write(mounts.there.join(format!("set/{file}")), content(file, 0)).unwrap();
    }
    mounts
}

/// Reads all of them twice, the second time without a question.
fn read_twice(mounts: &Mounts) {
    let read = || {
        for file in 0..FILES {
            assert!(read_past_pages(&mounts.here.join(format!("set/{file}"))).unwrap() == content(file, 0), "{file}");
        }
        asked(mounts)
    };
    let first = read();
    assert!(first.0 >= FILES as u64 && first.1 >= FILES as u64, "{first:?}");
    assert_eq!(read(), first);
}

#[test]
fn whoever_opens_a_file_again_asks_nobody_and_sees_what_others_have_changed() {
    let mounts = up();
    read_twice(&mounts);
    let there = |file: usize| mounts.there.join(format!("set/{file}"));
    let write = |file: usize| OpenOptions::new().write(true).open(there(file)).unwrap();
    write(0).write_all_at(&content(0, 1), 0).unwrap();
    OpenOptions::new().append(true).open(there(1)).unwrap().write_all(b"more").unwrap();
    write(2).set_len(10).unwrap();
    write(3).set_len(0).unwrap();
    write(3).write_all(b"anew").unwrap();
    fs::write(mounts.there.join("set/next"), b"another").unwrap();
    fs::rename(mounts.there.join("set/next"), there(4)).unwrap();
    fs::remove_file(there(5)).unwrap();
    let expected = [
        Some(content(0, 1)),
        Some([content(1, 0), b"more".to_vec()].concat()),
        Some(content(2, 0)[..10].to_vec()),
        Some(b"anew".to_vec()),
        Some(b"another".to_vec()),
        None,
        Some(content(6, 0)),
    ];
    for (file, expected) in expected.into_iter().enumerate() {
        let path = mounts.here.join(format!("set/{file}"));
        eventually(&format!("{file} is as the other mount has left it"), PATIENCE, || {
            let read = read_past_pages(&path).inspect_err(|error| assert_eq!(error.kind(), io::ErrorKind::NotFound));
            (read.ok() == expected).then_some(())
        });
    }
}

#[test]
fn whoever_reads_a_directory_that_is_listed_asks_for_many_files_at_a_time() {
    let mounts = up();
    let names = || fs::read_dir(mounts.here.join("set")).unwrap().count();
    assert_eq!(names(), FILES);
    let read = |file: usize| read_past_pages(&mounts.here.join(format!("set/{file}")));
    // What is asked for beside a file comes a moment later than that.
    let mut order: Vec<usize> = (0..FILES).collect();
    order.sort_by_key(|file| file * 37 % FILES);
    for file in &order[..5] {
        assert!(read(*file).unwrap() == content(*file, 0), "{file}");
    }
    let there = |file: usize| mounts.there.join(format!("set/{file}"));
    let changed = order[FILES - 1];
    fs::write(there(changed), content(changed, 1)).unwrap();
    fs::remove_file(there(order[FILES - 2])).unwrap();
    eventually("the change is seen", PATIENCE, || (read(changed).unwrap() == content(changed, 1)).then_some(()));
    for file in &order[5..FILES - 2] {
        assert!(read(*file).unwrap() == content(*file, 0), "{file}");
    }
    eventually("the removal is seen", PATIENCE, || read(order[FILES - 2]).err());
    let (layouts, opens) = asked(&mounts);
    assert!(layouts < FILES as u64 / 2 && opens < FILES as u64 / 2, "{layouts} layouts, {opens} descriptors asked for");
    assert_eq!(mounts.counter("cavern_client_lost_changes_total"), 0);
}

#[test]
fn what_the_mount_itself_changes_is_known_when_it_is_opened_again() {
    let mounts = up();
    read_twice(&mounts);
    let before = asked(&mounts);
    let path = mounts.here.join("set/0");
    for version in 1..20 {
        let mut file = OpenOptions::new().write(true).truncate(version % 3 == 0).open(&path).unwrap();
        file.write_all(&content(0, version)).unwrap();
        drop(file);
        assert!(read_past_pages(&path).unwrap() == content(0, version), "{version}");
    }
    File::options().write(true).open(&path).unwrap().set_len(7).unwrap();
    assert_eq!(read_past_pages(&path).unwrap(), content(0, 19)[..7]);
    fs::write(mounts.here.join("set/new"), b"new").unwrap();
    let made = asked(&mounts);
    assert_eq!(read_past_pages(&mounts.here.join("set/new")).unwrap(), b"new");
    assert_eq!(asked(&mounts), made, "it was made here");
    // The first write takes a promise of the master, and what is known then counts.
    assert!(made.0 - before.0 < 30, "{before:?} {made:?}");
}

#[test]
fn what_is_removed_gives_its_room_back_at_once() {
    let mounts = up();
    read_twice(&mounts);
    let daemon = mounts.cluster.status().fuse[0].daemon().unwrap();
    // Descriptors of the daemon, and of these such as are all that is left of their files.
    let open = || {
        let links = fs::read_dir(format!("/proc/{daemon}/fd")).unwrap().filter_map(|entry| entry.ok());
        let links: Vec<_> = links.filter_map(|entry| fs::read_link(entry.path()).ok()).collect();
        let of_blocks = links.iter().filter(|link| link.to_str().is_some_and(|link| link.contains("/worker")));
        let deleted = links.iter().filter(|link| link.to_str().is_some_and(|link| link.ends_with("(deleted)")));
        (of_blocks.count(), deleted.filter(|link| link.starts_with(mounts.cluster.directory())).count())
    };
    assert!(open().0 >= FILES, "{:?}", open());
    // One half by this mount, the other one by the other, and some while they are open.
    let opened: Vec<_> = (0..6).map(|file| File::open(mounts.here.join(format!("set/{file}"))).unwrap()).collect();
    thread::scope(|scope| {
        for (place, files) in [(&mounts.here, 0..FILES / 2), (&mounts.there, FILES / 2..FILES)] {
            scope.spawn(move || files.for_each(|file| fs::remove_file(place.join(format!("set/{file}"))).unwrap()));
        }
    });
    for (file, opened) in opened.iter().enumerate() {
        let mut read = vec![0; 50_000];
        opened.read_exact_at(&mut read, 0).unwrap();
        assert!(read == content(file, 0));
    }
    drop(opened);
    eventually("no descriptor holds room of what is removed", SOON, || {
        let (_, deleted) = open();
        (deleted == 0).then_some(())
    });
    eventually("nothing of it is open", SOON, || (open().0 < 3).then_some(()));
}
