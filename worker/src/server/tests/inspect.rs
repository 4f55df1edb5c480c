//! What a worker says that it has, where its files are not as it knows them.

use std::fs::{self, OpenOptions};

use tokio::time::Instant;

use super::persist::{BLOCK, block, persist, request, write};
use super::*;

async fn inspect(client: &mut Client, request: &InspectRequest) -> InspectReply {
    client.send(FrameKind::Inspect, request).await;
    client.receive().await.unwrap().decode(FrameKind::InspectReply)
}

fn file_of(bench: &Fixture, name: &BlockRef) -> PathBuf {
    let target = crate::fill::BlockSource::parse_data(name.clone()).unwrap();
    bench.stores.data.find(&target, crate::store::Touch::None).unwrap().path().to_owned()
}

/// Flips a bit of a file.
fn damage(path: &Path, at: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_told_as_their_files_are() {
    let bench = Fixture::new("inspect").await;
    let mut client = bench.tcp().await;
    let bytes = noise(300_000);
    let sum = crc32c::crc32c(&bytes);
    for index in 0..4 {
        write(&mut client, &block(1, index), &bytes).await;
    }
    let persisted = persist(&mut client, &request("object", 1, 300_000, &[0], 7)).await;
    assert_eq!(persisted.status(), Status::Ok, "{}", persisted.message);
    // They are open.
    fs::remove_file(file_of(&bench, &block(1, 1))).unwrap();
    OpenOptions::new().write(true).open(file_of(&bench, &block(1, 2))).unwrap().set_len(BLOCK + 1).unwrap();
    damage(&file_of(&bench, &block(1, 3)), 5);

    let asked = |index: u32, read: u32, key: &str, etag: &str| inspect_request::Block {
        block: Some(block(1, index)),
        read,
        key: key.to_owned(),
        etag: etag.to_owned(),
    };
    let blocks = vec![
        asked(0, 300_000, "object", &persisted.etag),
        asked(1, 300_000, "", ""),
        asked(2, 0, "", ""),
        asked(3, 300_000, "", ""),
        asked(3, 0, "object", &persisted.etag),
        asked(0, 300_000, "object", "other"),
        asked(0, 300_000, "none", "other"),
        asked(4, 0, "", ""),
    ];
    let reply = inspect(&mut client, &InspectRequest { blocks, ..Default::default() }).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let of_files = [Status::Ok, Status::NoSuchBlock, Status::BadRequest, Status::Ok, Status::Ok];
    let of_objects = [Status::VersionChanged, Status::NotFound];
    let expected = [&of_files[..], &of_objects, &[Status::NoSuchBlock]].concat();
    let statuses: Vec<Status> = reply.blocks.iter().map(inspect_reply::Block::status).collect();
    assert_eq!(statuses, expected, "{reply:?}");
    assert_eq!([reply.blocks[0].crc, reply.blocks[0].object_crc], [sum; 2]);
    assert!(reply.blocks[3].crc != sum && reply.blocks[3].crc != 0);
    assert_eq!([reply.blocks[4].crc, reply.blocks[4].object_crc], [0; 2], "nothing of it was asked for");

    let many = InspectRequest { blocks: vec![asked(0, 0, "", ""); 1001], ..Default::default() };
    assert_eq!(inspect(&mut client, &many).await.status(), Status::BadRequest);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cached_blocks_are_compared_with_their_checksums_in_parts() {
    let bench = Fixture::new("inspect-cached").await;
    let mut client = bench.tcp().await;
    let bytes = noise(2 * CHUNK_BYTES as usize);
    let names: Vec<BlockRef> = (0..70).map(|number| bench.put(&format!("k{number}"), &bytes, MIB)).collect();
    for name in &names {
        client.read(vec![(name.clone(), 0, 2 * CHUNK_BYTES)]).await;
    }
    let damaged = &names[33];
    let query = QueryRequest { blocks: vec![damaged.clone()], held: None };
    client.send(FrameKind::Query, &query).await;
    let reply: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
    damage(Path::new(&reply.items[0].path), 5);

    // Their records may be written behind them.
    let until = Instant::now() + PATIENCE;
    let mut found = Vec::new();
    loop {
        let (mut verified, mut parts, mut place) = (0, 0, Some(CachePlace::default()));
        while let Some(verify) = place.take() {
            let reply = inspect(&mut client, &InspectRequest { verify: Some(verify), ..Default::default() }).await;
            assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
            found.extend(reply.damaged);
            (verified, parts, place) = (verified + reply.verified, parts + 1, reply.next);
        }
        if verified == names.len() as u64 {
            assert!(parts > 1, "more blocks than are compared for one answer");
            break;
        }
        assert!(Instant::now() < until, "{verified} blocks were compared");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(found, [BlockId::of(damaged).unwrap().to_string()]);
    let (reply, payload) = client.read(vec![(damaged.clone(), 0, 2 * CHUNK_BYTES)]).await;
    assert_eq!((reply.items[0].status(), &payload[..]), (Status::Ok, &bytes[..]), "it is fetched again");
    bench.end().await;
}
