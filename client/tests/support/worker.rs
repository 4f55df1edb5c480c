//! A worker that has its objects in memory, hands out descriptors of temporary files, and misbehaves on request.

use std::collections::HashMap;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::chunk::{PART_BYTES, chunk_range, chunks_touching, is_whole_parts};
use cavern_proto::data::{self, Status};
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES, encode_frame};
use cavern_proto::master::{Worker, WorkerState};
use cavern_proto::{CHUNK_BYTES, ChunkMap};
use parking_lot::Mutex;
use prost::Message;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How a worker answers requests for bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    Well,
    /// Takes requests and never answers.
    Hangs,
    /// Answers after this long.
    Slow(Duration),
    /// Answers with bytes that do not match their checksums.
    Corrupts,
    /// Answers with no frame at all.
    Babbles,
    /// Closes the connection instead of answering.
    Closes,
    /// Answers with this status.
    Refuses(Status),
}

#[derive(Clone)]
pub struct FakeWorker {
    id: u64,
    address: SocketAddr,
    socket_path: String,
    state: Arc<Mutex<State>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

struct State {
    mood: Mood,
    /// Whether reads of parts are answered with parts; a worker of an older version sends whole chunks.
    knows_parts: bool,
    /// What is in a file that is handed out is on its disk alone, as far as the file system lets go of it.
    is_cold: bool,
    /// So many of the next syncs are refused.
    failing_syncs: u32,
    /// Blocks of earlier generations than this are those of views, as it has heard.
    frozen_below: u32,
    objects: HashMap<(String, String), Bytes>,
    /// Blocks of files that were written, or put: by inode, generation and index.
    data: HashMap<DataName, DataBlock>,
    files: HashMap<(Bytes, u32), BlockFile>,
    incarnation: u64,
    unix: Vec<Arc<UnixStream>>,
    counts: HashMap<&'static str, u64>,
    /// Bytes of distinct chunks made present, and of answers.
    filled_bytes: u64,
    sent_bytes: u64,
}

/// Inode, generation and index.
pub type DataName = (u64, u32, u32);

struct DataBlock {
    bytes: Vec<u8>,
    incarnation: u64,
}

struct BlockFile {
    file: std::fs::File,
    incarnation: u64,
    present: ChunkMap,
}

impl FakeWorker {
    /// A worker on TCP only.
    pub async fn remote(id: u64) -> Self {
        Self::start(id, None).await
    }

    /// A worker with a Unix socket in `directory`.
    pub async fn local(id: u64, directory: &std::path::Path) -> Self {
        Self::start(id, Some(directory.join(format!("{id}.sock")))).await
    }

