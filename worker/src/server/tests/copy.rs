//! Blocks copied from another worker: all of them, from a source at rest, instead of what was there.

use cavern_proto::master::{Worker, WorkerTable};

use super::persist::{block, write};
use super::*;

const BLOCK: usize = 8 * MIB as usize;

async fn copy(client: &mut Client, request: &CopyRequest) -> CopyReply {
    client.send(FrameKind::Copy, request).await;
    client.receive().await.unwrap().decode(FrameKind::CopyReply)
}

fn content(bench: &Fixture, name: &BlockRef) -> Vec<u8> {
    let target = crate::fill::BlockSource::parse_data(name.clone()).unwrap();
    let block = bench.stores.data.find(&target, crate::store::Touch::None).unwrap();
    let mut bytes = vec![0; BLOCK];
    block.read(0, &mut bytes).unwrap();
    bytes
}

fn end(bench: &Fixture, name: &BlockRef) -> u32 {
    let target = crate::fill::BlockSource::parse_data(name.clone()).unwrap();
    bench.stores.data.find(&target, crate::store::Touch::None).unwrap().end().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_the_source_and_nothing_of_what_was_there_before() {
    let (here, there) = (Fixture::new("copy-here").await, Fixture::new("copy-there").await);
    here.membership.set(8, "cluster-1");
    let worker =
        |id: u64, bench: &Fixture| Worker { id, data_address: bench.address().to_string(), ..Default::default() };
    here.pool.set_table("cluster-1", &WorkerTable { epoch: 1, workers: vec![worker(7, &there)] });
    let (mut near, mut far) = (here.tcp_as(8).await, there.tcp().await);
    let name = block(1, 1);
    let (data, old) = (noise(300_000), noise(BLOCK));
    write(&mut near, &name, &old).await;
    let source = WriteRequest { block: Some(name.clone()), offset: 5 * MIB as u32, ..Default::default() };
    far.send_with(FrameKind::Write, &source, &data).await;
    let written: WriteReply = far.receive().await.unwrap().decode(FrameKind::WriteReply);
    assert_eq!(written.status(), Status::Ok);

    let request = CopyRequest { block: Some(name.clone()), workers: vec![7], deadline_ms: 20_000 };
    let reply = copy(&mut near, &request).await;
    assert_eq!(reply.status(), Status::Ok, "{}", reply.message);
    let mut expected = vec![0; BLOCK];
    expected[5 * MIB as usize..][..data.len()].copy_from_slice(&data);
    assert!(content(&here, &name) == expected);
    assert_eq!(
        [end(&here, &name), end(&there, &name)],
        [5 * MIB as u32 + 300_000; 2],
        "its file ends where that one's does"
    );
    let used: u64 = here.stores.table.usage().iter().map(|disk| disk.used_bytes).sum();
    assert!(used < 2 * MIB, "{used} bytes are used where most is a hole");

    // A source without the block leaves nothing behind, and another one may have it.
    here.pool.set_table("cluster-1", &WorkerTable { epoch: 2, workers: vec![worker(7, &there), worker(9, &there)] });
    there.stores.data.free(&BlockId::of(&name).unwrap()).unwrap();
    assert_eq!(copy(&mut near, &request).await.status(), Status::NoSuchBlock);
    let query: QueryReply = {
        near.send(FrameKind::Query, &QueryRequest { blocks: vec![name.clone()], held: None }).await;
        near.receive().await.unwrap().decode(FrameKind::QueryReply)
    };
    assert!(!query.items[0].known);
    write(&mut far, &name, &data).await;
    let either = CopyRequest { workers: vec![9, 7], ..request.clone() };
    assert_eq!(copy(&mut near, &either).await.status(), Status::Ok, "worker 9 cannot be reached under that name");
    assert!(content(&here, &name).starts_with(&data));

    for nonsense in [vec![], vec![8], vec![1; 17]] {
        let reply = copy(&mut near, &CopyRequest { workers: nonsense, ..request.clone() }).await;
        assert_eq!(reply.status(), Status::BadRequest);
    }
    assert!(content(&here, &name).starts_with(&data), "a request without sense changes nothing");
    here.end().await;
    there.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_is_being_copied_is_not_here_before_it_is_whole_nor_when_it_is_freed_meanwhile() {
    let (here, there) = (Fixture::new("copy-joining").await, Fixture::new("copy-joined").await);
    here.membership.set(8, "cluster-1");
    let source = Worker { id: 7, data_address: there.address().to_string(), ..Default::default() };
    here.pool.set_table("cluster-1", &WorkerTable { epoch: 1, workers: vec![source] });
    let (mut master, mut client, mut far) = (here.tcp_as(8).await, here.tcp_as(8).await, there.tcp().await);
    let (name, data) = (block(1, 0), noise(300_000));
    // What was here at an earlier time is not what the block has now.
    write(&mut client, &name, &noise(1000)).await;
    write(&mut far, &name, &data).await;
    let request = CopyRequest { block: Some(name.clone()), workers: vec![7], deadline_ms: 20_000 };
    let id = BlockId::of(&name).unwrap();
    for is_freed in [false, true] {
        // What it has read of the source has no place meanwhile.
        let memory = here.memory.clone().acquire_many_owned(64 << 10).await.unwrap();
        master.send(FrameKind::Copy, &request).await;
        let until = tokio::time::Instant::now() + PATIENCE;
        while !has_draft(&here) {
            assert!(tokio::time::Instant::now() < until, "no copy is begun");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        client.send(FrameKind::Query, &QueryRequest { blocks: vec![name.clone()], held: None }).await;
        let query: QueryReply = client.receive().await.unwrap().decode(FrameKind::QueryReply);
        assert!(!query.items[0].known);
        let open = open_request::Item { block: Some(name.clone()), want: vec![] };
        let mut same_host = Client::greet(Stream::Unix(UnixStream::connect(here.socket()).await.unwrap()), 8).await;
        same_host.send(FrameKind::Open, &OpenRequest { items: vec![open], deadline_ms: 10_000 }).await;
        let opened: OpenReply = same_host.receive().await.unwrap().decode(FrameKind::OpenReply);
        assert_eq!(opened.items[0].status(), Status::NoSuchBlock, "{}", opened.items[0].message);
        if is_freed {
            client.send(FrameKind::Free, &FreeRequest { blocks: vec![name.clone()] }).await;
            let freed: FreeReply = client.receive().await.unwrap().decode(FrameKind::FreeReply);
            assert_eq!(freed.blocks, 0);
        }
        drop(memory);
        let reply: CopyReply = master.receive().await.unwrap().decode(FrameKind::CopyReply);
        assert_eq!(reply.status(), if is_freed { Status::Changed } else { Status::Ok }, "{}", reply.message);
        assert_eq!(here.stores.data.get(&id, crate::store::Touch::None).is_absent(), is_freed);
        if !is_freed {
            assert!(content(&here, &name).starts_with(&data));
        }
        assert!(!has_draft(&here));
    }
    here.end().await;
    there.end().await;
}

/// Whether a block is being made that is not whole.
fn has_draft(bench: &Fixture) -> bool {
    let folders = std::fs::read_dir(bench.home.path().join("data")).unwrap();
    let mut files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
    files.any(|file| file.unwrap().file_name().to_string_lossy().ends_with(".draft"))
}
