//! Writes as a client sends them: frames with payloads, descriptors, and what makes no sense.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use cavern_proto::CHUNK_BYTES;
use cavern_proto::data::*;
use cavern_proto::frame::{FrameKind, MAX_WRITE_BYTES, encode_frame};

use super::{LONGEST_PAUSE, pause};
use crate::server::tests::{Client, Fixture, noise};

const BLOCK_BYTES: u32 = 1 << 20;

fn block(inode: u64, index: u32) -> BlockRef {
    BlockRef::of_inode("cluster-1", inode, 1, index, u64::from(BLOCK_BYTES), 3)
}

fn write_of(block: BlockRef, offset: u32) -> WriteRequest {
    WriteRequest { block: Some(block), offset, ..Default::default() }
}

async fn write(client: &mut Client, request: WriteRequest, payload: &[u8]) -> WriteReply {
    let id = client.send_with(FrameKind::Write, &request, payload).await;
    let answer = client.receive().await.unwrap();
    assert_eq!(answer.request_id, id);
    answer.decode(FrameKind::WriteReply)
}

async fn reserve(client: &mut Client, block: BlockRef, ranges: Vec<Range>) -> ReserveReply {
    client.send(FrameKind::Reserve, &ReserveRequest { block: Some(block), ranges, ..Default::default() }).await;
    client.receive().await.unwrap().decode(FrameKind::ReserveReply)
}

async fn sync(client: &mut Client, blocks: Vec<BlockRef>) -> SyncReply {
    client.send(FrameKind::Sync, &SyncRequest { blocks, failed: Vec::new() }).await;
    client.receive().await.unwrap().decode(FrameKind::SyncReply)
}

async fn sync_failed(client: &mut Client, failed: Vec<BlockRef>) -> SyncReply {
    client.send(FrameKind::Sync, &SyncRequest { blocks: Vec::new(), failed }).await;
    client.receive().await.unwrap().decode(FrameKind::SyncReply)
}