    async fn start(id: u64, socket: Option<std::path::PathBuf>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = Self {
            id,
            address: listener.local_addr().unwrap(),
            socket_path: socket.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
            state: Arc::new(Mutex::new(State {
                mood: Mood::Well,
                knows_parts: true,
                is_cold: false,
                failing_syncs: 0,
                frozen_below: 0,
                objects: HashMap::new(),
                data: HashMap::new(),
                files: HashMap::new(),
                incarnation: 0,
                unix: vec![],
                counts: HashMap::new(),
                filled_bytes: 0,
                sent_bytes: 0,
            })),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        };
        let accepting = worker.clone();
        worker.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let connection = accepting.clone();
                accepting.spawn(async move { connection.serve_tcp(stream).await });
            }
        });
        if let Some(path) = socket {
            let (listener, accepting) = (UnixListener::bind(path).unwrap(), worker.clone());
            worker.spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let connection = accepting.clone();
                    accepting.spawn(async move { connection.serve_unix(stream).await });
                }
            });
        }
        worker
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! { () = work => {}, () = stop.cancelled() => {} }
        });
    }

    /// As kill -9.
    pub async fn kill(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.state.lock().unix.clear();
    }

    pub fn entry(&self) -> Worker {
        Worker {
            id: self.id,
            data_address: self.address.to_string(),
            socket_path: self.socket_path.clone(),
            capacity_bytes: 1 << 30,
            state: WorkerState::Live.into(),
            ..Worker::default()
        }
    }

    pub fn set_mood(&self, mood: Mood) {
        self.state.lock().mood = mood;
    }

    /// From now on as a worker that does not know reads of parts.
    pub fn forget_parts(&self) {
        self.state.lock().knows_parts = false;
    }

    /// From now on no file that is handed out is in the page cache.
    pub fn keep_cold(&self) {
        self.state.lock().is_cold = true;
    }

    /// Refuses so many of the next syncs, as a worker does that has too much to do.
    pub fn fail_syncs(&self, count: u32) {
        self.state.lock().failing_syncs = count;
    }

    /// From now on nobody writes to blocks of earlier generations.
    pub fn freeze(&self, below: u32) {
        self.state.lock().frozen_below = below;
    }

    pub fn put(&self, key: &str, etag: &str, bytes: impl Into<Bytes>) {
        self.state.lock().objects.insert((key.into(), etag.into()), bytes.into());
    }

    /// A block of a file, of this worker alone.
    pub fn put_data(&self, block: DataName, bytes: Vec<u8>) {
        self.state.lock().data_at(block).bytes = bytes;
    }

    /// The blocks of files that there are, with what each has.
    pub fn data(&self) -> HashMap<DataName, Vec<u8>> {
        self.state.lock().data.iter().map(|(name, block)| (*name, block.bytes.clone())).collect()
    }

    pub fn count(&self, call: &str) -> u64 {
        self.state.lock().counts.get(call).copied().unwrap_or(0)
    }

    /// Bytes of chunks made present, each counted once.
    pub fn filled_bytes(&self) -> u64 {
        self.state.lock().filled_bytes
    }

    pub fn sent_bytes(&self) -> u64 {
        self.state.lock().sent_bytes
    }

    /// Evicts every block and notifies the clients.
    pub fn evict_all(&self) {
        let mut state = self.state.lock();
        let blocks = state.files.drain().map(|((content_id, index), file)| data::evicted::Block {
            content_id,
            index,
            incarnation: file.incarnation,
        });
        let frame = encode_frame(FrameKind::Evicted, 0, &data::Evicted { blocks: blocks.collect() }, 0);
        for stream in &state.unix {
            stream.try_write(&frame).unwrap();
        }
    }

    fn hello(&self) -> Vec<u8> {
        let hello = data::Hello {
            protocol: cavern_proto::frame::PROTOCOL_VERSION,
            worker_id: self.id,
            ..data::Hello::default()
        };
        encode_frame(FrameKind::Hello, 0, &hello, 0)
    }

    async fn serve_tcp(&self, stream: TcpStream) {
        let (mut reader, mut writer) = stream.into_split();
        writer.write_all(&self.hello()).await.unwrap();
        let writer = Arc::new(tokio::sync::Mutex::new(writer));
        while let Some((header, message, payload)) = read_frame(&mut reader).await {
            let (worker, writer) = (self.clone(), writer.clone());
            if self.closes(&header) {
                return;
            }
            self.spawn(async move {
                if let Some((frame, payload, _files)) = worker.answer(header, message, payload).await {
                    let mut writer = writer.lock().await;
                    let _client_gone = writer.write_all(&frame).await;
                    let _client_gone = writer.write_all(&payload).await;
                }
            });
        }
    }

    async fn serve_unix(&self, stream: UnixStream) {
        stream.writable().await.unwrap();
        stream.try_write(&self.hello()).unwrap();
        let stream = Arc::new(stream);
        self.state.lock().unix.push(stream.clone());
        let mut reader = UnixReader(stream.clone());
        while let Some((header, message)) = reader.frame().await {
            let (worker, stream) = (self.clone(), stream.clone());
            if self.closes(&header) {
                self.state.lock().unix.clear();
                rustix::net::shutdown(&*stream, rustix::net::Shutdown::Both).unwrap();
                return;
            }
            self.spawn(async move {
                if let Some((frame, _payload, files)) = worker.answer(header, message, Vec::new()).await {
                    send_with_files(&stream, &frame, &files).await;
                }
            });
        }
    }

    /// Whether the connection ends instead of an answer.
    fn closes(&self, header: &FrameHeader) -> bool {
        let mut state = self.state.lock();
        let closes = state.mood == Mood::Closes && header.kind != FrameKind::Hello;
        if closes {
            *state.counts.entry("Closed").or_default() += 1;
        }
        closes
    }

    async fn answer(
        &self,
        header: FrameHeader,
        message: Vec<u8>,
        payload: Vec<u8>,
    ) -> Option<(Vec<u8>, Vec<u8>, Vec<OwnedFd>)> {
        let mood = {
            let mut state = self.state.lock();
            *state.counts.entry(name(header.kind)).or_default() += 1;
            state.mood
        };
        let bulk = matches!(header.kind, FrameKind::Read | FrameKind::Open | FrameKind::Fill | FrameKind::Write);
        match mood {
            Mood::Hangs if bulk => return None,
            Mood::Slow(delay) if bulk => tokio::time::sleep(delay).await,
            Mood::Babbles if bulk => return Some((b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), vec![], vec![])),
            _ => {}
        }
        let id = header.request_id;
        match header.kind {
            FrameKind::Read => {
                let request = data::ReadRequest::decode(&*message).unwrap();
                let (mut items, mut payload) = (vec![], vec![]);
                for item in request.items {
                    let part = item.part.filter(|_| self.state.lock().knows_parts);
                    let (block, range) = (item.block.unwrap(), item.range.unwrap());
                    items.push(match part {
                        Some(part) => self.read_part(&block, range, part, mood, &mut payload),
                        None => self.read(&block, range, mood, &mut payload),
                    });
                }
                let length = payload.len() as u32;
                self.state.lock().sent_bytes += u64::from(length);
                Some((encode_frame(FrameKind::ReadReply, id, &data::ReadReply { items }, length), payload, vec![]))
            }
            FrameKind::Open => {
                let request = data::OpenRequest::decode(&*message).unwrap();
                let mut files = vec![];
                let items = request.items.iter().map(|item| {
                    let (reply, file) = self.open(item, mood);
                    files.extend(file);
                    reply
                });
                let items = items.collect();
                Some((encode_frame(FrameKind::OpenReply, id, &data::OpenReply { items }, 0), vec![], files))
            }
            FrameKind::Fill => {
                let request = data::FillRequest::decode(&*message).unwrap();
                let items = request.items.iter().map(|item| self.open(item, mood).0).collect();
                Some((encode_frame(FrameKind::FillReply, id, &data::FillReply { items }, 0), vec![], vec![]))
            }
            FrameKind::Corrupt => {
                Some((encode_frame(FrameKind::CorruptReply, id, &data::CorruptReply {}, 0), vec![], vec![]))
            }
            FrameKind::Query => {
                let request = data::QueryRequest::decode(&*message).unwrap();
                let state = self.state.lock();
                let item = |block: &data::BlockRef| {
                    let known = state.data.get(&name_of(block));
                    let incarnation = known.map_or(0, |known| known.incarnation);
                    data::query_reply::Item { known: known.is_some(), incarnation, ..Default::default() }
                };
                let items = request.blocks.iter().map(item).collect();
                Some((encode_frame(FrameKind::QueryReply, id, &data::QueryReply { items }, 0), vec![], vec![]))
            }
            FrameKind::Reserve => {
                let reply = self.reserve(&data::ReserveRequest::decode(&*message).unwrap());
                Some((encode_frame(FrameKind::ReserveReply, id, &reply, 0), vec![], vec![]))
            }
            FrameKind::Write => {
                let reply = self.write(&data::WriteRequest::decode(&*message).unwrap(), &payload);
                Some((encode_frame(FrameKind::WriteReply, id, &reply, 0), vec![], vec![]))
            }
            FrameKind::Sync => {
                let request = data::SyncRequest::decode(&*message).unwrap();
                let reply = data::SyncReply { status: self.sync(&request).into(), ..Default::default() };
                Some((encode_frame(FrameKind::SyncReply, id, &reply, 0), vec![], vec![]))
            }
            _ => None,
        }
    }

    fn sync(&self, request: &data::SyncRequest) -> Status {
        let mut state = self.state.lock();
        if state.failing_syncs > 0 {
            state.failing_syncs -= 1;
            return Status::Overloaded;
        }
        *state.counts.entry("Synced").or_default() += request.blocks.len() as u64;
        Status::Ok
    }

    fn reserve(&self, request: &data::ReserveRequest) -> data::ReserveReply {
        let mut state = self.state.lock();
        let name = name_of(request.block.as_ref().unwrap());
        if name.1 < state.frozen_below {
            *state.counts.entry("Refused").or_default() += 1;
            return data::ReserveReply { status: Status::Frozen.into(), ..Default::default() };
        }
        if let Some(origin) = request.origin.as_ref().filter(|_| !state.data.contains_key(&name)) {
            let Some(known) = state.data.get(&name_of(origin)) else {
                return data::ReserveReply { status: Status::NoSuchBlock.into(), ..Default::default() };
            };
            let bytes = known.bytes[..known.bytes.len().min(request.origin_bytes as usize)].to_vec();
            *state.counts.entry("Copied").or_default() += 1;
            state.data_at(name).bytes = bytes;
        }
        let incarnation = state.data_at(name).incarnation;
        data::ReserveReply { status: Status::Ok.into(), incarnation, ..Default::default() }
    }

    fn write(&self, request: &data::WriteRequest, payload: &[u8]) -> data::WriteReply {
        let mut state = self.state.lock();
        let name = name_of(request.block.as_ref().unwrap());
        if name.1 < state.frozen_below {
            *state.counts.entry("Refused").or_default() += 1;
            return data::WriteReply { status: Status::Frozen.into(), ..Default::default() };
        }
        let block = state.data_at(name);
        if let Some(cut) = request.cut {
            block.bytes.truncate(cut.offset as usize);
        }
        let zeros = request.zero.iter().map(|zero| (zero.offset as usize, vec![0; zero.length as usize]));
        for (offset, bytes) in zeros.chain([(request.offset as usize, payload.to_vec())]) {
            let end = offset + bytes.len();
            if !bytes.is_empty() && block.bytes.len() < end {
                block.bytes.resize(end, 0);
            }
            if !bytes.is_empty() {
                block.bytes[offset..end].copy_from_slice(&bytes);
            }
        }
        data::WriteReply { status: Status::Ok.into(), incarnation: block.incarnation, ..Default::default() }
    }

    fn block(&self, block: &data::BlockRef) -> Option<Bytes> {
        let state = self.state.lock();
        if let Some(known) = state.data.get(&name_of(block)).filter(|_| block.data) {
            let mut bytes = known.bytes.clone();
            bytes.resize(block.block_size as usize, 0);
            return Some(bytes.into());
        }
        let object = state.objects.get(&(block.key.clone(), block.etag.clone()))?;
        let start = (u64::from(block.index) * block.block_size).min(object.len() as u64) as usize;
        let end = (start + block.block_size as usize).min(object.len());
        Some(object.slice(start..end))
    }

    fn read(
        &self,
        block: &data::BlockRef,
        range: data::Range,
        mood: Mood,
        payload: &mut Vec<u8>,
    ) -> data::read_reply::Item {
        let refused = |status: Status| data::read_reply::Item { status: status.into(), ..Default::default() };
        if let Mood::Refuses(status) = mood {
            return refused(status);
        }
        let Some(bytes) = self.block(block) else { return refused(Status::VersionChanged) };
        let end = ((range.offset + range.length) as usize).min(bytes.len());
        let part = &bytes[range.offset as usize..end];
        let crcs = chunks_touching(range.offset, part.len() as u32).map(|chunk| {
            let bounds = chunk_range(chunk, bytes.len() as u32);
            crc32c::crc32c(&bytes[bounds.start as usize..bounds.end as usize])
        });
        let chunk_crcs = if block.data { vec![] } else { crcs.collect() };
        let sent = part.chunks(CHUNK_BYTES as usize).filter(|_| block.data);
        let sent_crcs = sent.map(crc32c::crc32c).collect();
        let at = payload.len();
        payload.extend_from_slice(part);
        if mood == Mood::Corrupts {
            payload[at] ^= 1;
        }
        data::read_reply::Item {
            status: Status::Ok.into(),
            length: part.len() as u32,
            chunk_crcs,
            sent_crcs,
            ..Default::default()
        }
    }

    fn read_part(
        &self,
        block: &data::BlockRef,
        range: data::Range,
        part: data::Range,
        mood: Mood,
        payload: &mut Vec<u8>,
    ) -> data::read_reply::Item {
        let at = payload.len();
        let mut reply = self.read(block, part, Mood::Well, payload);
        if let Mood::Refuses(status) = mood {
            payload.truncate(at);
            return data::read_reply::Item { status: status.into(), ..Default::default() };
        }
        if reply.status() == Status::Ok {
            *self.state.lock().counts.entry("Parts").or_default() += 1;
            let length = self.block(block).unwrap().len() as u32;
            assert!(is_whole_parts(&(part.offset..part.offset + part.length), length));
            assert!(range.offset <= part.offset && part.offset + part.length <= range.offset + range.length);
            reply.chunk_crcs.clear();
            reply.part_crcs = payload[at..].chunks(PART_BYTES as usize).map(crc32c::crc32c).collect();
            if mood == Mood::Corrupts {
                *payload.last_mut().unwrap() ^= 1;
            }
        }
        reply
    }

    fn open(&self, item: &data::open_request::Item, mood: Mood) -> (data::open_reply::Item, Option<OwnedFd>) {
        let refused = |status: Status| data::open_reply::Item { status: status.into(), ..Default::default() };
        if let Mood::Refuses(status) = mood {
            return (refused(status), None);
        }
        let block = item.block.as_ref().unwrap();
        let Some(bytes) = self.block(block) else { return (refused(Status::VersionChanged), None) };
        let mut state = self.state.lock();
        state.incarnation += 1;
        let incarnation = state.incarnation;
        let new = || BlockFile { file: tempfile::tempfile().unwrap(), incarnation, present: ChunkMap::new() };
        let (mut filled, is_cold) = (0, state.is_cold);
        // A block of a file is there as a whole.
        let whole = data::Range { offset: 0, length: bytes.len() as u32 };
        let want = if block.key.is_empty() { &vec![whole] } else { &item.want };
        let file = state.files.entry((block.content_id.clone(), block.index)).or_insert_with(new);
        for want in want {
            for chunk in chunks_touching(want.offset, want.length) {
                if file.present.insert(chunk) {
                    let bounds = chunk_range(chunk, bytes.len() as u32);
                    let part = &bytes[bounds.start as usize..bounds.end as usize];
                    filled += part.len() as u64;
                    rustix::io::pwrite(&file.file, part, u64::from(chunk * CHUNK_BYTES)).unwrap();
                }
            }
        }
        let reply = data::open_reply::Item {
            status: Status::Ok.into(),
            incarnation: file.incarnation,
            present: file.present.to_bytes().into(),
            length: bytes.len() as u32,
            fetched_bytes: filled,
            ..Default::default()
        };
        file.file.flush().unwrap();
        if is_cold {
            file.file.sync_all().unwrap();
            rustix::fs::fadvise(&file.file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        let descriptor = file.file.try_clone().unwrap().into();
        state.filled_bytes += filled;
        (reply, Some(descriptor))
    }
}

impl State {
    /// A block of a file, made where it is not there.
    fn data_at(&mut self, name: DataName) -> &mut DataBlock {
        let Self { data, incarnation, .. } = self;
        data.entry(name).or_insert_with(|| {
            *incarnation += 1;
            DataBlock { bytes: Vec::new(), incarnation: *incarnation }
        })
    }
}

fn name_of(block: &data::BlockRef) -> DataName {
    (block.inode, block.generation, block.index)
}

fn name(kind: FrameKind) -> &'static str {
    match kind {
        FrameKind::Read => "Read",
        FrameKind::Open => "Open",
        FrameKind::Fill => "Fill",
        FrameKind::Corrupt => "Corrupt",
        FrameKind::Cancel => "Cancel",
        FrameKind::Sync => "Sync",
        FrameKind::Write => "Write",
        _ => "other",
    }
}

