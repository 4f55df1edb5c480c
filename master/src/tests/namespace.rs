//! What clients see of the namespace.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Config, Interval};
use cavern_proto::ROOT_INODE;
use cavern_proto::master::cluster_server::Cluster;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::{
    Consistency, Kind, Mount, ReadDirPage, ReadDirRequest, StatusRequest, UsageRequest, WriteType,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{ApplyListing, AttachMount, ListedEntry, ListingGroup};
use cavern_state::Outcome;
use cavern_work::WorkError;
use cavern_work::listing::CheckReason;
use cavern_work::mounts::changes::DetachPolicy;
use futures::StreamExt;
use tonic::Request;

use super::harness::{NoWorkers, TestMaster, eventually, mount_request, name, new_bucket};

async fn read_dir(master: &TestMaster, inode: u64, after: &str, limit: u64) -> Vec<ReadDirPage> {
    let request = ReadDirRequest { inode, after_name: name(after), limit, ..ReadDirRequest::default() };
    let stream = master.services().read_dir(Request::new(request)).await.unwrap().into_inner();
    stream.map(|page| page.unwrap()).collect().await
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_lead_elsewhere_meanwhile_are_in_every_page_and_found() {
    const NAMES: usize = 300;
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    let (proposer, mount_id, root) = (master.services().proposer.clone(), mount.id, mount.root_inode);
    // Each version is another inode under the same name.
    let replace = async move |version: usize| {
        let entry = |number: usize| ListedEntry {
            name: name(&format!("f{number:03}")),
            kind: Kind::File as i32,
            etag: version.to_string(),
            ..ListedEntry::default()
        };
        let group = ListingGroup { upsert: (0..NAMES).map(entry).collect(), ..ListingGroup::default() };
        let listing = ApplyListing { mount_id, groups: vec![group], now_ns: 1, ..ApplyListing::default() };
        proposer.propose(Command::Listing(listing)).await.unwrap();
    };
    replace(0).await;
    let replacing = tokio::spawn(async move {
        for version in 1..200 {
            replace(version).await;
        }
    });
    let reader = &master.services().lookups.reader;
    while !replacing.is_finished() {
        let (page, is_last) = reader.read(move |tables| Ok(tables.page(root, None, 2 * NAMES)?)).await.unwrap();
        assert_eq!((page.len(), is_last), (NAMES, true), "no name is missing");
        let found = reader.read(move |tables| {
            let dentry = tables.dentry(root, b"f000")?.unwrap();
            Ok(tables.inode(dentry.inode)?)
        });
        assert!(found.await.unwrap().is_some(), "a name leads to an inode");
    }
    replacing.await.unwrap();
    drop(bucket);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_appears_as_directories_and_files() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    let etag = bucket.put("pre/train/one.jpg", "12345");
    bucket.put("pre/train/two.jpg", "1");
    bucket.put("elsewhere", "1");
    let mount = master.mount("/data/images", &format!("{uri}/pre/")).await;
    let lookups = &master.services().lookups;

    let file = lookups.resolve("/data/images/train/one.jpg").await.unwrap();
    let attr = file.attr.unwrap();
    assert_eq!((attr.kind(), attr.size, attr.mode, attr.nlink), (Kind::File, 5, 0o644, 1));
    assert_eq!((file.key.as_str(), &file.etag, file.mount_id), ("pre/train/one.jpg", &etag, mount.id));
    assert!(file.listing_age_ms >= 0);
    assert_eq!(lookups.get_inode(attr.inode).await.unwrap().key, file.key);

    let directory = lookups.resolve("/data/images/train").await.unwrap();
    assert_eq!((directory.key.as_str(), directory.attr.unwrap().mode), ("pre/train/", 0o755));
    assert_eq!(lookups.resolve("/data/images").await.unwrap().key, "pre/");
    let plain = lookups.resolve("/data").await.unwrap();
    assert_eq!((plain.mount_id, plain.listing_age_ms, plain.key.as_str()), (0, -1, ""));

    let pages = read_dir(&master, directory.attr.unwrap().inode, "", 0).await;
    let names: Vec<_> = pages.iter().flat_map(|page| &page.entries).map(|entry| entry.name.clone()).collect();
    assert_eq!(names, [name("one.jpg"), name("two.jpg")]);
    assert!(pages.last().unwrap().end);
    assert_eq!(pages[0].directory.as_ref().unwrap().key, "pre/train/");

    for missing in ["/data/images/train/three.jpg", "/nowhere/at/all", "/data/images/train/one.jpg/x"] {
        assert!(lookups.resolve(missing).await.unwrap_err().is_not_found(), "{missing}");
    }
    let error = lookups.resolve("/nowhere/at/all").await.unwrap_err().to_string();
    assert!(error.contains("/nowhere") && !error.contains("/at"), "{error}");
    assert!(matches!(lookups.lookup(ROOT_INODE, &name("a/b")).await, Err(WorkError::Invalid(_))));
    assert!(lookups.get_inode(999_999).await.unwrap_err().is_not_found());

    let usage = master.services().usage(Request::new(UsageRequest { path: "/".into() })).await.unwrap().into_inner();
    let usage: Vec<_> = usage.map(|progress| progress.unwrap()).collect().await;
    let last = usage.last().unwrap();
    assert_eq!((last.files, last.bytes, last.directories, last.done), (2, 6, 4, true));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_object_is_a_new_inode_and_a_deleted_one_is_gone() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("a", "old");
    bucket.put("d/b", "old");
    let mount = master.mount("/m", &uri).await;
    // Its index would bring what is new, too.
    master.indexed(&mount).await;
    let lookups = &master.services().lookups;
    let old = lookups.resolve("/m/a").await.unwrap().attr.unwrap().inode;
    let parent = lookups.resolve("/m").await.unwrap().attr.unwrap().inode;

    bucket.put("a", "newer");
    assert_eq!(lookups.resolve("/m/a").await.unwrap().attr.unwrap().inode, old, "the listing is young");
    let new = lookups.revalidate(parent, &name("a"), CheckReason::Unknown).await.unwrap().attr.unwrap();
    assert!(new.inode != old && new.size == 5);
    assert!(lookups.get_inode(old).await.unwrap_err().is_not_found());

    bucket.delete("a");
    bucket.delete("d/b");
    master.refresh("/m").await;
    for gone in ["/m/a", "/m/d", "/m/d/b"] {
        assert!(lookups.resolve(gone).await.unwrap_err().is_not_found(), "{gone}");
    }
    bucket.put("late", "1");
    master.refresh("/m/late").await;
    assert!(lookups.resolve("/m/late").await.is_ok());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_wrote_is_known_after_one_request() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("a", "old");
    let mount = master.mount("/m", &uri).await;
    // Its requests are not to be counted.
    master.indexed(&mount).await;
    let lookups = &master.services().lookups;
    assert!(lookups.resolve("/m/new").await.unwrap_err().is_not_found());
    let ufs = master.services().mounts.get(mount.id).unwrap().ufs.clone();
    let requests = || (ufs.stats().heads, ufs.stats().lists);
    for (key, size) in [("a", 5), ("new", 5)] {
        bucket.put(key, "newer");
        let before = requests();
        let entry = lookups.revalidate(mount.root_inode, &name(key), CheckReason::Written).await.unwrap();
        assert_eq!(entry.attr.unwrap().size, size);
        assert_eq!(requests(), (before.0 + 1, before.1));
    }
    bucket.delete("new");
    assert!(lookups.revalidate(mount.root_inode, &name("new"), CheckReason::Written).await.unwrap_err().is_not_found());
    bucket.put("d/", "");
    let directory = lookups.revalidate(mount.root_inode, &name("d"), CheckReason::Written).await.unwrap();
    assert_eq!(directory.attr.unwrap().kind(), Kind::Directory);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_was_written_below_is_listed_anew() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("d/deep/a", "1");
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    let lookups = &master.services().lookups;
    let known = lookups.resolve("/m/d").await.unwrap().attr.unwrap().inode;
    assert!(lookups.resolve("/m/d/deep/a").await.is_ok());
    bucket.put("d/deep/b", "1");
    let directory = name("d");
    let written = |why| lookups.revalidate(mount.root_inode, &directory, why);
    assert_eq!(written(CheckReason::Written).await.unwrap().attr.unwrap().inode, known);
    let listed_anew = written(CheckReason::WrittenBelow).await.unwrap().attr.unwrap();
    assert!(listed_anew.inode != known && listed_anew.kind() == Kind::Directory);
    for path in ["/m/d/deep/a", "/m/d/deep/b"] {
        assert!(lookups.resolve(path).await.is_ok(), "{path}");
    }
    for key in ["d/deep/a", "d/deep/b"] {
        bucket.delete(key);
    }
    assert!(written(CheckReason::WrittenBelow).await.unwrap_err().is_not_found());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absence_is_proven_again_when_the_listing_is_old() {
    let mut config = Config::default();
    config.master.refresh_wait = Interval::millis(30_000);
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, dir, Arc::new(NoWorkers)).await.unwrap();
    let (bucket, uri) = new_bucket();
    bucket.put("a", "1");
    let request = |path: &str, ttl, consistency| Mount {
        metadata_ttl_ms: ttl,
        consistency: consistency as i32,
        ..mount_request(path, &uri)
    };
    for (path, ttl, consistency) in [
        ("/young", 3_600_000, Consistency::Ttl),
        ("/old", 1, Consistency::Ttl),
        ("/never", 1, Consistency::Never),
        ("/always", 3_600_000, Consistency::Always),
    ] {
        let mount = master.services().mount_bucket(request(path, ttl, consistency), false).await.unwrap();
        master.indexed(&mount).await;
    }
    bucket.put("b", "1");
    let lookups = &master.services().lookups;
    for (path, is_there) in [("/young/b", false), ("/old/b", true), ("/never/b", false), ("/always/b", true)] {
        assert_eq!(lookups.resolve(path).await.is_ok(), is_there, "{path}");
    }
    let old = lookups.resolve("/old").await.unwrap().attr.unwrap().inode;
    bucket.put("c", "1");
    let touched = lookups.refresh_listings(&[old, 777_777], true).await.unwrap();
    assert!(touched[0].listing_age_ms >= 0 && !touched[0].gone && touched[1].gone);
    let found = lookups.reader.read(move |tables| Ok(tables.dentry(old, b"c")?)).await.unwrap();
    assert!(found.is_some());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_names_come_in_pages() {
    const COUNT: usize = 100_000;
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    for number in 0..COUNT {
        bucket.put(&format!("flat/{number:06}.jpg"), "x");
    }
    master.mount("/big", &uri).await;
    let directory = master.services().lookups.resolve("/big/flat").await.unwrap().attr.unwrap().inode;
    // One name of a directory that is just being listed.
    let entry = master.services().lookups.lookup(directory, &name("099999.jpg")).await.unwrap();
    assert_eq!(entry.key, "flat/099999.jpg");

    let pages = read_dir(&master, directory, "", 0).await;
    let names: Vec<_> = pages.iter().flat_map(|page| &page.entries).map(|entry| entry.name.clone()).collect();
    assert_eq!(names.len(), COUNT);
    assert!(names.windows(2).all(|pair| pair[0] < pair[1]));
    assert!(pages.iter().all(|page| page.entries.len() <= 1000));
    let rest = read_dir(&master, directory, "099989.jpg", 3).await;
    let names: Vec<_> = rest.iter().flat_map(|page| &page.entries).map(|entry| entry.name.clone()).collect();
    assert_eq!(names, [name("099990.jpg"), name("099991.jpg"), name("099992.jpg")]);
    assert!(!rest.last().unwrap().end);

    let services = master.services();
    services.unmount_bucket("/big", DetachPolicy::Keep).await.unwrap();
    assert!(services.lookups.resolve("/big").await.unwrap_err().is_not_found());
    eventually(|| async { services.lookups.reader.read(|tables| Ok(tables.counters()?.inodes)).await.unwrap() == 1 })
        .await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_are_verified_idempotent_and_never_nested() {
    let master = TestMaster::new().await;
    let services = master.services();
    let (bucket, uri) = new_bucket();
    bucket.put("a", "1");
    let checked = services.mount_bucket(mount_request("/x/m", &uri), true).await.unwrap();
    assert_eq!(checked.id, 0);
    assert!(services.lookups.resolve("/x").await.unwrap_err().is_not_found());
    let mount = services.mount_bucket(mount_request("/x/m", &uri), false).await.unwrap();
    assert_eq!(services.mount_bucket(mount_request("/x/m/", &uri), false).await.unwrap(), mount);
    let other = Mount { replicas: 2, ..mount_request("/x/m", &uri) };
    assert!(matches!(services.mount_bucket(other, false).await, Err(WorkError::AlreadyExists(_))));
    for path in ["/x/m/inner", "/x"] {
        let refused = services.mount_bucket(mount_request(path, &uri), false).await;
        assert!(matches!(refused, Err(WorkError::Refused(_))), "{path}");
    }
    for uri in ["memory:/", "ftp://b", ""] {
        assert!(services.mount_bucket(mount_request("/y", uri), false).await.is_err(), "{uri}");
    }
    assert!(services.lookups.resolve("/y").await.unwrap_err().is_not_found());
    services.mount_bucket(mount_request("/x/n", &uri), false).await.unwrap();
    services.unmount_bucket("/x/m", DetachPolicy::Keep).await.unwrap();
    assert!(services.lookups.resolve("/x").await.is_ok(), "it still holds another mount");
    services.unmount_bucket("/x/n", DetachPolicy::Keep).await.unwrap();
    assert!(services.lookups.resolve("/x").await.unwrap_err().is_not_found());
    assert!(services.unmount_bucket("/x/n", DetachPolicy::Keep).await.unwrap_err().is_not_found());
    let status = services.status(Request::new(StatusRequest::default())).await.unwrap().into_inner();
    assert!(status.mounts.unwrap().mounts.is_empty());
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_known_is_served_while_the_bucket_is_gone() {
    let mut config = Config::default();
    config.master.refresh_wait = Interval::millis(200);
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, dir.clone(), Arc::new(NoWorkers)).await.unwrap();
    let objects = dir.path().join("objects");
    std::fs::create_dir_all(objects.join("d")).unwrap();
    std::fs::write(objects.join("d/a"), b"1").unwrap();
    let request = Mount { metadata_ttl_ms: 1, ..mount_request("/m", &format!("file://{}", objects.display())) };
    let mount = master.services().mount_bucket(request, false).await.unwrap();
    master.indexed(&mount).await;
    let lookups = &master.services().lookups;
    let directory = lookups.resolve("/m/d").await.unwrap().attr.unwrap().inode;
    std::fs::rename(&objects, dir.path().join("away")).unwrap();
    let error = lookups.listings.relist(directory).await.unwrap_err();
    assert!(!error.is_not_found(), "{error}");
    assert!(lookups.resolve("/m/d/a").await.is_ok());
    let touched = lookups.refresh_listings(&[directory], true).await.unwrap();
    assert!(!touched[0].gone);
    assert!(!master.services().mounts.status()[0].last_error.is_empty());
    std::fs::rename(dir.path().join("away"), &objects).unwrap();
    std::fs::remove_file(objects.join("d/a")).unwrap();
    std::fs::write(objects.join("d/b"), b"1").unwrap();
    eventually(|| async { lookups.resolve("/m/d/b").await.is_ok() }).await;
    assert!(lookups.resolve("/m/d/a").await.unwrap_err().is_not_found());
    tokio::time::timeout(Duration::from_secs(30), master.stop()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_with_keys_in_common_are_judged_by_the_command() {
    let (bucket, uri) = new_bucket();
    bucket.put("q/a", "1");
    let master = TestMaster::new().await;
    let fs_mode = |path: &str, below: &str| Mount {
        write_type: WriteType::FsMode as i32,
        ..mount_request(path, &format!("{uri}{below}"))
    };
    let services = master.services();
    services.mount_bucket(fs_mode("/old", "/p"), false).await.unwrap();
    let refused = services.mount_bucket(fs_mode("/new", "/p/q"), false).await.unwrap_err().to_string();
    assert!(refused.contains("/old") && refused.contains("keys in common"), "{refused}");

    // A mount that was compared with another table is not made.
    let epoch = services.mounts.table().unwrap().0;
    services.mount_bucket(fs_mode("/first", "/q"), false).await.unwrap();
    let late = AttachMount { mount: Some(fs_mode("/late", "/q")), mounts_epoch: epoch };
    let outcome = services.proposer.propose(Command::AttachMount(late)).await.unwrap();
    assert_eq!(outcome, Outcome::OutOfDate);
    let many = (0..8).map(|number| {
        let (services, mount) = (services.clone(), fs_mode(&format!("/many{number}"), "/r"));
        tokio::spawn(async move { services.mount_bucket(mount, false).await.is_ok() })
    });
    let many = futures::future::join_all(many).await;
    assert_eq!(many.into_iter().filter(|mounted| *mounted.as_ref().unwrap()).count(), 1);
    master.stop().await;
}
