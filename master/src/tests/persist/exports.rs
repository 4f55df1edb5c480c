//! Exports: jobs that bring to the bucket what persistence would bring in an hour.

use std::sync::atomic::Ordering;

use cavern_proto::master::{Job, JobKind, JobState, Kind, RenameMode};
use cavern_work::mounts::changes::DetachPolicy;
use cavern_work::{Request, WorkError};
use futures::future::join_all;

use super::bench::{BLOCK, Fixture};
use crate::tests::harness::{eventually, mount_request, new_bucket};

impl Fixture {
    async fn job(&self, id: u64) -> Job {
        self.master().services().jobs.get(id).await.unwrap()
    }

    async fn export(&self, path: &str) -> Job {
        self.master().services().jobs.submit_once(&Request::default(), JobKind::Export, path, 0).await.unwrap()
    }

    pub async fn ended(&self, id: u64) -> Job {
        eventually(|| async { self.job(id).await.state() != JobState::Running }).await;
        self.job(id).await
    }

    /// A directory with files of one block.
    async fn directory(&mut self, name: &str, files: u32) -> u64 {
        let directory = self.create(self.root, name, Kind::Directory).await;
        for number in 0..files {
            let file = self.create(directory, &format!("f{number:02}"), Kind::File).await;
            self.commit(file, 0, 0, vec![1]).await;
        }
        directory
    }