async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> Option<(FrameHeader, Vec<u8>, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    reader.read_exact(&mut header).await.ok()?;
    let header = FrameHeader::decode(&header).unwrap();
    let mut message = vec![0; header.message_bytes as usize];
    reader.read_exact(&mut message).await.ok()?;
    let mut payload = vec![0; header.payload_bytes as usize];
    reader.read_exact(&mut payload).await.ok()?;
    Some((header, message, payload))
}

/// Reads frames from a socket that others write to.
struct UnixReader(Arc<UnixStream>);

impl UnixReader {
    async fn frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.exact(&mut header).await?;
        let header = FrameHeader::decode(&header).unwrap();
        let mut message = vec![0; header.message_bytes as usize];
        self.exact(&mut message).await?;
        Some((header, message))
    }

    async fn exact(&mut self, mut into: &mut [u8]) -> Option<()> {
        while !into.is_empty() {
            self.0.readable().await.ok()?;
            match self.0.try_read(into) {
                Ok(0) => return None,
                Ok(count) => into = &mut into[count..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        Some(())
    }
}

async fn send_with_files(stream: &UnixStream, frame: &[u8], files: &[OwnedFd]) {
    let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    loop {
        stream.writable().await.unwrap();
        let sent = stream.try_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            }
            Ok(rustix::net::sendmsg(stream, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL)?)
        });
        match sent {
            Ok(count) => return assert_eq!(count, frame.len(), "answers are small"),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_client_gone) => return,
        }
    }
}
