//! Blocks and objects that are made, in part, of what the bucket has.

use super::persist::{BLOCK, block, persist, request, write};
use super::*;

/// The same block of an object.
fn of_object(key: &str, etag: &str, length: u64, index: u32) -> BlockRef {
    let content = ContentId::of_object("store", key, etag, length, BLOCK);
    BlockRef {
        content_id: content.as_bytes().to_vec().into(),
        index,
        block_size: BLOCK,
        mount_id: 1,
        key: key.into(),
        etag: etag.into(),
        object_length: length,
        ..BlockRef::default()
    }
}

async fn reserve(client: &mut Client, block: &BlockRef, origin: BlockRef, origin_bytes: u32) -> ReserveReply {
    let ranges = vec![Range { offset: 100, length: 5 }];
    let (block, origin) = (Some(block.clone()), Some(origin));
    let request = ReserveRequest { block, ranges, origin, origin_bytes, deadline_ms: 20_000, allocate: false };
    client.send(FrameKind::Reserve, &request).await;
    client.receive().await.unwrap().decode(FrameKind::ReserveReply)
}

async fn read(client: &mut Client, block: &BlockRef, length: u32) -> Vec<u8> {
    let item = read_request::Item { block: Some(block.clone()), range: Some(Range { offset: 0, length }), part: None };
    client.send(FrameKind::Read, &ReadRequest { items: vec![item], deadline_ms: 20_000 }).await;
    client.receive().await.unwrap().payload.to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_begins_with_what_the_bucket_has_or_not_at_all() {
    let bench = Fixture::new("origin-block").await;
    let mut client = bench.tcp().await;
    let length = BLOCK + 300_000;
    let object = noise(length as usize);
    let etag = bench.bucket.put("origin", object.clone());
    // Another version is there: no block is made.
    let gone = reserve(&mut client, &block(1, 1), of_object("origin", "other", length, 1), 300_000).await;
    assert_eq!(gone.status(), Status::VersionChanged);
    let missing = reserve(&mut client, &block(1, 1), of_object("none", "e", length, 1), 300_000).await;
    assert_eq!(missing.status(), Status::NotFound);
    client.send(FrameKind::Query, &QueryRequest { blocks: vec![block(1, 1)], held: None }).await;
    let known: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    assert!(!known.items[0].known);
    for senseless in [of_object("origin", &etag, length, 0), block(1, 1)] {
        assert_eq!(reserve(&mut client, &block(1, 1), senseless, 10).await.status(), Status::BadRequest);
    }
    let long = reserve(&mut client, &block(1, 1), of_object("origin", &etag, length, 1), 300_001).await;
    assert_eq!(long.status(), Status::BadRequest);

    // A part of what the object has there, and zeros behind it.
    let origin = of_object("origin", &etag, length, 1);
    let made = reserve(&mut client, &block(1, 1), origin.clone(), 200_000).await;
    assert_eq!(made.status(), Status::Ok, "{}", made.message);
    let start = BLOCK as usize;
    let mut expected = object[start..start + 200_000].to_vec();
    expected.resize(300_000, 0);
    assert!(read(&mut client, &block(1, 1), 300_000).await == expected);

    // What is there already stays as it is, whatever the bucket has.
    write(&mut client, &block(1, 1), b"written").await;
    bench.bucket.delete("origin");
    let again = reserve(&mut client, &block(1, 1), origin, 200_000).await;
    assert_eq!((again.status(), again.incarnation), (Status::Ok, made.incarnation));
    assert_eq!(read(&mut client, &block(1, 1), 7).await, b"written");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_begins_with_what_an_earlier_one_of_the_file_has_or_not_at_all() {
    let bench = Fixture::new("origin-frozen").await;
    let mut client = bench.tcp().await;
    let of =
        |inode: u64, generation: u32, index: u32| BlockRef::of_inode("cluster-1", inode, generation, index, BLOCK, 1);
    let (frozen, next, all) = (of(1, 2, 1), of(1, 5, 1), BLOCK as u32);
    let missing = reserve(&mut client, &next, frozen.clone(), all).await;
    assert_eq!(missing.status(), Status::NoSuchBlock);
    // A hole between two pieces, and an end within a chunk.
    let (first, last) = (noise(100_000), noise(70_001));
    write(&mut client, &frozen, &first).await;
    let offset = MIB as u32;
    let request = WriteRequest { block: Some(frozen.clone()), offset, ..Default::default() };
    client.send_with(FrameKind::Write, &request, &last).await;
    let written: WriteReply = client.receive().await.unwrap().decode(FrameKind::WriteReply);
    assert_eq!(written.status(), Status::Ok, "{}", written.message);
    for (other, why) in [
        (of(2, 2, 1), "of another file"),
        (of(1, 2, 0), "another of the file"),
        (of(1, 5, 1), "itself"),
        (of(1, 6, 1), "a later one"),
        (BlockRef { generation: 2, ..of(2, 3, 1) }, "another under its name"),
        (BlockRef { block_size: BLOCK / 2, ..frozen.clone() }, "of another size"),
        (BlockRef { mount_id: 2, ..frozen.clone() }, "of another mount"),
    ] {
        let other = BlockRef { inode: 1, ..other };
        assert_eq!(reserve(&mut client, &next, other, all).await.status(), Status::BadRequest, "{why}");
    }
    client.send(FrameKind::Query, &QueryRequest { blocks: vec![next.clone()], held: None }).await;
    let known: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    assert!(!known.items[0].known);

    let made = reserve(&mut client, &next, frozen.clone(), all).await;
    assert_eq!(made.status(), Status::Ok, "{}", made.message);
    let length = offset + last.len() as u32 + 1000;
    let mut expected = vec![0; length as usize];
    expected[..first.len()].copy_from_slice(&first);
    expected[offset as usize..][..last.len()].copy_from_slice(&last);
    assert!(read(&mut client, &next, length).await == expected);
    assert!(made.allocated.unwrap() < u64::from(offset), "the hole is one still");

    // When all clients have settled, nobody else writes to what a view has.
    let (uri, write_type) = ("memory://server-origin-frozen".to_owned(), WriteType::FsMode as i32);
    let (frozen_below, frozen_inodes, settled_below) = (5, 1, 5);
    let mount = Mount { id: 1, uri, write_type, frozen_below, frozen_inodes, settled_below, ..Default::default() };
    bench.mounts.apply(MountTable { epoch: 2, mounts: vec![mount], status: vec![] });
    let request = WriteRequest { block: Some(frozen.clone()), ..Default::default() };
    client.send_with(FrameKind::Write, &request, b"late").await;
    let late: WriteReply = client.receive().await.unwrap().decode(FrameKind::WriteReply);
    assert_eq!(late.status(), Status::Frozen);
    let request = ReserveRequest { block: Some(frozen.clone()), ..Default::default() };
    client.send(FrameKind::Reserve, &request).await;
    let late: ReserveReply = client.receive().await.unwrap().decode(FrameKind::ReserveReply);
    assert_eq!(late.status(), Status::Frozen);

    let as_frozen = BlockRef { pinned: true, ..frozen.clone() };
    assert!(read(&mut client, &as_frozen, length).await == expected);

    // Each goes its own way from here on, and what is there stays as it is.
    write(&mut client, &next, b"written").await;
    let again = reserve(&mut client, &next, frozen.clone(), all).await;
    assert_eq!((again.status(), again.incarnation), (Status::Ok, made.incarnation));
    assert_eq!(read(&mut client, &next, 7).await, b"written");
    assert!(read(&mut client, &frozen, length).await == expected);

    // Without a view it may be written to, so nobody reads it for one; for the file it is read on.
    let uri = "memory://server-origin-frozen".to_owned();
    let mount = Mount { id: 1, uri, write_type, ..Default::default() };
    bench.mounts.apply(MountTable { epoch: 3, mounts: vec![mount], status: vec![] });
    for length in [7, length] {
        let (reply, bytes) = client.read(vec![(as_frozen.clone(), 0, length)]).await;
        assert_eq!((reply.items[0].status(), bytes.len()), (Status::NoSuchBlock, 0), "{}", reply.items[0].message);
    }
    let opened = bench.unix().await.open(vec![as_frozen]).await;
    assert_eq!(opened.items[0].status(), Status::NoSuchBlock);
    assert!(read(&mut client, &frozen, length).await == expected);
    client.send(FrameKind::Free, &FreeRequest { blocks: vec![frozen.clone()] }).await;
    let freed: FreeReply = client.receive().await.unwrap().decode(FrameKind::FreeReply);
    assert_eq!(freed.blocks, 1);
    assert_eq!(reserve(&mut client, &next, frozen, all).await.status(), Status::Ok, "it is here already");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_composed_of_blocks_and_of_another_object() {
    let bench = Fixture::new("origin-object").await;
    let mut client = bench.tcp().await;
    // Ends in the middle of the third block.
    let valid = 2 * BLOCK + 1000;
    let mut expected = noise(valid as usize + 5000);
    let origin_etag = bench.bucket.put("origin", expected.clone());
    let written = noise(77);
    write(&mut client, &block(1, 1), &written).await;
    let start = BLOCK as usize;
    expected[start..2 * start].fill(0);
    expected[start..start + 77].copy_from_slice(&written);
    expected[valid as usize..].fill(0);
    let mixed = PersistRequest {
        origin_key: "origin".into(),
        origin_etag: origin_etag.clone(),
        origin_bytes: valid,
        ..request("mixed", 1, expected.len() as u64, &[1], 7)
    };
    let reply = persist(&mut client, &mixed).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    assert!(bench.bucket.object("mixed").unwrap().0 == expected);
    // Over itself, and then no more, since it is another version by now.
    let over = PersistRequest {
        key: "origin".into(),
        replaces: origin_etag,
        length: 1000,
        indexes: vec![],
        generations: vec![],
        copies: vec![],
        workers: vec![],
        ..mixed
    };
    assert_eq!(persist(&mut client, &over).await.status(), Status::Ok);
    assert!(bench.bucket.object("origin").unwrap().0 == expected[..1000]);
    assert_eq!(persist(&mut client, &over).await.status(), Status::NotFound);
    bench.end().await;
}
