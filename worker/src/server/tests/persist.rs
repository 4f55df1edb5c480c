//! Objects made of blocks: whole, of one version, in the place of what is expected there, or not at all.

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_proto::master::{AccessMode, Worker, WorkerTable};
use cavern_ufs::Faults;
use tokio::time::Instant;

use super::*;

pub(super) const BLOCK: u64 = 8 * MIB;

pub(super) fn block(inode: u64, index: u32) -> BlockRef {
    BlockRef::of_inode("cluster-1", inode, 0, index, BLOCK, 1)
}

/// Writes a piece of a block, over as many requests as it takes.
pub(super) async fn write(client: &mut Client, block: &BlockRef, bytes: &[u8]) {
    let request = WriteRequest { block: Some(block.clone()), ..Default::default() };
    client.send_with(FrameKind::Write, &request, bytes).await;
    let reply: WriteReply = client.receive().await.unwrap().decode(FrameKind::WriteReply);
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
}

pub(super) fn request(key: &str, inode: u64, length: u64, indexes: &[u32], worker: u64) -> PersistRequest {
    let metadata = vec![MetadataItem { name: "mode".into(), value: "33188".into() }];
    PersistRequest {
        mount_id: 1,
        key: key.into(),
        length,
        metadata,
        inode,
        block_size: BLOCK,
        indexes: indexes.to_vec(),
        generations: vec![0; indexes.len()],
        copies: vec![1; indexes.len()],
        workers: vec![worker; indexes.len()],
        deadline_ms: 20_000,
        ..Default::default()
    }
}

pub(super) async fn persist(client: &mut Client, request: &PersistRequest) -> PersistReply {
    client.send(FrameKind::Persist, request).await;
    client.receive().await.unwrap().decode(FrameKind::PersistReply)
}

