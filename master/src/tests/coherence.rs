//! What several clients have cached of one namespace, compared with it after every change.

use std::collections::BTreeMap;
use std::sync::Arc;

use cavern_client::{CachedLookup, Client, NoSink, Node};
use cavern_conf::{Config, Interval};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, LinkInode, RemoveName, RenameMode, RenameName, SetAttr};
use cavern_proto::record::InodeRecord;
use cavern_state::records::attributes;
use futures::future::join_all;
use proptest::prelude::*;

use super::harness::{NoWorkers, TestMaster, eventually, name};
use super::mutations::{create, mount};

const CLIENTS: usize = 3;
const NAMES: u8 = 5;

/// What one client does. Directories and inodes are numbered as they came to be known.
#[derive(Clone, Debug)]
enum Step {
    Create { at: u8, text: u8, is_directory: bool },
    Link { inode: u8, at: u8, text: u8 },
    Remove { at: u8, text: u8 },
    Rename { from: u8, old: u8, to: u8, new: u8, mode: u8 },
    Chmod { inode: u8, mode: u8 },
    Lookup { at: u8, text: u8 },
    Node { inode: u8 },
    List { at: u8 },
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    let (place, text) = (any::<u8>(), 0..NAMES);
    let step = prop_oneof![
        6 => (place, text.clone(), 0..3u8)
            .prop_map(|(at, text, kind)| Step::Create { at, text, is_directory: kind == 0 }),
        1 => (place, place, text.clone()).prop_map(|(inode, at, text)| Step::Link { inode, at, text }),
        3 => (place, text.clone()).prop_map(|(at, text)| Step::Remove { at, text }),
        4 => (place, text.clone(), place, text.clone(), 0..4u8)
            .prop_map(|(from, old, to, new, mode)| Step::Rename { from, old, to, new, mode }),
        2 => (place, any::<u8>()).prop_map(|(inode, mode)| Step::Chmod { inode, mode }),
        5 => (place, text).prop_map(|(at, text)| Step::Lookup { at, text }),
        2 => place.prop_map(|inode| Step::Node { inode }),
        2 => place.prop_map(|at| Step::List { at }),
    ];
    (0..CLIENTS, step)
}

fn text(number: u8) -> String {
    format!("n{number}")
}

/// A namespace and the clients that share it.
struct Shared {
    master: TestMaster,
    clients: Vec<Arc<Client>>,
    /// Every directory and every inode that there ever was.
    directories: Vec<u64>,
    inodes: Vec<u64>,
}

/// What the master has: the names of every directory, and every inode.
struct Truth {
    names: BTreeMap<(u64, Vec<u8>), u64>,
    inodes: BTreeMap<u64, InodeRecord>,
}

impl Shared {
    async fn new() -> Self {
        let mut config = Config::default();
        // Nothing that is cached is out of date by its age.
        config.master.session_lease = Interval::millis(600_000);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let master = TestMaster::with(config.clone(), dir, Arc::new(NoWorkers)).await.unwrap();
        let root = mount(&master).await.root_inode;
        config.cluster.masters = vec![master.master.address.clone()];
        let connect = async |number: usize| {
            Client::connect(&config, format!("client {number}").as_str(), Arc::new(NoSink)).await.unwrap()
        };
        let clients = join_all((0..CLIENTS).map(connect)).await;
        Self { master, clients, directories: vec![root], inodes: vec![root] }
    }

    async fn make(&mut self, who: usize, step: &Step) {
        let metadata = self.clients[who].metadata().clone();
        let directory = |at: u8| self.directories[usize::from(at) % self.directories.len()];
        let inode = |at: u8| self.inodes[usize::from(at) % self.inodes.len()];
        let change = match *step {
            Step::Create { at, text: number, is_directory } => {
                let kind = if is_directory { Kind::Directory } else { Kind::File };
                create(directory(at), &text(number), kind)
            }
            Step::Link { inode: at, at: to, text: number } => {
                Change::Link(LinkInode { inode: inode(at), parent: directory(to), name: name(&text(number)) })
            }
            Step::Remove { at, text: number } => {
                let (parent, name) = (directory(at), name(&text(number)));
                let is_directory = metadata.lookup(parent, &name).await.is_ok_and(|node| node.is_directory());
                Change::Remove(RemoveName { parent, name, directory: is_directory })
            }
            Step::Rename { from, old, to, new, mode } => {
                let mode = [RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange]
                    [usize::from(mode)];
                Change::Rename(RenameName {
                    parent: directory(from),
                    name: name(&text(old)),
                    new_parent: directory(to),
                    new_name: name(&text(new)),
                    mode: mode as i32,
                })
            }
            Step::Chmod { inode: at, mode } => {
                Change::SetAttr(SetAttr { inode: inode(at), mode: Some(mode.into()), ..SetAttr::default() })
            }
            // What is asked for may be there or not.
            Step::Lookup { at, text: number } => {
                return drop(metadata.lookup(directory(at), text(number).as_bytes()).await);
            }
            Step::Node { inode: at } => return drop(metadata.node(inode(at)).await),
            Step::List { at } => return drop(metadata.read_dir(directory(at), b"", 100).await),
        };
        // It may be refused; that changes nothing.
        if let (Ok(made), Step::Create { is_directory, .. }) = (metadata.change(change, 0, 0).await, step) {
            self.inodes.push(made.result.inode);
            self.directories.extend(is_directory.then_some(made.result.inode));
        }
    }

