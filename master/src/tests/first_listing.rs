//! Directories that are read while they are listed for the first time.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cavern_proto::ROOT_INODE;
use cavern_proto::master::ReadDirRequest;
use cavern_proto::master::namespace_server::Namespace;
use cavern_security::{Identity, Role};
use cavern_ufs::MemoryBucket;
use cavern_work::listing::CheckReason;
use futures::StreamExt;
use tonic::Request;

use super::harness::{TestMaster, eventually, metric, name, new_bucket};
use crate::service::Peer;

/// A directory that was never listed, with objects of these names and what they say is below it.
async fn unlisted(names: &[String]) -> (TestMaster, MemoryBucket, u64) {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("other", "1");
    let mount = master.mount("/m", &uri).await;
    // Else it would list the directory, too.
    master.indexed(&mount).await;
    for name in names {
        bucket.put(&format!("flat/{name}"), "1");
    }
    let found = master.services().lookups.revalidate(mount.root_inode, &name("flat"), CheckReason::Written).await;
    let directory = found.unwrap().attr.unwrap().inode;
    (master, bucket, directory)
}

/// The names of an answer, and whether these are the last; or why there is none.
async fn read(master: &TestMaster, inode: u64, after: &str, limit: u64) -> Result<(Vec<String>, bool), String> {
    let request = ReadDirRequest { inode, after_name: name(after), limit, ..ReadDirRequest::default() };
    let mut pages = master.services().read_dir(Request::new(request)).await.unwrap().into_inner();
    let (mut names, mut end) = (Vec::new(), false);
    while let Some(page) = pages.next().await {
        let page = page.map_err(|status| status.message().to_owned())?;
        assert!(!end, "nothing follows the end");
        end = page.end;
        names.extend(page.entries.iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()));
    }
    Ok((names, end))
}