/// Waits until nothing of what was given up is left at the store.
async fn tidied(bench: &Fixture) {
    let until = Instant::now() + PATIENCE;
    while bench.bucket.uploads() > 0 {
        assert!(Instant::now() < until, "{} uploads are left", bench.bucket.uploads());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_file_is_one_object_with_its_metadata() {
    let bench = Fixture::new("persist-small").await;
    let mut client = bench.tcp().await;
    let bytes = noise(300_000);
    write(&mut client, &block(1, 0), &bytes).await;
    let small = request("p/small", 1, 200_001, &[0], 7);
    let first = persist(&mut client, &small).await;
    assert_eq!(first.status(), Status::Ok, "{}", first.message);
    let (object, metadata) = bench.bucket.object("p/small").unwrap();
    assert!(object == bytes[..200_001] && metadata["mode"] == "33188");

    // It is there now, which was not expected; what is there is returned, and can be replaced.
    let second = persist(&mut client, &PersistRequest { length: 5, ..small.clone() }).await;
    assert_eq!((second.status(), &second.etag), (Status::VersionChanged, &first.etag));
    assert_eq!(bench.bucket.object("p/small").unwrap().0.len(), 200_001);
    let third = PersistRequest { length: 5, replaces: first.etag.clone(), ..small.clone() };
    assert_eq!(persist(&mut client, &third).await.status(), Status::Ok);
    assert_eq!(bench.bucket.object("p/small").unwrap().0, bytes[..5]);
    bench.bucket.delete("p/small");
    let fourth = persist(&mut client, &third).await;
    assert_eq!((fourth.status(), fourth.etag.as_str()), (Status::VersionChanged, ""));

    let hole = persist(&mut client, &request("hole", 1, 70_000, &[], 7)).await;
    assert_eq!(hole.status(), Status::Ok, "{}", hole.message);
    assert_eq!(bench.bucket.object("hole").unwrap().0, vec![0; 70_000]);
    let link = PersistRequest { inline: "target".into(), ..request("link", 1, 6, &[], 7) };
    assert_eq!(persist(&mut client, &link).await.status(), Status::Ok);
    assert_eq!(bench.bucket.object("link").unwrap().0, "target");

    let nowhere = persist(&mut client, &request("none", 9, 10, &[0], 7)).await;
    assert_eq!(nowhere.status(), Status::NoSuchBlock);
    let senseless = persist(&mut client, &PersistRequest { copies: vec![3], ..small.clone() }).await;
    assert_eq!(senseless.status(), Status::BadRequest);
    let unknown = persist(&mut client, &PersistRequest { mount_id: 9, ..small }).await;
    assert_eq!(unknown.status(), Status::UnknownMount);
    assert_eq!(bench.bucket.keys(), ["hole", "link"]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_outside_the_prefix_of_a_mount_that_is_written() {
    let bench = Fixture::new("persist-prefix").await;
    let mount = |id, suffix: &str, write_type: WriteType, access_mode: AccessMode| Mount {
        id,
        path: format!("/m{id}"),
        uri: format!("memory://server-persist-prefix{suffix}"),
        write_type: write_type.into(),
        access_mode: access_mode.into(),
        ..Mount::default()
    };
    let mounts = vec![
        mount(2, "/own", WriteType::FsMode, AccessMode::Unspecified),
        mount(3, "", WriteType::CacheMode, AccessMode::Unspecified),
        mount(4, "", WriteType::FsMode, AccessMode::ReadOnly),
    ];
    bench.mounts.apply(MountTable { epoch: 2, mounts, status: vec![] });
    bench.bucket.put("other/secret", noise(9 << 20));
    let mut client = bench.tcp().await;
    let link = |mount_id, key: &str| PersistRequest { mount_id, inline: "target".into(), ..request(key, 1, 6, &[], 7) };
    let stolen = PersistRequest {
        mount_id: 2,
        same_key: "other/secret".into(),
        same_etag: "etag".into(),
        ..request("own/copy", 1, 9 << 20, &[], 7)
    };
    let origin = PersistRequest {
        same_key: String::new(),
        same_etag: String::new(),
        origin_key: "other/secret".into(),
        origin_etag: "etag".into(),
        origin_bytes: 9 << 20,
        ..stolen.clone()
    };
    let denied = [link(2, "other/evil"), link(2, "ownevil"), link(3, "evil"), link(4, "evil"), stolen, origin];
    for request in denied {
        let reply = persist(&mut client, &request).await;
        assert_eq!(reply.status(), Status::PermissionDenied, "{request:?}: {}", reply.message);
    }
    assert_eq!(bench.bucket.keys(), ["other/secret"]);
    assert_eq!(persist(&mut client, &link(2, "own/fine")).await.status(), Status::Ok);
    assert_eq!(bench.bucket.object("own/fine").unwrap().0, "target");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_done_for_a_master_that_has_been_succeeded() {
    let bench = Fixture::new("persist-term").await;
    let (mut first, mut client) = (bench.master(4).await, bench.tcp().await);
    write(&mut client, &block(1, 0), &noise(1000)).await;
    assert_eq!(persist(&mut first, &request("first", 1, 1000, &[0], 7)).await.status(), Status::Ok);
    let mut second = bench.master(6).await;
    let free = FreeRequest { blocks: vec![block(1, 0)] };
    let copy = CopyRequest { block: Some(block(2, 0)), workers: vec![7], deadline_ms: 1000 };
    for number in 0..3 {
        match number {
            0 => first.send(FrameKind::Persist, &request("late", 1, 1000, &[0], 7)).await,
            1 => first.send(FrameKind::Free, &free).await,
            _ => first.send(FrameKind::Copy, &copy).await,
        };
        let failure: Failure = first.receive().await.unwrap().decode(FrameKind::Failure);
        assert_eq!(failure.status(), Status::Deposed, "{}", failure.message);
    }
    assert_eq!(bench.bucket.keys(), ["first"]);
    assert_eq!(persist(&mut second, &request("second", 1, 1000, &[0], 7)).await.status(), Status::Ok);
    // A heartbeat's answer says who leads as well.
    bench.membership.heard_of(7);
    second.send(FrameKind::Free, &free).await;
    let failure: Failure = second.receive().await.unwrap().decode(FrameKind::Failure);
    assert_eq!(failure.status(), Status::Deposed);
    // Who is no master is not asked.
    client.send(FrameKind::Free, &free).await;
    let freed: FreeReply = client.receive().await.unwrap().decode(FrameKind::FreeReply);
    assert_eq!(freed.blocks, 1);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_goes_in_parts_which_do_not_stay_when_one_fails() {
    let bench = Fixture::new("persist-large").await;
    let mut client = bench.unix().await;
    let bytes = noise(BLOCK as usize);
    write(&mut client, &block(1, 0), &bytes).await;
    write(&mut client, &block(1, 2), &bytes[..1000]).await;
    let length = 2 * BLOCK + 500;
    let large = request("large", 1, length, &[0, 2], 7);
    // The beginning, three parts of which the last fails, and the end of it.
    bench.mounts.inject(1, Faults { fail_every: NonZeroU64::new(4), ..Faults::default() });
    let failed = persist(&mut client, &large).await;
    assert_eq!(failed.status(), Status::UfsUnavailable, "{}", failed.message);
    tidied(&bench).await;
    assert!(bench.bucket.keys().is_empty());
    bench.mounts.inject(1, Faults::default());
    let reply = persist(&mut client, &large).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let (object, metadata) = bench.bucket.object("large").unwrap();
    assert_eq!((object.len() as u64, metadata["mode"].as_str()), (length, "33188"));
    assert!(object[..BLOCK as usize] == bytes && object[2 * BLOCK as usize..] == bytes[..500]);
    assert!(object[BLOCK as usize..2 * BLOCK as usize].iter().all(|byte| *byte == 0));
    assert_eq!((bench.metrics.persisted.get(), bench.metrics.persisted_bytes.get()), (1, length));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_written_to_meanwhile_is_not_made_an_object() {
    let bench = Fixture::new("persist-torn").await;
    let mut client = bench.unix().await;
    for index in 0..2 {
        write(&mut client, &block(1, index), &noise(BLOCK as usize)).await;
    }
    let ranges = vec![Range { offset: 0, length: 1 << 20 }];
    client.send(FrameKind::Reserve, &ReserveRequest { block: Some(block(1, 1)), ranges, ..Default::default() }).await;
    let reserved: ReserveReply = client.receive().await.unwrap().decode(FrameKind::ReserveReply);
    assert_eq!(reserved.status(), Status::Ok);
    let file = File::from(client.descriptors.pop().unwrap());
    bench.mounts.inject(1, Faults { delay: Duration::from_millis(100), ..Faults::default() });
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (stop, file) = (stop.clone(), file.try_clone().unwrap());
        move || {
            let mut value = 0u8;
            while !stop.load(Ordering::Acquire) {
                value = value.wrapping_add(1);
                file.write_all_at(&[value; 4096], 4096).unwrap();
                // Slow enough to look at rest to whoever looks once.
                std::thread::sleep(Duration::from_millis(60));
            }
            value
        }
    });
    let torn = request("torn", 1, 2 * BLOCK, &[0, 1], 7);
    let reply = persist(&mut client, &torn).await;
    assert_eq!(reply.status(), Status::Changed, "{}", reply.message);
    tidied(&bench).await;
    assert!(bench.bucket.keys().is_empty());
    stop.store(true, Ordering::Release);
    let value = writer.join().unwrap();
    let reply = persist(&mut client, &torn).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let (object, _) = bench.bucket.object("torn").unwrap();
    let at = BLOCK as usize + 4096;
    assert!(object[at..at + 4096].iter().all(|byte| *byte == value));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_ends_when_its_file_is_written_to() {
    let bench = Fixture::new("persist-vain").await;
    let mut client = bench.unix().await;
    // All behind that is zeros.
    write(&mut client, &block(1, 0), &noise(1000)).await;
    let ranges = vec![Range { offset: 0, length: 4096 }];
    client.send(FrameKind::Reserve, &ReserveRequest { block: Some(block(1, 0)), ranges, ..Default::default() }).await;
    let reserved: ReserveReply = client.receive().await.unwrap().decode(FrameKind::ReserveReply);
    assert_eq!(reserved.status(), Status::Ok);
    let file = File::from(client.descriptors.pop().unwrap());
    let turns = bench.bucket.take_parts_by_turns();
    let large = request("large", 1, 8 * BLOCK, &[0], 7);
    client.send(FrameKind::Persist, &large).await;
    // The bucket gets the first two parts, and four are on their way.
    turns.add_permits(2);
    let until = Instant::now() + PATIENCE;
    while turns.available_permits() > 0 {
        assert!(Instant::now() < until, "no part is sent");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    file.write_all_at(b"changed", 0).unwrap();
    turns.add_permits(100);
    let reply: PersistReply = client.receive().await.unwrap().decode(FrameKind::PersistReply);
    assert_eq!(reply.status(), Status::Changed, "{}", reply.message);
    assert!((2 * BLOCK..=6 * BLOCK).contains(&reply.sent_bytes), "{} bytes were sent", reply.sent_bytes);
    tidied(&bench).await;
    assert!(bench.bucket.keys().is_empty());
    let reply = persist(&mut client, &large).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let (object, _) = bench.bucket.object("large").unwrap();
    assert!(object.len() as u64 == 8 * BLOCK && object.starts_with(b"changed"));
    assert_eq!(object[7..1000], noise(1000)[7..]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_waits_for_any_more_is_given_up() {
    let bench = Fixture::new("persist-gone").await;
    let mut client = bench.tcp().await;
    write(&mut client, &block(1, 0), &noise(BLOCK as usize)).await;
    // None of its parts has a turn.
    bench.bucket.take_parts_by_turns();
    let mut asker = bench.tcp().await;
    asker.send(FrameKind::Persist, &request("gone", 1, 2 * BLOCK, &[0], 7)).await;
    let until = Instant::now() + PATIENCE;
    while bench.bucket.uploads() == 0 {
        assert!(Instant::now() < until, "the upload does not begin");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(asker);
    tidied(&bench).await;
    assert!(bench.bucket.keys().is_empty());
    bench.mounts.inject(1, Faults { delay: Duration::from_secs(60), ..Faults::default() });
    let late = persist(&mut client, &PersistRequest { deadline_ms: 50, ..request("late", 1, 10, &[0], 7) }).await;
    assert_eq!(late.status(), Status::Deadline);
    let uploads = bench.uploads.clone();
    bench.end().await;
    tokio::time::timeout(PATIENCE, uploads.finish()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_come_from_other_workers_too() {
    let (here, there) = (Fixture::new("persist-here").await, Fixture::new("persist-there").await);
    here.membership.set(8, "cluster-1");
    let (bytes, more) = (noise(BLOCK as usize), noise(12_345));
    let (mut near, mut far) = (here.tcp_as(8).await, there.tcp().await);
    write(&mut near, &block(1, 0), &more).await;
    write(&mut far, &block(1, 1), &bytes).await;
    // A replica that was given up: it has missed what was written since.
    write(&mut near, &block(1, 1), &noise(1000)).await;
    // The table is not there yet, and no master to ask for it.
    let both = PersistRequest { workers: vec![8, 7], ..request("both", 1, 2 * BLOCK, &[0, 1], 0) };
    assert_eq!(persist(&mut near, &both).await.status(), Status::IoError);
    let worker = Worker { id: 7, data_address: there.address().to_string(), ..Default::default() };
    here.pool.set_table("cluster-1", &WorkerTable { epoch: 1, workers: vec![worker] });
    let reply = persist(&mut near, &both).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let (object, _) = here.bucket.object("both").unwrap();
    assert!(object[..12_345] == more && object[BLOCK as usize..] == bytes);
    there.stores.data.free(&BlockId::of(&block(1, 1)).unwrap()).unwrap();
    assert_eq!(persist(&mut near, &both).await.status(), Status::NoSuchBlock);
    here.end().await;
    there.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_waits_for_makes_way_for_clients() {
    let bench = Fixture::new("persist-background").await;
    let mut client = bench.tcp().await;
    let bytes = noise(BLOCK as usize);
    write(&mut client, &block(1, 0), &bytes).await;
    let mut number = 0;
    let mut upload = async |client: &mut Client, background: bool| {
        number += 1;
        // Somebody is served.
        write(client, &block(2, 0), &bytes[..1000]).await;
        let request = PersistRequest { background, ..request(&format!("p/{number}"), 1, BLOCK, &[0], 7) };
        let reply = persist(client, &request).await;
        assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    };
    for _ in 0..3 {
        upload(&mut client, false).await;
    }
    assert_eq!(bench.metrics.persist_waits.get(), 0, "somebody waits");
    // The first of them has the rate to itself.
    upload(&mut client, true).await;
    let until = Instant::now() + PATIENCE;
    while bench.metrics.persist_waits.get() == 0 {
        assert!(Instant::now() < until, "no upload makes way");
        upload(&mut client, true).await;
    }
    bench.end().await;
}
