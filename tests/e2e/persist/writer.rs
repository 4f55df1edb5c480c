//! Content for files of an fs-mode mount, written as a client does: to workers, then committed at the master.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_net::WorkerPool;
use cavern_proto::data::{BlockRef, WriteRequest};
use cavern_proto::frame::MAX_WRITE_BYTES;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    CommitContent, CreateInode, Extent, GetLayoutRequest, Kind, ListWorkersRequest, MutateRequest, Mutation,
    ResolveRequest, SetAttr, WatchRequest, WorkerTable,
};
use cavern_security::Transport;
use cavern_tests::Cluster;
use futures::{StreamExt, stream};
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use crate::bucket::{Bucket, Objects};

const PATIENCE: Duration = Duration::from_secs(30);

/// A session of its own, and connections to the workers.
pub struct Writer {
    runtime: Runtime,
    namespace: NamespaceClient<Channel>,
    pool: Arc<WorkerPool>,
    cluster_id: String,
    workers: WorkerTable,
    session: u64,
    seq: u64,
    bucket: Bucket,
}

impl Writer {
    #[track_caller]
    pub fn new(cluster: &Cluster) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let address = format!("http://{}", cluster.at_start.masters[0].grpc);
        let opened = runtime.block_on(async {
            let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
            let mut calls = ClusterClient::new(channel.clone());
            let (watch_sender, watch_requests) = futures::channel::mpsc::unbounded();
            watch_sender.unbounded_send(WatchRequest { client: "test".into(), ..WatchRequest::default() }).unwrap();
            let mut events = calls.watch(watch_requests).await.unwrap().into_inner();
            let first = events.message().await.unwrap().unwrap();
            let Some(Event::Reset(reset)) = first.event else { panic!("{first:?}") };
            tokio::spawn(async move {
                while let Some(Ok(event)) = events.next().await {
                    let _ = watch_sender
                        .unbounded_send(WatchRequest { acknowledged_seq: event.seq, ..WatchRequest::default() });
                }
            });
            let workers = calls.list_workers(ListWorkersRequest {}).await.unwrap().into_inner();
            let pool = WorkerPool::new(&cavern_conf::Config::default().client, Transport::Plain, "test");
            pool.set_table(&reset.cluster_id, &workers);
            (NamespaceClient::new(channel), pool, workers, reset)
        });
        let (namespace, pool, workers, reset) = opened;
        let bucket = Bucket::of(cluster, "bucket");
        let (cluster_id, session) = (reset.cluster_id, reset.session);
        Self { runtime, namespace, pool, cluster_id, workers, session, seq: 0, bucket }
    }

    #[track_caller]
    fn change(&mut self, change: Change) -> u64 {
        self.seq += 1;
        let mutation = Mutation { seq: self.seq, uid: 1000, gid: 100, change: Some(change), ..Mutation::default() };
        let request =
            MutateRequest { session: self.session, mutations: vec![mutation], answered: self.seq.saturating_sub(1) };
        let reply = self.runtime.block_on(async {
            let mut replies = self.namespace.mutate(stream::iter([request])).await.unwrap().into_inner();
            replies.next().await.unwrap().unwrap()
        });
        assert_eq!(reply.results[0].errno, 0, "{}", reply.results[0].reason);
        reply.results[0].inode
    }

    #[track_caller]
    pub fn inode(&mut self, path: &str) -> u64 {
        let request = ResolveRequest { path: path.to_owned(), session: 0 };
        self.runtime.block_on(self.namespace.resolve(request)).unwrap().into_inner().attr.unwrap().inode
    }

    /// Makes a file with this content.
    #[track_caller]
    pub fn create(&mut self, directory: &str, name: &str, content: &[u8]) {
        let parent = self.inode(directory);
        let name = Bytes::copy_from_slice(name.as_bytes());
        let create = CreateInode { parent, name, kind: Kind::File as i32, mode: 0o640, ..CreateInode::default() };
        let inode = self.change(Change::Create(create));
        self.fill(inode, content);
    }

    /// Replaces the content of a file.
    #[track_caller]
    pub fn replace(&mut self, path: &str, content: &[u8]) {
        let inode = self.inode(path);
        self.change(Change::SetAttr(SetAttr { inode, size: Some(0), ..SetAttr::default() }));
        self.fill(inode, content);
    }

    #[track_caller]
    fn fill(&mut self, inode: u64, content: &[u8]) {
        let request = GetLayoutRequest { inode, ..Default::default() };
        let layout = self.runtime.block_on(self.namespace.get_layout(request)).unwrap().into_inner();
        let generation = layout.attr.unwrap().generation;
        let mut made = Vec::new();
        for (index, bytes) in (0..).zip(content.chunks(layout.block_size as usize)) {
            let worker = self.workers.workers[index as usize % self.workers.workers.len()].id;
            let block = BlockRef::of_inode(&self.cluster_id, inode, generation, index, layout.block_size, 1);
            for (number, piece) in (0..).zip(bytes.chunks(MAX_WRITE_BYTES as usize)) {
                let offset = number * MAX_WRITE_BYTES;
                let request =
                    WriteRequest { block: Some(block.clone()), offset, sync: true, ..WriteRequest::default() };
                let written = self.pool.write(worker, request, Bytes::copy_from_slice(piece), PATIENCE);
                self.runtime.block_on(written).unwrap();
            }
            made.push(Extent { index, generation, workers: vec![worker], ..Extent::default() });
        }
        let grow_to = content.len() as u64;
        self.change(Change::Commit(CommitContent { inode, grow_to, made, changed: true }));
    }

    /// Every object of the bucket.
    #[track_caller]
    pub fn bucket(&self) -> Objects {
        self.bucket.objects()
    }
}