/// All names behind one, however many of them each answer has: that depends on what is listed by then.
async fn read_to_end(master: &TestMaster, inode: u64, after: &str) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        let after = names.last().map_or(after, String::as_str);
        let (more, end) = read(master, inode, after, 100).await.unwrap();
        names.extend(more);
        if end {
            return names;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_read_as_far_as_it_is_listed() {
    let names: Vec<String> = (0..35).map(|number| format!("{number:03}.jpg")).collect();
    let (master, bucket, directory) = unlisted(&names).await;
    bucket.list_in_pages_of(10);
    let turns = bucket.list_by_turns("flat/");
    turns.add_permits(1);
    // A directory may come in the place of the last name of a page, and one that is called `009`.
    assert_eq!(read(&master, directory, "", 100).await, Ok((names[..9].to_vec(), false)));

    let lookups = &master.services().lookups;
    let checks = || metric(&master.metrics, "one_name_checks_total");
    let before = checks();
    let absent = lookups.lookup(directory, &name("0045")).await.unwrap_err();
    assert!(absent.is_not_found() && checks() == before, "it would have been listed: {absent}");
    assert!(lookups.lookup(directory, &name("030.jpg")).await.is_ok());
    assert!(lookups.lookup(directory, &name("031")).await.unwrap_err().is_not_found());
    assert_eq!(checks(), before + 2, "the bucket says what is not listed yet");

    turns.add_permits(1);
    assert_eq!(read(&master, directory, "008.jpg", 100).await, Ok((names[9..19].to_vec(), false)));
    let (whole, ()) = tokio::join!(read(&master, directory, "", 0), async { turns.add_permits(100) });
    assert_eq!(whole, Ok((names.clone(), true)));
    assert_eq!(read(&master, directory, "018.jpg", 100).await, Ok((names[19..].to_vec(), true)));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_listed_behind_names_that_follow_it_is_read_before_them() {
    let mut names: Vec<String> = (0..25).map(|number| format!("img-{number:03}")).collect();
    let objects: Vec<String> = names.iter().cloned().chain(["img/x".to_owned()]).collect();
    names.insert(0, "img".to_owned());
    let (master, bucket, directory) = unlisted(&objects).await;
    bucket.list_in_pages_of(10);
    let turns = bucket.list_by_turns("flat/");
    turns.add_permits(2);
    eventually(|| async { read(&master, directory, "", 100).await == Ok((names[..20].to_vec(), false)) }).await;
    turns.add_permits(100);
    assert_eq!(read_to_end(&master, directory, &names[19]).await, names[20..]);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_read_a_part_of_what_turns_out_to_be_in_no_order_is_told() {
    let names: Vec<String> = (0..40).map(|number| format!("{number:03}")).collect();
    let (master, bucket, directory) = unlisted(&names).await;
    bucket.list_in_shards(2, 1);
    let turns = bucket.list_by_turns("flat/");
    turns.add_permits(3);
    let (first, _) = read(&master, directory, "", 1).await.unwrap();
    // Enough to see that it is in no order, and too few to list it once more.
    turns.add_permits(names.len() - 3);
    let mut after = first[0].clone();
    let error = loop {
        match read(&master, directory, &after, 1).await {
            Ok((more, end)) => {
                assert!(!end && more[0] > after, "{more:?} after {after:?}");
                after.clone_from(&more[0]);
            }
            Err(error) => break error,
        }
    };
    assert!(error.contains("lists in no order") && error.contains("read it from its beginning"), "{error}");
    turns.add_permits(100);
    assert_eq!(read(&master, directory, "", 100).await, Ok((names, true)));

    // From then on no part of a directory of that store is given before the whole is known.
    bucket.put("next/a", "1");
    bucket.put("next/b", "1");
    let lookups = &master.services().lookups;
    let root = lookups.resolve("/m").await.unwrap().attr.unwrap().inode;
    let next = lookups.revalidate(root, &name("next"), CheckReason::Written).await.unwrap().attr.unwrap().inode;
    let first = read(&master, next, "", 1).await.unwrap();
    assert_eq!(first, (vec!["a".to_owned()], false));
    let record = lookups.reader.read(move |tables| Ok(tables.inode(next)?)).await.unwrap().unwrap();
    assert_ne!(record.listed_ns, 0);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_gone_from_the_bucket_is_not_read_while_the_rest_is_listed() {
    let names: Vec<String> = (0..25).map(|number| format!("{number:03}.jpg")).collect();
    let (master, bucket, directory) = unlisted(&names).await;
    bucket.put("flat/0035", "1");
    let lookups = &master.services().lookups;
    lookups.revalidate(directory, &name("0035"), CheckReason::Written).await.unwrap();
    assert!(bucket.delete("flat/0035"));
    bucket.list_in_pages_of(10);
    let turns = bucket.list_by_turns("flat/");
    turns.add_permits(2);
    assert_eq!(read(&master, directory, "", 100).await, Ok((names[..4].to_vec(), false)));
    turns.add_permits(100);
    assert_eq!(read_to_end(&master, directory, "003.jpg").await, names[4..]);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_listing_takes_no_place_from_other_listings() {
    let names: Vec<String> = (0..25).map(|number| format!("{number:03}.jpg")).collect();
    let (master, bucket, directory) = unlisted(&names).await;
    bucket.list_in_pages_of(10);
    let turns = bucket.list_by_turns("flat/");
    turns.add_permits(1);
    read(&master, directory, "", 100).await.unwrap();

    let tenants = crate::service::tenants(&cavern_conf::schema::Master::default());
    let identity = Identity::new("c", Role::Client, "a").unwrap();
    let tenant = || tenants.admit(&identity).unwrap().unwrap();
    let by_tenant = |inode, after_name| {
        let mut request = Request::new(ReadDirRequest { inode, after_name, ..ReadDirRequest::default() });
        request.extensions_mut().insert(Peer { tenant: Arc::new(OnceLock::from(Ok(tenant()))), ..Peer::default() });
        request
    };
    let places = tenant().streams.clone();
    let others = u32::try_from(places.available_permits()).unwrap() - 1;
    let others = places.acquire_many_owned(others).await.unwrap();
    let services = master.services();
    let mut waits = services.read_dir(by_tenant(directory, name("008.jpg"))).await.unwrap().into_inner();
    // It has looked for more, and says that it goes on.
    assert!(waits.next().await.unwrap().unwrap().entries.is_empty());
    let mut listed = services.read_dir(by_tenant(ROOT_INODE, name(""))).await.unwrap().into_inner();
    let page = tokio::time::timeout(Duration::from_secs(5), listed.next()).await.expect("there is a place");
    assert_eq!(page.unwrap().unwrap().entries.len(), 1);
    drop((listed, others));
    turns.add_permits(100);
    let mut read_on = Vec::new();
    while let Some(page) = waits.next().await {
        read_on.extend(page.unwrap().entries.into_iter().map(|entry| String::from_utf8(entry.name.to_vec()).unwrap()));
    }
    assert_eq!(read_on, names[9..]);
    master.stop().await;
}