    async fn truth(&self) -> Truth {
        let (directories, inodes) = (self.directories.clone(), self.inodes.clone());
        let read = self.master.services().lookups.reader.read(move |tables| {
            let (mut names, mut records) = (BTreeMap::new(), BTreeMap::new());
            for directory in directories {
                for number in 0..NAMES {
                    let text = text(number).into_bytes();
                    names.extend(tables.dentry(directory, &text)?.map(|dentry| ((directory, text), dentry.inode)));
                }
            }
            for inode in inodes {
                records.extend(tables.inode(inode)?.map(|record| (inode, record)));
            }
            Ok(Truth { names, inodes: records })
        });
        read.await.unwrap()
    }

    /// What a client has cached and is not so.
    fn outdated(&self, client: &Client, truth: &Truth) -> Vec<String> {
        let (metadata, mut wrong) = (client.metadata(), Vec::new());
        let is_so = |node: &Node| {
            let Some(record) = truth.inodes.get(&node.inode) else { return false };
            let attr = attributes(node.inode, record);
            (attr.mode, attr.nlink, attr.ctime_ns, attr.mtime_ns, attr.size)
                == (node.mode, node.nlink, node.ctime_ns, node.mtime_ns, node.size)
        };
        for directory in &self.directories {
            for number in 0..NAMES {
                let text = text(number);
                let there = truth.names.get(&(*directory, text.clone().into_bytes())).copied();
                match metadata.cached_lookup(*directory, text.as_bytes()) {
                    CachedLookup::Hit(node) if Some(node.inode) != there || !is_so(&node) => {
                        wrong.push(format!("{text} of {directory} is {there:?} and cached as {node:?}"));
                    }
                    CachedLookup::Negative if there.is_some() => {
                        wrong.push(format!("{text} of {directory} is {there:?} and cached as absent"));
                    }
                    _ => {}
                }
            }
            if let Some(page) = metadata.cached_dir_page(*directory, b"", 100) {
                let listed = page.entries.iter().map(|node| (node.name.to_vec(), node.inode)).collect::<Vec<_>>();
                let in_it = truth.names.iter().filter(|((parent, _), _)| parent == directory);
                let there = in_it.map(|((_, name), inode)| (name.clone(), *inode)).collect::<Vec<_>>();
                if listed != there || !page.entries.iter().all(|node| is_so(node)) {
                    wrong.push(format!("{directory} has {there:?} and is cached with {listed:?}"));
                }
            }
        }
        let cached = self.inodes.iter().filter_map(|inode| metadata.cached_node(*inode));
        wrong.extend(cached.filter(|node| !is_so(node)).map(|node| format!("{node:?} is cached and is not so")));
        wrong
    }
}

async fn run(steps: Vec<(usize, Step)>) {
    let mut shared = Box::pin(Shared::new()).await;
    for (number, (who, step)) in steps.iter().enumerate() {
        shared.make(*who, step).await;
        let truth = shared.truth().await;
        for (client, at) in shared.clients.iter().zip(0..) {
            let mut wrong = Vec::new();
            let settled = eventually(|| {
                wrong = shared.outdated(client, &truth);
                std::future::ready(wrong.is_empty())
            });
            if tokio::time::timeout(std::time::Duration::from_secs(20), settled).await.is_err() {
                panic!("after step {number}, {step:?} by {who}, client {at} believes: {wrong:#?}");
            }
        }
    }
    for client in &shared.clients {
        client.shutdown().await;
    }
    shared.master.stop().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, max_shrink_iters: 0, ..ProptestConfig::default() })]

    /// Whoever has cached something is notified when it changes.
    #[test]
    fn nobody_keeps_what_is_no_longer_so(steps in prop::collection::vec(step(), 200)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(run(steps));
    }
}