async fn free(client: &mut Client, block: BlockRef) -> FreeReply {
    client.send(FrameKind::Free, &FreeRequest { blocks: vec![block] }).await;
    client.receive().await.unwrap().decode(FrameKind::FreeReply)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_is_read_synced_and_freed() {
    let bench = Fixture::new("writes").await;
    for unix in [false, true] {
        let mut client = if unix { bench.unix().await } else { bench.tcp().await };
        let (one, other) = (block(u64::from(unix), 0), block(u64::from(unix), 7));
        let bytes = noise(BLOCK_BYTES as usize);
        let first = write(&mut client, WriteRequest { sync: true, ..write_of(one.clone(), 0) }, &bytes).await;
        assert_eq!(first.status(), Status::Ok, "{}", first.message);
        let zero = vec![Range { offset: 0, length: 200_000 }, Range { offset: BLOCK_BYTES - 10, length: 10 }];
        let second = write(&mut client, WriteRequest { zero, ..write_of(one.clone(), 100) }, b"hello").await;
        assert_eq!((second.status(), second.incarnation), (Status::Ok, first.incarnation));
        // Nothing but zeros, in a block that was not there.
        assert_eq!(write(&mut client, write_of(other.clone(), BLOCK_BYTES), &[]).await.status(), Status::Ok);
        let mut expected = bytes;
        expected[..200_000].fill(0);
        expected[BLOCK_BYTES as usize - 10..].fill(0);
        expected[100..105].copy_from_slice(b"hello");

        let items = vec![(one.clone(), 0, u32::MAX), (other.clone(), 5, 10), (block(99, 0), 0, 1)];
        let (reply, payload) = client.read(items).await;
        let statuses: Vec<Status> = reply.items.iter().map(|item| item.status()).collect();
        assert_eq!(statuses, [Status::Ok, Status::Ok, Status::NoSuchBlock]);
        assert!(payload == [&expected[..], &[0; 10]].concat());
        assert!(reply.items.iter().all(|item| item.chunk_crcs.is_empty()));
        let (first, second) = payload.split_at(BLOCK_BYTES as usize);
        let checksums = |bytes: &[u8]| bytes.chunks(CHUNK_BYTES as usize).map(crc32c::crc32c).collect::<Vec<_>>();
        assert_eq!(reply.items[0].sent_crcs, checksums(first), "of what is sent, whatever the chunks are");
        assert_eq!(reply.items[1].sent_crcs, checksums(second));
        let (reply, payload) = client.read(vec![(one.clone(), 1000, CHUNK_BYTES + 500)]).await;
        assert_eq!(reply.items[0].sent_crcs, checksums(&payload), "from the first byte that is sent on");

        assert_eq!(sync(&mut client, vec![one.clone(), other.clone()]).await.status(), Status::Ok);
        assert_eq!(sync(&mut client, vec![]).await.status(), Status::Ok);
        assert_eq!(sync(&mut client, vec![one.clone(), block(99, 0)]).await.status(), Status::NoSuchBlock);

        let as_object = BlockRef { data: false, object_length: 5, ..one.clone() };
        assert_eq!(free(&mut client, as_object.clone()).await.blocks, 0, "data goes only as data");
        let (reply, _) = client.read(vec![(as_object, 0, 5)]).await;
        assert_ne!(reply.items[0].status(), Status::Ok, "data is read only as data");
        let freed = free(&mut client, one.clone()).await;
        assert!(freed.blocks == 1 && freed.bytes > 0, "{freed:?}");
        assert_eq!(free(&mut client, one.clone()).await.blocks, 0);
        let (reply, _) = client.read(vec![(one.clone(), 0, 1)]).await;
        assert_eq!(reply.items[0].status(), Status::NoSuchBlock);
        assert_eq!(sync(&mut client, vec![one]).await.status(), Status::NoSuchBlock);
    }
    assert_eq!(bench.stores.table.usage()[0].blocks, 2);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cut_off_is_gone_and_the_file_of_the_block_ends_there() {
    let bench = Fixture::new("cut").await;
    let (mut client, bytes) = (bench.tcp().await, noise(50_000));
    assert_eq!(write(&mut client, write_of(block(1, 0), 0), &bytes).await.status(), Status::Ok);
    let query = async |client: &mut Client| {
        let request = QueryRequest { blocks: vec![block(1, 0)], held: None };
        client.send(FrameKind::Query, &request).await;
        let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
        (reply.items[0].end, reply.items[0].length)
    };
    assert_eq!(query(&mut client).await, (50_000, BLOCK_BYTES));
    let cut =
        |offset: u32, length: u32| WriteRequest { cut: Some(Range { offset, length }), ..write_of(block(1, 0), 0) };
    assert_eq!(write(&mut client, cut(10_000, 40_000), &[]).await.status(), Status::Ok);
    assert_eq!(query(&mut client).await, (10_000, BLOCK_BYTES));
    let (reply, payload) = client.read(vec![(block(1, 0), 0, 20_000)]).await;
    assert_eq!(reply.items[0].status(), Status::Ok);
    assert!(payload == [&bytes[..10_000], &[0; 10_000]].concat());
    let elsewhere = WriteRequest { block: Some(block(9, 0)), ..cut(0, 10) };
    assert_eq!(write(&mut client, elsewhere, &[]).await.status(), Status::NoSuchBlock);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_a_file_that_did_not_arrive_as_they_were_sent_are_counted_and_stay() {
    let bench = Fixture::new("damaged-sends").await;
    let (mut client, bytes) = (bench.tcp().await, noise(BLOCK_BYTES as usize));
    write(&mut client, write_of(block(1, 0), 0), &bytes).await;
    let report = CorruptRequest { block: Some(block(1, 0)), chunks: vec![1] };
    client.send(FrameKind::Corrupt, &report).await;
    client.receive().await.unwrap().decode::<CorruptReply>(FrameKind::CorruptReply);
    assert_eq!(bench.metrics.corrupt_chunks.get(), 1);
    let (reply, payload) = client.read(vec![(block(1, 0), 0, BLOCK_BYTES)]).await;
    assert!(reply.items[0].status() == Status::Ok && payload == bytes);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_begins_with_bytes_and_one_that_is_there_is_written() {
    let bench = Fixture::new("begins").await;
    let mut client = bench.tcp().await;
    let begins = |block| WriteRequest { begins: true, ..write_of(block, 0) };
    let bytes = noise(200_000);
    let first = write(&mut client, begins(block(1, 0)), &bytes).await;
    assert_eq!(first.status(), Status::Ok, "{}", first.message);
    let again = write(&mut client, begins(block(1, 0)), b"over it").await;
    assert_eq!((again.status(), again.incarnation), (Status::Ok, first.incarnation));
    assert_eq!(write(&mut client, begins(block(2, 0)), b"").await.status(), Status::Ok);
    let items = vec![(block(1, 0), 0, 200_001), (block(2, 0), BLOCK_BYTES - 1, 1)];
    let (_, payload) = client.read(items).await;
    assert!(payload == [b"over it", &bytes[7..], &[0; 2]].concat());
    for wrong in [
        WriteRequest { offset: 1, ..begins(block(3, 0)) },
        WriteRequest { zero: vec![Range { offset: 0, length: 1 }], ..begins(block(3, 0)) },
    ] {
        assert_eq!(write(&mut client, wrong, b"x").await.status(), Status::BadRequest);
    }
    assert_eq!(bench.stores.table.usage()[0].blocks, 2);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_this_host_writes_through_a_descriptor() {
    let bench = Fixture::new("reserve").await;
    let (mut near, mut far) = (bench.unix().await, bench.tcp().await);
    let whole = vec![Range { offset: 0, length: BLOCK_BYTES }];
    let reserved = reserve(&mut near, block(1, 0), whole.clone()).await;
    assert_eq!(reserved.status(), Status::Ok, "{}", reserved.message);
    let file = File::from(near.descriptors.pop().unwrap());
    let bytes = noise(BLOCK_BYTES as usize);
    file.write_all_at(&bytes, 0).unwrap();
    assert_eq!(file.metadata().unwrap().len(), u64::from(BLOCK_BYTES));
    assert_eq!(sync(&mut far, vec![block(1, 0)]).await.status(), Status::Ok);
    let (_, payload) = far.read(vec![(block(1, 0), 0, BLOCK_BYTES)]).await;
    assert!(payload == bytes);

    // Over TCP there is room, and no descriptor.
    let again = reserve(&mut far, block(1, 0), whole.clone()).await;
    assert_eq!((again.status(), again.incarnation), (Status::Ok, reserved.incarnation));
    let usage = bench.stores.table.usage();
    assert_eq!((usage[0].data_bytes, usage[0].blocks), (u64::from(BLOCK_BYTES), 1));

    // To read it, one that cannot be written; of a block that is not here, none.
    let opened = near.open(vec![block(1, 0), block(2, 0)]).await;
    let statuses: Vec<Status> = opened.items.iter().map(|item| item.status()).collect();
    assert_eq!(statuses, [Status::Ok, Status::NoSuchBlock]);
    assert_eq!((opened.items[0].incarnation, opened.items[0].length), (reserved.incarnation, BLOCK_BYTES));
    let reader = File::from(near.descriptors.pop().unwrap());
    assert!(near.descriptors.is_empty() && reader.write_at(b"x", 0).is_err());

    // A refusal has no descriptor either: 256 MiB is all there is.
    let large = BlockRef { block_size: 1 << 30, ..block(3, 0) };
    let refused = reserve(&mut near, large, vec![Range { offset: 0, length: 257 << 20 }]).await;
    assert_eq!(refused.status(), Status::NoSpace);
    assert!(near.descriptors.is_empty());
    assert_eq!(bench.stores.table.usage()[0].blocks, 1);

    // A client that holds descriptors is notified of the end, and they go on working.
    assert_eq!(free(&mut far, block(1, 0)).await.blocks, 1);
    let evicted: Evicted = near.receive().await.unwrap().decode(FrameKind::Evicted);
    assert_eq!(evicted.blocks[0].incarnation, reserved.incarnation);
    file.write_all_at(b"after", 0).unwrap();
    let mut read = [0; 5];
    reader.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"after");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_make_no_sense_are_refused_alone() {
    let bench = Fixture::new("nonsense").await;
    let mut client = bench.tcp().await;
    let good = write_of(block(1, 0), 0);
    let range = |offset, length| Range { offset, length };
    let wrong = [
        write_of(block(1, 0), BLOCK_BYTES - 9),
        write_of(block(1, 0), u32::MAX),
        WriteRequest { zero: vec![range(BLOCK_BYTES, 1)], ..good.clone() },
        WriteRequest { zero: vec![range(u32::MAX, u32::MAX)], ..good.clone() },
        WriteRequest { zero: vec![range(0, 1); 1025], ..good.clone() },
        WriteRequest { cut: Some(range(BLOCK_BYTES, 1)), ..good.clone() },
        WriteRequest { cut: Some(range(0, 1)), begins: true, ..good.clone() },
        WriteRequest { block: None, ..good.clone() },
        write_of(BlockRef { data: false, object_length: 100, ..block(1, 0) }, 0),
        write_of(BlockRef { key: "k".into(), ..block(1, 0) }, 0),
        write_of(BlockRef { block_size: 0, ..block(1, 0) }, 0),
        write_of(BlockRef { block_size: u64::MAX, ..block(1, 0) }, 0),
        write_of(BlockRef { content_id: vec![1; 5].into(), ..block(1, 0) }, 0),
    ];
    for request in wrong {
        let reply = write(&mut client, request.clone(), b"0123456789").await;
        assert_eq!(reply.status(), Status::BadRequest, "{request:?}");
        assert!(!reply.message.is_empty());
    }
    for (block, ranges) in [
        (block(1, 0), vec![range(1, BLOCK_BYTES)]),
        (block(1, 0), vec![range(0, 1); 1025]),
        (BlockRef::default(), vec![]),
    ] {
        assert_eq!(reserve(&mut client, block, ranges).await.status(), Status::BadRequest);
    }
    assert_eq!(sync(&mut client, vec![BlockRef::default()]).await.status(), Status::BadRequest);
    assert_eq!(bench.stores.table.usage()[0].blocks, 0, "nothing was made");
    // The connection goes on, and a block keeps its size.
    assert_eq!(write(&mut client, good.clone(), b"0123456789").await.status(), Status::Ok);
    let other = BlockRef { block_size: 4096, ..block(1, 0) };
    assert_eq!(write(&mut client, write_of(other, 0), b"x").await.status(), Status::BadRequest);

    // What announces too much, or a payload where none belongs, has no next frame.
    for (kind, bytes) in [(FrameKind::Write, MAX_WRITE_BYTES + 1), (FrameKind::Sync, 1), (FrameKind::Reserve, 1)] {
        let mut client = bench.tcp().await;
        client.send_raw(&encode_frame(kind, 9, &good, bytes)).await.unwrap();
        let failure: Failure = client.receive().await.unwrap().decode(FrameKind::Failure);
        assert_eq!(failure.status(), Status::BadRequest);
        assert!(failure.message.contains("payload"), "{}", failure.message);
        assert!(client.receive().await.is_none());
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_payloads_arrive_whole_among_other_requests() {
    let bench = Fixture::new("large").await;
    let bytes = noise(MAX_WRITE_BYTES as usize);
    let large = |index| BlockRef { block_size: u64::from(MAX_WRITE_BYTES), ..block(1, index) };
    for unix in [false, true] {
        let mut client = if unix { bench.unix().await } else { bench.tcp().await };
        // More than a connection has in flight: it is slowed down, and nothing is lost.
        let mut ids = Vec::new();
        for index in 0..6 {
            ids.push(client.send_with(FrameKind::Write, &write_of(large(index), 0), &bytes).await);
            let query = QueryRequest { blocks: vec![large(index)], held: None };
            ids.push(client.send(FrameKind::Query, &query).await);
        }
        let mut answered = Vec::new();
        for _ in 0..ids.len() {
            let answer = client.receive().await.unwrap();
            answered.push(answer.request_id);
            if answer.kind == FrameKind::WriteReply {
                assert_eq!(answer.decode::<WriteReply>(FrameKind::WriteReply).status(), Status::Ok);
            }
        }
        answered.sort_unstable();
        assert_eq!(answered, ids);
        for index in 0..6 {
            let (_, payload) = client.read(vec![(large(index), 0, MAX_WRITE_BYTES)]).await;
            assert!(payload == bytes);
        }
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_waits_for_memory_and_is_refused_when_there_is_none_in_time() {
    let bench = Fixture::new("memory").await;
    let all = bench.memory.clone().acquire_many_owned(64 << 10).await.unwrap();
    let mut client = bench.tcp().await;
    let bytes = noise(100_000);
    let id = client.send_with(FrameKind::Write, &write_of(block(1, 0), 0), &bytes).await;
    let waiting = tokio::time::timeout(Duration::from_millis(200), client.receive()).await;
    assert!(waiting.is_err(), "answered without memory");
    drop(all);
    let answer = client.receive().await.unwrap();
    assert_eq!(answer.request_id, id);
    assert_eq!(answer.decode::<WriteReply>(FrameKind::WriteReply).status(), Status::Ok);

    let all = bench.memory.clone().acquire_many_owned(64 << 10).await.unwrap();
    assert_eq!(write(&mut client, write_of(block(2, 0), 0), &bytes).await.status(), Status::Overloaded);
    drop(all);
    assert_eq!(write(&mut client, write_of(block(2, 0), 0), &bytes).await.status(), Status::Ok);
    assert_eq!(bench.memory.available_permits(), 64 << 10, "all memory was given back");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_a_request_names_often_is_synced_once() {
    let bench = Fixture::new("named-often").await;
    let mut client = bench.tcp().await;
    assert_eq!(write(&mut client, write_of(block(1, 0), 0), b"data").await.status(), Status::Ok);
    let before = bench.metrics.syncs.get();
    assert_eq!(sync(&mut client, vec![block(1, 0); 1000]).await.status(), Status::Ok);
    assert_eq!(bench.metrics.syncs.get() - before, 1);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_could_not_sync_is_synced_no_more() {
    let bench = Fixture::new("failed-syncs").await;
    let mut client = bench.unix().await;
    let (one, other) = (block(1, 0), block(2, 0));
    for block in [&one, &other] {
        assert_eq!(write(&mut client, write_of(block.clone(), 0), b"data").await.status(), Status::Ok);
    }
    assert_eq!(sync_failed(&mut client, vec![one.clone()]).await.status(), Status::Ok);
    let refused = sync(&mut client, vec![one]).await;
    assert!(refused.status() == Status::IoError && refused.message.contains("earlier sync"), "{refused:?}");
    assert_eq!(sync(&mut client, vec![other]).await.status(), Status::Ok);
    assert_eq!(sync_failed(&mut client, vec![block(9, 0)]).await.status(), Status::NoSuchBlock);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_touched_under_its_own_mount_only() {
    let bench = Fixture::new("other-mount").await;
    for unix in [false, true] {
        let mut client = if unix { bench.unix().await } else { bench.tcp().await };
        let own = block(1, u32::from(unix));
        assert_eq!(write(&mut client, write_of(own.clone(), 0), b"data").await.status(), Status::Ok);
        let elsewhere = BlockRef { mount_id: 4, ..own.clone() };
        let begins = WriteRequest { begins: true, ..write_of(elsewhere.clone(), 0) };
        for request in [write_of(elsewhere.clone(), 0), begins] {
            let refused = write(&mut client, request, b"evil").await;
            assert_eq!(refused.status(), Status::BadRequest);
            assert!(refused.message.contains("is one of mount 3, not of 4"), "{}", refused.message);
        }
        let range = vec![Range { offset: 0, length: 4 }];
        assert_eq!(reserve(&mut client, elsewhere.clone(), range).await.status(), Status::BadRequest);
        assert_eq!(sync(&mut client, vec![elsewhere.clone()]).await.status(), Status::BadRequest);
        assert_eq!(sync_failed(&mut client, vec![elsewhere.clone()]).await.status(), Status::BadRequest);
        let (read, payload) = client.read(vec![(elsewhere.clone(), 0, 4)]).await;
        assert_eq!((read.items[0].status(), payload.len()), (Status::BadRequest, 0));
        assert_eq!(free(&mut client, elsewhere).await.blocks, 0);
        assert_eq!(sync(&mut client, vec![own.clone()]).await.status(), Status::Ok);
        let (_, payload) = client.read(vec![(own, 0, 4)]).await;
        assert_eq!(payload, b"data"[..]);
    }
    bench.end().await;
}

#[test]
fn the_fuller_the_disks_are_the_slower_is_room_given() {
    let pauses = [50, 85, 90, 95, 100].map(|data| pause(data, 100));
    assert_eq!(pauses[..2], [Duration::ZERO; 2]);
    assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]), "{pauses:?}");
    assert!(pauses[2] > Duration::ZERO && pauses[2] < LONGEST_PAUSE / 5);
    assert_eq!((pauses[4], pause(0, 0), pause(1, 0)), (LONGEST_PAUSE, Duration::ZERO, Duration::ZERO));
}
