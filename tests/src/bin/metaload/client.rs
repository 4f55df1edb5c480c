//! Clients of a master: a session and a stream of changes each, and a directory that nobody else has.

use std::time::Duration;

use bytes::Bytes;
use cavern_net::master::connected;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_client::NamespaceClient;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{
    CreateInode, GetInodeRequest, GetLayoutRequest, Kind, LookupRequest, MutateReply, MutateRequest, Mutation,
    ReadDirRequest, RemoveName, RenameName, ResolveRequest, WatchEvent, WatchRequest,
};
use cavern_security::Transport;
use futures::StreamExt;
use futures::future::try_join_all;
use futures::stream::iter;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::rates::measure;
use crate::{Failure, LISTED};

/// Connections at most: a host has one for all of its programs.
const CONNECTIONS: usize = 16;
/// Clients that begin at a time.
const BEGIN: usize = 50;

/// Connections to one address, for so many clients.
pub async fn channels(address: &str, transport: &Transport, clients: usize) -> Result<Vec<Channel>, Failure> {
    let connect = (0..clients.clamp(1, CONNECTIONS)).map(|_| async {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
        // So that no stream waits for others to be read.
        let endpoint = endpoint.initial_stream_window_size(1 << 20).initial_connection_window_size(16 << 20);
        Ok::<_, Failure>(connected(&endpoint, transport).await?)
    });
    try_join_all(connect).await
}

/// A session that acknowledges what it is sent, until it is dropped.
struct Session {
    id: u64,
    stream: JoinHandle<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stream.abort();
    }
}

impl Session {
    async fn open(channel: &Channel, name: String) -> Result<Self, Failure> {
        let (acknowledge, requests) = mpsc::channel(16);
        acknowledge.send(WatchRequest { client: name, ..WatchRequest::default() }).await?;
        let mut cluster = ClusterClient::new(channel.clone());
        let mut events = cluster.watch(ReceiverStream::new(requests)).await?.into_inner();
        let Some(WatchEvent { event: Some(Event::Reset(reset)), .. }) = events.message().await? else {
            return Err("a session does not begin with a reset".into());
        };
        let stream = tokio::spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                let acknowledged = WatchRequest { acknowledged_seq: event.seq, ..WatchRequest::default() };
                if acknowledge.send(acknowledged).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { id: reset.session, stream })
    }
}

/// Clients that have looked at the directory above the one that is loaded, and are to hear of nothing.
pub async fn watch(
    address: &str,
    transport: &Transport,
    directory: &str,
    watchers: usize,
) -> Result<impl Sized + use<>, Failure> {
    let channels = channels(address, transport, watchers).await?;
    let above = directory.rsplit_once('/').map_or("", |(above, _)| above);
    let open = iter(0..watchers).map(|number| {
        let channel = channels[number % channels.len()].clone();
        let path = if above.is_empty() { "/" } else { above }.to_owned();
        async move {
            let session = Session::open(&channel, format!("watcher {number}")).await?;
            let mut namespace = NamespaceClient::new(channel);
            let inode = inode_of(&mut namespace, path, session.id).await?;
            let request = ReadDirRequest { inode, session: session.id, ..ReadDirRequest::default() };
            let mut pages = namespace.read_dir(request).await?.into_inner();
            while pages.message().await?.is_some() {}
            Ok::<_, Failure>(session)
        }
    });
    open.buffer_unordered(BEGIN).collect::<Vec<_>>().await.into_iter().collect::<Result<Vec<_>, _>>()
}

async fn inode_of(namespace: &mut NamespaceClient<Channel>, path: String, session: u64) -> Result<u64, Failure> {
    let entry = namespace.resolve(ResolveRequest { path, session }).await?.into_inner();
    Ok(entry.attr.unwrap_or_default().inode)
}

struct Client {
    namespace: NamespaceClient<Channel>,
    session: Session,
    changes: mpsc::Sender<MutateRequest>,
    results: Streaming<MutateReply>,
    seq: u64,
    directory: u64,
    /// Files that were made; some operations go through them once, others again and again.
    files: Vec<u64>,
    next: usize,
}

impl Client {
    async fn begin(channel: Channel, above: u64, number: usize) -> Result<Self, Failure> {
        let session = Session::open(&channel, format!("load {number}")).await?;
        let mut namespace = NamespaceClient::new(channel);
        let (changes, calls) = mpsc::channel(1);
        let results = namespace.mutate(ReceiverStream::new(calls)).await?.into_inner();
        let mut client =
            Self { namespace, session, changes, results, seq: 0, directory: 0, files: Vec::new(), next: 0 };
        client.directory = client.create(above, format!("c{number}-{}", std::process::id()), Kind::Directory).await?;
        Ok(client)
    }

