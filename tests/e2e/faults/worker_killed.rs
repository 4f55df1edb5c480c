//! kill -9 of a worker in the middle of a full read: readers notice nothing, and started again it has its blocks.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, eventually};

use crate::readers::{Readers, Tree, shown_at};

const FILES: usize = 2000;
const READERS: u64 = 8;

#[test]
fn readers_do_not_notice_that_the_only_worker_dies() {
    survive(1);
}

#[test]
fn readers_do_not_notice_that_one_of_two_workers_dies() {
    survive(2);
}

/// As readers are without further configuration.
#[test]
fn readers_that_hedge_do_not_notice_that_one_of_two_workers_dies() {
    let (cluster, tree) = seeded(2, "");
    die_while_it_is_read(&cluster, &tree);
    cluster.start("worker0");
    wait_for_workers(&cluster, 2);
    Readers::start(READERS, &tree).finish();
}

fn seeded(workers: usize, conf: &str) -> (Cluster, Arc<Tree>) {
    let cluster = Cluster::up(Options { workers, conf: conf.to_owned(), ..Options::default() });
    let seeded = cluster.seed("bucket", "images/", FILES, 50_000);
    cluster.mount("s3://bucket/images", "/data", &[]);
    let tree = shown_at(&cluster.path("data"), "images/", &seeded);
    (cluster, tree)
}

/// Kills a worker in the middle of a full read. Gives how many files had been read by then.
fn die_while_it_is_read(cluster: &Cluster, tree: &Arc<Tree>) -> usize {
    let readers = Readers::start(READERS, tree);
    readers.wait_for(FILES / 4);
    let seen = readers.seen();
    cluster.kill("worker0");
    assert!(readers.seen() < FILES, "everything was read before the worker died: the test shows nothing");
    readers.finish();
    seen
}

fn survive(workers: usize) {
    let (cluster, tree) = seeded(workers, COUNTED);
    let seen = die_while_it_is_read(&cluster, &tree);

    // Its blocks are there again, but for those that were being completed when it died.
    cluster.start("worker0");
    wait_for_workers(&cluster, workers);
    let blocks = blocks_of(&cluster, "worker0");
    if workers == 1 {
        assert!(blocks + READERS as usize >= seen, "{seen} files were read, {blocks} blocks are there");
    }
    // And they are served: a new FUSE client, with nothing in any cache, has only the others fetched.
    restart_fuse(&cluster);
    cluster.s3.reset_stats();
    Readers::start(READERS, &tree).finish();
    let fetched = cluster.s3.requests("GET") as usize;
    eprintln!(
        "{workers} workers: {seen} files read at the kill, {blocks} blocks after it, {fetched} files fetched again"
    );
    if workers == 1 {
        assert_eq!(fetched, FILES - blocks, "{}", cluster.logs());
    }
    assert!(fetched <= FILES - blocks, "{fetched} files were fetched, though {blocks} blocks of {FILES} were there");

    // With all blocks in place, another kill costs nothing at all.
    eventually("every file is in a block", Duration::from_secs(60), || {
        restart_fuse(&cluster);
        cluster.s3.reset_stats();
        Readers::start(READERS, &tree).finish();
        (cluster.s3.requests("GET") == 0).then_some(())
    });
    cluster.kill("worker0");
    cluster.start("worker0");
    wait_for_workers(&cluster, workers);
    restart_fuse(&cluster);
    cluster.s3.reset_stats();
    Readers::start(READERS, &tree).finish();
    let fetched = cluster.s3.requests("GET");
    // With a second worker, the first readers may come before their client knows both.
    let allowed = if workers == 1 { 0 } else { FILES as u64 / 100 };
    assert!(fetched <= allowed, "{fetched} files were fetched again: {}", cluster.logs());
}

/// What the worker found in its directories when it started last.
fn blocks_of(cluster: &Cluster, worker: &str) -> usize {
    let log = fs::read_to_string(cluster.directory().join(format!("log/{worker}.log"))).unwrap();
    let opened = log.lines().rev().find(|line| line.contains("opened a data directory")).expect("it has started");
    let blocks = opened.split_once(" blocks=").and_then(|(_, rest)| rest.split(' ').next()).expect("it says how many");
    blocks.parse().unwrap()
}

fn wait_for_workers(cluster: &Cluster, workers: usize) {
    eventually("every worker is live", Duration::from_secs(10), || {
        let nodes = cluster.cv(&["node", "list", "--json"]).json();
        let live = nodes.as_array().unwrap().iter().filter(|node| node["state"] == "live").count();
        (live == workers).then_some(())
    });
}

fn restart_fuse(cluster: &Cluster) {
    cluster.stop("fuse");
    cluster.start("fuse");
}
