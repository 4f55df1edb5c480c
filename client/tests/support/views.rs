//! Views of a fake master, and the objects that they are.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use cavern_erofs::{
    Attributes, Content, Device, EachEntry, Error, Node, Options, Place, Times, Timestamp, Tree, write_image,
};
use cavern_proto::master::views_server::Views;
use cavern_proto::master::*;
use cavern_proto::record::{ViewFile, ViewManifest};
use cavern_proto::view_file::{BLOCK_BYTES, PageBuilder, blocks_of, encode_manifest};
use parking_lot::Mutex;
use prost::Message as _;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

type Making = Pin<Box<dyn Stream<Item = Result<ViewProgress, Status>> + Send>>;

/// What a master says of views.
#[derive(Clone, Default)]
pub struct FakeViews(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    views: Vec<View>,
    located: HashMap<u64, Vec<cavern_proto::master::Extent>>,
    counts: HashMap<&'static str, u64>,
}

impl FakeViews {
    pub fn put(&self, view: &View) {
        self.0.lock().views.push(view.clone());
    }

    pub fn remove(&self, id: u32) {
        self.0.lock().views.retain(|view| view.id != id);
    }

    /// The blocks of a file, each of generation 7, are at these workers.
    pub fn locate(&self, inode: u64, blocks: &[&[u64]]) {
        let extent = |(index, workers): (u32, &&[u64])| cavern_proto::master::Extent {
            index,
            generation: 7,
            workers: workers.to_vec(),
            ..Default::default()
        };
        self.0.lock().located.insert(inode, (0..).zip(blocks).map(extent).collect());
    }

    pub fn count(&self, call: &str) -> u64 {
        self.0.lock().counts.get(call).copied().unwrap_or(0)
    }

    fn enter(&self, call: &'static str) {
        *self.0.lock().counts.entry(call).or_default() += 1;
    }
}

#[tonic::async_trait]
impl Views for FakeViews {
    type CreateViewStream = Making;

    async fn create_view(&self, _: Request<CreateViewRequest>) -> Result<Response<Making>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn import_view(&self, _: Request<Streaming<ImportViewRequest>>) -> Result<Response<View>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn delete_view(&self, _: Request<DeleteViewRequest>) -> Result<Response<View>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn list_views(&self, _: Request<ListViewsRequest>) -> Result<Response<ViewList>, Status> {
        self.enter("ListViews");
        Ok(Response::new(ViewList { views: self.0.lock().views.clone() }))
    }

    async fn get_view(&self, request: Request<GetViewRequest>) -> Result<Response<View>, Status> {
        self.enter("GetView");
        let GetViewRequest { name, id } = request.into_inner();
        let is_it = |view: &&View| if name.is_empty() { view.id == id } else { view.name == name };
        let found = self.0.lock().views.iter().find(is_it).cloned();
        found.map(Response::new).ok_or_else(|| Status::not_found("no such view"))
    }

    async fn locate_blocks(
        &self,
        request: Request<LocateBlocksRequest>,
    ) -> Result<Response<LocateBlocksReply>, Status> {
        self.enter("LocateBlocks");
        let LocateBlocksRequest { view, inode, mut prefetch } = request.into_inner();
        prefetch.push(inode);
        let state = self.0.lock();
        if !state.views.iter().any(|known| known.id == view) {
            return Err(Status::not_found("no such view"));
        }
        let files = prefetch.into_iter().filter_map(|inode| {
            let extents = state.located.get(&inode)?.clone();
            Some(LocatedFile { inode, extents })
        });
        Ok(Response::new(LocateBlocksReply { files: files.collect() }))
    }
}

/// A view of a directory of files, and its object.
pub struct BuiltView {
    /// Still without the ETag of its object.
    pub view: View,
    pub object: Vec<u8>,
    /// Where each file begins: its device, from 1 on, and the byte there.
    pub places: Vec<(u16, u64)>,
}

struct Files<'f>(&'f [(ViewFile, u16, u64)]);

impl Tree for Files<'_> {
    type Error = Error;

    fn entries(&mut self, _directory: u64, each: EachEntry<'_>) -> Result<(), Error> {
        for (number, (file, device, offset)) in self.0.iter().enumerate() {
            let place = Place::Device { device: *device, offset: *offset };
            let extents = [cavern_erofs::Extent { length: file.size, place }];
            let attributes = Attributes { permissions: 0o644, links: 1, ..Attributes::default() };
            let content = Content::File(&extents);
            each(&file.name, &Node { id: number as u64 + 1, attributes, xattrs: &[], content })?;
        }
        Ok(())
    }
}

/// Makes a view of files, which are in the order of their names; each of those in `behind` comes behind some blocks of
/// nothing, and each of those in `begin` begins another device.
pub fn build_view(id: u32, name: &str, files: &[ViewFile], behind: &[usize], begin: &[usize]) -> BuiltView {
    let (mut builder, mut pages) = (PageBuilder::default(), Vec::new());
    let (mut placed, mut devices) = (Vec::new(), vec![0_u32]);
    for (number, file) in files.iter().enumerate() {
        if begin.contains(&number) {
            devices.push(0);
        }
        let device = devices.len() - 1;
        if behind.contains(&number) {
            devices[device] += 3;
        }
        let block = devices[device];
        pages.extend(builder.add((device as u32, block), "", file.clone()).unwrap_or_default());
        placed.push((file.clone(), device as u16 + 1, u64::from(block) * BLOCK_BYTES));
        devices[device] += blocks_of(file.size);
    }
    let (last, index) = builder.finish();
    pages.extend(last.unwrap_or_default());
    let index = index.encode_to_vec();

    let spill = tempfile::tempdir().unwrap();
    let image = std::fs::File::create(spill.path().join("image")).unwrap();
    let described: Vec<Device> = devices.iter().map(|blocks| Device { blocks: *blocks, tag: [0; 64] }).collect();
    let time = Timestamp { seconds: 1_700_000_000, nanoseconds: 0 };
    let options =
        Options { spill: spill.path(), uuid: [1; 16], label: "", time, times: Times::Shared, devices: &described };
    let attributes = Attributes { permissions: 0o755, links: 2, ..Attributes::default() };
    let root = Node { id: 0, attributes, xattrs: &[], content: Content::Directory };
    write_image(&image, &root, &mut Files(&placed), &options).unwrap();
    let image = std::fs::read(spill.path().join("image")).unwrap();

    let mut object = [&image[..], &pages, &index].concat();
    let view = View {
        id,
        name: name.to_owned(),
        state: ViewState::Ready.into(),
        path: "/m".to_owned(),
        mount_id: 1,
        store_mount_id: 1,
        key: format!(".cavern-view-{id:032x}"),
        image_bytes: image.len() as u64,
        pages_bytes: pages.len() as u64,
        index_bytes: index.len() as u64,
        hash: blake3::hash(&object).as_bytes().to_vec().into(),
        device_blocks: devices,
        ..View::default()
    };
    let manifest = ViewManifest { view: Some(view.clone()), ..ViewManifest::default() };
    object.extend(encode_manifest(&manifest));
    let view = View { object_bytes: object.len() as u64, ..view };
    let places = placed.into_iter().map(|(_, device, offset)| (device, offset)).collect();
    BuiltView { view, object, places }
}