    async fn change(&mut self, change: Change) -> Result<u64, Failure> {
        self.seq += 1;
        let mutation = Mutation { seq: self.seq, uid: 0, gid: 0, change: Some(change), ..Mutation::default() };
        let call = MutateRequest { session: self.session.id, mutations: vec![mutation], answered: self.seq - 1 };
        self.changes.send(call).await?;
        let reply = self.results.message().await?.ok_or("the stream of changes has ended")?;
        match reply.results.first() {
            Some(result) if result.errno == 0 => Ok(result.inode),
            result => Err(format!("a change was refused: {result:?}").into()),
        }
    }

    async fn create(&mut self, parent: u64, name: String, kind: Kind) -> Result<u64, Failure> {
        let create =
            CreateInode { parent, name: name.into(), kind: kind as i32, mode: 0o644, ..CreateInode::default() };
        self.change(Change::Create(create)).await
    }

    /// The number of the next file, round and round.
    fn any(&mut self) -> usize {
        self.next = (self.next + 1) % self.files.len().max(1);
        self.next
    }

    /// The number of the next file, once.
    fn one(&mut self) -> Option<usize> {
        self.next += 1;
        (self.next <= self.files.len()).then(|| self.next - 1)
    }

    async fn list(&mut self, inode: u64) -> Result<usize, Failure> {
        let request = ReadDirRequest { inode, session: self.session.id, ..ReadDirRequest::default() };
        let (mut pages, mut entries) = (self.namespace.read_dir(request).await?.into_inner(), 0);
        while let Some(page) = pages.message().await? {
            entries += page.entries.len();
        }
        Ok(entries)
    }
}

fn old_name(number: usize) -> Bytes {
    format!("f{number}").into()
}

fn new_name(number: usize) -> Bytes {
    format!("g{number}").into()
}

/// The rates of all operations, one kind after the other.
pub async fn run(
    address: &str,
    transport: &Transport,
    directory: &str,
    tasks: usize,
    time: Duration,
) -> Result<Value, Failure> {
    let channels = channels(address, transport, tasks).await?;
    let mut namespace = NamespaceClient::new(channels[0].clone());
    let above = inode_of(&mut namespace, directory.to_owned(), 0).await?;
    let begin = iter(0..tasks).map(|number| Client::begin(channels[number % channels.len()].clone(), above, number));
    let begun = begin.buffer_unordered(BEGIN).collect::<Vec<_>>().await;
    let mut clients = begun.into_iter().collect::<Result<Vec<_>, _>>()?;
    let listed = clients[0].create(above, format!("listed-{}", std::process::id()), Kind::Directory).await?;
    for number in 0..LISTED {
        clients[0].create(listed, format!("f{number}"), Kind::File).await?;
    }
    let restart = |clients: &mut Vec<Client>| clients.iter_mut().for_each(|client| client.next = 0);

    let create = measure(&mut clients, time, async |client: &mut Client| {
        let name = format!("f{}", client.files.len());
        let inode = client.create(client.directory, name, Kind::File).await?;
        client.files.push(inode);
        Ok(true)
    });
    let create = create.await?;
    let lookup = measure(&mut clients, time, async |client: &mut Client| {
        let (name, session) = (old_name(client.any()), client.session.id);
        client.namespace.lookup(LookupRequest { parent: client.directory, name, session }).await?;
        Ok(true)
    });
    let lookup = lookup.await?;
    let stat = measure(&mut clients, time, async |client: &mut Client| {
        let number = client.any();
        let (inode, session) = (client.files[number], client.session.id);
        client.namespace.get_inode(GetInodeRequest { inode, session }).await?;
        Ok(true)
    });
    let stat = stat.await?;
    let open = measure(&mut clients, time, async |client: &mut Client| {
        let number = client.any();
        let (inode, session) = (client.files[number], client.session.id);
        client.namespace.get_layout(GetLayoutRequest { inode, session, ..Default::default() }).await?;
        Ok(true)
    });
    let open = open.await?;
    let readdir = measure(&mut clients, time, async |client: &mut Client| match client.list(listed).await? {
        LISTED => Ok(true),
        entries => Err(format!("{entries} of {LISTED} entries").into()),
    });
    let readdir = readdir.await?;
    restart(&mut clients);
    let rename = measure(&mut clients, time, async |client: &mut Client| {
        let Some(number) = client.one() else { return Ok(false) };
        let (parent, name, new_name) = (client.directory, old_name(number), new_name(number));
        let rename = RenameName { parent, name, new_parent: parent, new_name, mode: 0 };
        client.change(Change::Rename(rename)).await?;
        Ok(true)
    });
    let rename = rename.await?;
    // Those that were not renamed stay.
    for client in &mut clients {
        client.files.truncate(client.next);
    }
    restart(&mut clients);
    let unlink = measure(&mut clients, time, async |client: &mut Client| {
        let Some(number) = client.one() else { return Ok(false) };
        let remove = RemoveName { parent: client.directory, name: new_name(number), directory: false };
        client.change(Change::Remove(remove)).await?;
        Ok(true)
    });
    let unlink = unlink.await?;
    Ok(json!({
        "create": create, "lookup": lookup, "stat": stat, "open": open, "readdir of 1,000": readdir,
        "rename": rename, "unlink": unlink,
    }))
}
