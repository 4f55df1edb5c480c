//! What others change in the bucket comes in with a refresh, and never in the place of what was changed here.

use std::sync::atomic::Ordering;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::{CreateInode, Kind, RefreshFate, RefreshProgress, RefreshRequest, RenameMode};
use futures::StreamExt;

use super::bench::Fixture;
use super::existing::content;
use crate::tests::harness::name;

impl Fixture {
    /// The last message of a refresh, with the names of all.
    async fn refresh(&self, path: &str, dry_run: bool) -> RefreshProgress {
        let request = RefreshRequest { path: path.to_owned(), recursive: true, dry_run };
        let refresh = self.master().services().refresh(tonic::Request::new(request)).await.unwrap();
        let (mut messages, mut last, mut items) = (refresh.into_inner(), RefreshProgress::default(), Vec::new());
        while let Some(message) = messages.next().await {
            last = message.unwrap();
            items.append(&mut last.items);
        }
        assert!(last.done);
        items.sort_by(|one, other| one.path.cmp(&other.path));
        RefreshProgress { items, ..last }
    }
}

fn fates(progress: &RefreshProgress) -> Vec<(&str, RefreshFate)> {
    progress.items.iter().map(|item| (item.path.as_str(), item.fate())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_changed_here_and_not_written_yet_wins_and_is_told() {
    let objects = [("top/d/both", content("a")), ("top/d/moved", content("b")), ("top/d/gone", content("c"))];
    let mut bench = Fixture::with(&objects).await;
    bench.start_index();
    bench.indexed().await;
    let directory = bench.find("d").await.unwrap();
    bench.fake.is_away.store(1, Ordering::Release);
    let chmod = |inode| {
        let set = cavern_proto::master::SetAttr { inode, mode: Some(0o600), ..Default::default() };
        Change::SetAttr(set)
    };
    for file in ["d/both", "d/gone"] {
        let inode = bench.find(file).await.unwrap();
        bench.change(chmod(inode)).await;
    }
    bench.rename((directory, "moved"), (directory, "here"), RenameMode::Replace).await;
    let create = CreateInode { parent: directory, name: name("mine"), kind: Kind::File as i32, ..Default::default() };
    bench.change(Change::Create(create)).await;
    bench.bucket.put("top/d/both", content("other"));
    bench.bucket.put("top/d/mine", content("other"));
    bench.bucket.delete("top/d/gone");
    let progress = bench.refresh("/m", false).await;
    let conflicts = ["/m/d/both", "/m/d/gone", "/m/d/mine"].map(|path| (path, RefreshFate::Conflict));
    assert_eq!(fates(&progress), conflicts);
    // What was renamed here is still in the bucket, and does not come back.
    assert_eq!((progress.added, progress.removed, progress.pending), (0, 0, 1), "{progress:?}");
    assert!(bench.find("d/moved").await.is_none() && bench.find("d/gone").await.is_some());
    let one = bench.refresh("/m/d/both", true).await;
    assert_eq!(fates(&one), [("/m/d/both", RefreshFate::Conflict)]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_one_file_are_told_apart_by_those_who_change_one_of_their_objects() {
    let mut bench = Fixture::new().await;
    let root = bench.root;
    let file = bench.create(root, "one", Kind::File).await;
    bench.commit(file, 0, 0, vec![1]).await;
    let link = |text| cavern_proto::master::LinkInode { inode: file, parent: root, name: name(text) };
    bench.change(Change::Link(link("two"))).await;
    bench.change(Change::Link(link("three"))).await;
    bench.settled().await;
    assert_eq!(bench.free(file).await, cavern_proto::master::FreeFate::Freed);
    let before = bench.read(file).await;
    bench.bucket.put("top/one", content("other"));
    bench.bucket.delete("top/two");
    let progress = bench.refresh("/m", false).await;
    assert_eq!((progress.added, progress.changed, progress.removed), (0, 1, 1), "{progress:?}");
    let other = bench.find("one").await.unwrap();
    assert_ne!(other, file);
    assert_eq!(bench.read(other).await.unwrap(), ["other"]);
    assert_eq!((bench.find("two").await, bench.find("three").await), (None, Some(file)));
    assert_eq!(bench.read(file).await, before, "what the origin had is in the object that is left");
    let attr = bench.lookups().get_inode(file).await.unwrap().attr.unwrap();
    assert_eq!(attr.nlink, 1);
    bench.settled().await;
    assert_eq!(bench.bucket.keys(), ["top/one", "top/three"]);
    bench.end().await;
}
