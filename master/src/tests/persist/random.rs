//! Random changes, troubles and restarts.

use std::sync::atomic::Ordering;
use std::time::Duration;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, LinkInode, RenameMode, SetAttr};
use proptest::prelude::*;

use super::bench::{BLOCK, Fixture};
use crate::tests::harness::name;

#[derive(Clone, Debug)]
enum Op {
    Create(u8, u8, u8),
    Commit(u8, u8),
    Cut(u8, u8),
    Chmod(u8, u16),
    Link(u8, u8, u8),
    Rename(u8, u8, u8, u8, bool),
    Remove(u8, u8),
    Free(u8),
    Hold(u8),
    LetGo(u8),
    Pause(u8),
    Restart,
    Trouble(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let (place, text) = (any::<u8>(), 0..4u8);
    prop_oneof![
        6 => (place, text.clone(), 0..6u8).prop_map(|(at, text, kind)| Op::Create(at, text, kind)),
        4 => (place, 0..3u8).prop_map(|(file, index)| Op::Commit(file, index)),
        1 => (place, 0..3u8).prop_map(|(file, blocks)| Op::Cut(file, blocks)),
        1 => (place, 0..0o777u16).prop_map(|(inode, mode)| Op::Chmod(inode, mode)),
        1 => (place, place, text.clone()).prop_map(|(file, at, text)| Op::Link(file, at, text)),
        5 => (place, text.clone(), place, text.clone(), any::<bool>())
            .prop_map(|(from, old, to, new, swap)| Op::Rename(from, old, to, new, swap)),
        4 => (place, text).prop_map(|(at, text)| Op::Remove(at, text)),
        4 => place.prop_map(Op::Free),
        1 => place.prop_map(Op::Hold),
        1 => place.prop_map(Op::LetGo),
        5 => (0..25u8).prop_map(Op::Pause),
        1 => Just(Op::Restart),
        1 => (0..60u8).prop_map(Op::Trouble),
    ]
}

async fn run(ops: Vec<Op>) {
    let mut bench = Fixture::new().await;
    let mut directories = vec![bench.root];
    let mut inodes = vec![bench.root];
    let text = |number: u8| format!("n{number}");
    for op in ops {
        let directory = |at: u8| directories[usize::from(at) % directories.len()];
        let inode = |at: u8| inodes[usize::from(at) % inodes.len()];
        match op {
            Op::Create(at, number, kind) => {
                let kind = [Kind::File, Kind::File, Kind::File, Kind::Directory, Kind::Directory, Kind::Symlink]
                    [usize::from(kind)];
                let made = bench.create(directory(at), &text(number), kind).await;
                if made != 0 {
                    inodes.push(made);
                    directories.extend((kind == Kind::Directory).then_some(made));
                }
            }
            Op::Commit(file, index) => {
                let file = inode(file);
                let generation = bench.master().services().lookups.reader.read(move |tables| {
                    let known = tables.extent(file, u32::from(index))?.map(|extent| extent.generation);
                    Ok(known.or(tables.inode(file)?.map(|record| record.generation)))
                });
                let generation = generation.await.unwrap().unwrap_or_default();
                bench.commit(file, u32::from(index), generation, vec![1]).await;
            }
            Op::Cut(file, blocks) => {
                bench.cut(inode(file), u64::from(blocks) * BLOCK).await;
            }
            Op::Chmod(at, mode) if inode(at) != bench.root => {
                let set = SetAttr { inode: inode(at), mode: Some(u32::from(mode)), ..SetAttr::default() };
                bench.change(Change::SetAttr(set)).await;
            }
            Op::Chmod(..) => {}
            Op::Link(file, at, number) => {
                let link = LinkInode { inode: inode(file), parent: directory(at), name: name(&text(number)) };
                bench.change(Change::Link(link)).await;
            }
            Op::Rename(from, old, to, new, swap) => {
                let mode = if swap { RenameMode::Exchange } else { RenameMode::Replace };
                bench.rename((directory(from), &text(old)), (directory(to), &text(new)), mode).await;
            }
            Op::Remove(at, number) => {
                if bench.remove(directory(at), &text(number), false).await == 0 {
                    bench.remove(directory(at), &text(number), true).await;
                }
            }
            Op::Free(at) => {
                bench.free(inode(at)).await;
            }
            Op::Hold(at) if inode(at) != bench.root => {
                bench.change(Change::AddOpenRef(inode(at))).await;
            }
            Op::Hold(_) => {}
            Op::LetGo(at) => {
                bench.change(Change::DropOpenRef(inode(at))).await;
            }
            Op::Pause(ms) => tokio::time::sleep(Duration::from_millis(u64::from(ms))).await,
            Op::Restart => bench.restart().await,
            Op::Trouble(percent) => bench.fake.trouble.store(u32::from(percent), Ordering::Release),
        }
    }
    bench.fake.trouble.store(0, Ordering::Release);
    // What is kept for nobody but those who have it open goes with them.
    for inode in inodes {
        bench.change(Change::DropOpenRef(inode)).await;
    }
    bench.check().await;
    assert_eq!(bench.status("/").await.files, 0);
    bench.end().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 30, ..ProptestConfig::default() })]

    #[test]
    fn the_bucket_becomes_the_namespace(ops in proptest::collection::vec(op(), 1..120)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(run(ops));
    }
}