    fn keys_below(&self, prefix: &str) -> usize {
        self.bucket.keys().iter().filter(|key| key.starts_with(prefix)).count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_brings_what_was_there_and_waits_for_nothing_else() {
    let mut bench = Fixture::idle().await;
    let root = bench.root;
    let one = bench.directory("one", 20).await;
    bench.directory("other", 5).await;
    let begun = bench.export("/m/one").await;
    assert_eq!((begun.kind(), begun.state(), begun.walked), (JobKind::Export, JobState::Running, true));
    assert_eq!((begun.files_total, begun.bytes_total, begun.files_done), (21, 20 * BLOCK, 0));
    let done = bench.ended(begun.id).await;
    assert_eq!((done.state(), done.errors, done.last_error.as_str()), (JobState::Done, 0, ""));
    assert_eq!((done.files_done, done.bytes_done), (21, 20 * BLOCK));
    assert_eq!((bench.keys_below("top/one/"), bench.bucket.keys().len()), (21, 21));

    // Of a renamed directory all that lies in it is a part; what was removed goes.
    bench.remove(one, "f00", false).await;
    bench.rename((root, "one"), (root, "two"), RenameMode::Replace).await;
    let (begun, other) = (bench.export("/m/two").await, bench.export("/m/other/f03").await);
    let (done, other) = (bench.ended(begun.id).await, bench.ended(other.id).await);
    assert_eq!((done.state(), other.state()), (JobState::Done, JobState::Done));
    assert_eq!((done.files_total, other.files_total), (done.files_done, 1));
    assert_eq!((bench.keys_below("top/two/"), bench.keys_below("top/other/")), (20, 1));
    let all = bench.export("/").await;
    assert_eq!(bench.ended(all.id).await.state(), JobState::Done);
    bench.check().await;
    assert_eq!(bench.keys_below("top/one/"), 0);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_jobs_run_than_may_however_many_are_asked_for_at_once() {
    let mut bench = Fixture::idle().await;
    bench.directory("d", 1).await;
    let gate = bench.fake.writes.clone();
    let held = gate.write().await;
    let (jobs, request) = (&bench.master().services().jobs, Request::default());
    let submit = || jobs.submit_once(&request, JobKind::Export, "/m/d", 0);
    let (begun, refused): (Vec<_>, Vec<_>) =
        join_all((0..40).map(|_| submit())).await.into_iter().partition(Result::is_ok);
    assert_eq!((begun.len(), refused.len()), (16, 24));
    assert!(refused.iter().all(|refused| matches!(refused, Err(WorkError::Overloaded(_)))), "{refused:?}");
    drop(held);
    for job in begun {
        assert_eq!(bench.ended(job.unwrap().id).await.state(), JobState::Done);
    }
    eventually(|| async { submit().await.is_ok() }).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_changed_after_the_beginning_is_not_waited_for() {
    let mut bench = Fixture::idle().await;
    let directory = bench.directory("d", 3).await;
    bench.fake.is_away.store(1, Ordering::Release);
    let begun = bench.export("/m/d").await;
    eventually(|| async { !bench.job(begun.id).await.last_error.is_empty() }).await;
    let late = bench.create(directory, "late", Kind::File).await;
    bench.commit(late, 0, 0, vec![1]).await;
    bench.fake.is_away.store(0, Ordering::Release);
    let done = bench.ended(begun.id).await;
    assert_eq!((done.state(), done.files_done, done.files_total), (JobState::Done, 4, 4));
    assert!(bench.bucket.object("top/d/late").is_none() && bench.status("/m").await.files == 1);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_is_refused_fails_with_the_reason_and_can_be_tried_again() {
    let mut bench = Fixture::idle().await;
    bench.directory("d", 3).await;
    bench.fake.is_denied.store(1, Ordering::Release);
    let begun = bench.export("/m/d").await;
    let jobs = bench.master().services().jobs.clone();
    let early = jobs.retry_once(&Request::default(), begun.id).await.unwrap_err().to_string();
    assert!(early.contains("still runs"), "{early}");
    let failed = bench.ended(begun.id).await;
    assert_eq!((failed.state(), failed.errors, failed.files_done), (JobState::Failed, 4, 0));
    assert_eq!(failed.last_error, "on purpose");
    bench.fake.is_denied.store(0, Ordering::Release);
    let again = jobs.retry_once(&Request::default(), begun.id).await.unwrap();
    assert_eq!((again.kind(), again.path.as_str(), again.retry_of), (JobKind::Export, "/m/d", begun.id));
    assert_eq!(bench.ended(again.id).await.state(), JobState::Done);
    assert_eq!(bench.job(begun.id).await, failed, "what has ended stays as it is");
    assert!(jobs.retry_once(&Request::default(), again.id).await.unwrap_err().to_string().contains("is done"));
    assert!(jobs.retry_once(&Request::default(), 99).await.unwrap_err().is_not_found());
    drop(jobs);

    // A name that cannot be a key keeps only itself back.
    let odd = cavern_proto::master::CreateInode {
        parent: bench.root,
        name: bytes::Bytes::from_static(b"\xff"),
        kind: Kind::File as i32,
        ..Default::default()
    };
    bench.change(cavern_proto::master::mutation::Change::Create(odd)).await;
    bench.directory("e", 2).await;
    let begun = bench.export("/m").await;
    let failed = bench.ended(begun.id).await;
    assert_eq!((failed.state(), failed.errors, failed.files_done), (JobState::Failed, 1, 3));
    assert!(failed.last_error.contains("not UTF-8"), "{}", failed.last_error);
    assert_eq!(bench.keys_below("top/e/"), 3);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_export_gives_up_its_hurry_and_stays_cancelled() {
    let mut bench = Fixture::idle().await;
    bench.directory("d", 3).await;
    bench.directory("other", 3).await;
    bench.fake.is_away.store(1, Ordering::Release);
    let begun = bench.export("/m/d").await;
    eventually(|| async { !bench.job(begun.id).await.last_error.is_empty() }).await;
    let cancelled = bench.master().services().jobs.cancel(begun.id).await.unwrap();
    assert_eq!(cancelled.state(), JobState::Cancelled);
    bench.fake.is_away.store(0, Ordering::Release);
    let other = bench.export("/m/other").await;
    assert_eq!(bench.ended(other.id).await.state(), JobState::Done);
    assert_eq!((bench.keys_below("top/d/"), bench.keys_below("top/other/")), (0, 4));
    bench.restart().await;
    assert_eq!(bench.job(begun.id).await, cancelled);
    assert_eq!(bench.master().services().jobs.list().await.unwrap().len(), 2);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_goes_on_after_a_restart_and_counts_nothing_twice() {
    let mut bench = Fixture::idle().await;
    bench.directory("d", 10).await;
    bench.fake.is_away.store(1, Ordering::Release);
    let begun = bench.export("/m/d").await;
    eventually(|| async { !bench.job(begun.id).await.last_error.is_empty() }).await;
    bench.restart().await;
    let resumed = bench.job(begun.id).await;
    assert_eq!((resumed.state(), resumed.files_total, resumed.files_done), (JobState::Running, 11, 0));
    bench.fake.is_away.store(0, Ordering::Release);
    let done = bench.ended(begun.id).await;
    assert_eq!((done.state(), done.files_total, done.files_done), (JobState::Done, 11, 11));
    assert_eq!((done.bytes_total, done.bytes_done, done.errors), (10 * BLOCK, 10 * BLOCK, 0));
    bench.check().await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_fs_mode_mounts_are_exported() {
    let bench = Fixture::idle().await;
    let (_bucket, uri) = new_bucket();
    let services = bench.master().services().clone();
    services.mount_bucket(mount_request("/cached", &uri), false).await.unwrap();
    let refused =
        services.jobs.submit_once(&Request::default(), JobKind::Export, "/cached", 0).await.unwrap_err().to_string();
    assert!(refused.contains("/cached is in a cache-mode mount"), "{refused}");
    assert!(
        services.jobs.submit_once(&Request::default(), JobKind::Export, "/m/none", 0).await.unwrap_err().is_not_found()
    );
    // A mount that goes meanwhile takes its changes with it.
    drop(services);
    let mut bench = bench;
    bench.directory("d", 3).await;
    bench.fake.is_away.store(1, Ordering::Release);
    let begun = bench.export("/m").await;
    eventually(|| async { !bench.job(begun.id).await.last_error.is_empty() }).await;
    let services = bench.master().services().clone();
    services.unmount_bucket("/m", DetachPolicy::Discard).await.unwrap();
    let failed = bench.ended(begun.id).await;
    assert_eq!(failed.state(), JobState::Failed);
    assert!(failed.last_error.contains("the mount is gone"), "{}", failed.last_error);
    let refused =
        services.jobs.submit_once(&Request::default(), JobKind::Export, "/", 0).await.unwrap_err().to_string();
    assert!(refused.contains("no fs-mode mount is below /"), "{refused}");
    drop(services);
    bench.end().await;
}
