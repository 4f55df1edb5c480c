//! How much of a file each worker has.

use cavern_client::Client;
use cavern_net::Route;
use cavern_proto::master::{Worker, WorkerState};
use serde::Serialize;
use tokio::time::Instant;

use crate::cli::fs::layout::{Block, Layout};

/// One worker and what it has of a file.
#[derive(Debug, Serialize)]
pub struct WorkerView {
    pub worker: u64,
    pub data: String,
    /// `local`: it hands out descriptors. `remote`: it sends bytes.
    pub route: &'static str,
    /// Milliseconds until it was known how it is reached.
    pub connect_ms: f64,
    /// Readers ask it first for the first block.
    pub first: bool,
    pub blocks: usize,
    pub chunks: u32,
    pub chunks_present: u32,
    pub first_block_chunks: u32,
    pub first_block_chunks_present: u32,
    /// Why it said nothing, if it did not.
    pub error: Option<String>,
}

/// What each live worker has, and workers that should have something. One that does not answer is shown with the
/// reason.
pub async fn survey(client: &Client, layout: &Layout) -> Vec<WorkerView> {
    let mut views = Vec::new();
    for worker in client.workers().workers() {
        let blocks = layout.at(worker.id);
        let is_live = worker.state() == WorkerState::Live;
        if !blocks.is_empty() && (is_live || blocks.iter().any(|block| block.holders.is_some())) {
            views.push(ask(client, layout, worker, &blocks, is_live).await);
        }
    }
    views.sort_by_key(|view| (!view.first, view.worker));
    views
}

async fn ask(client: &Client, layout: &Layout, worker: &Worker, blocks: &[&Block], is_live: bool) -> WorkerView {
    let began = Instant::now();
    let route = match client.pool().route(worker.id).await {
        Ok(Route::Local) => "local",
        Ok(Route::Remote) | Err(_) => "remote",
    };
    let connect_ms = (began.elapsed().as_secs_f64() * 1e6).round() / 1e3;
    let (found, error) = match Block::query(client, worker.id, if is_live { blocks } else { &[] }).await {
        Ok(found) => (found, (!is_live).then(|| "not live: see `cv node list`".to_owned())),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let known = || blocks.iter().zip(&found).filter(|(_, cached)| cached.is_known);
    WorkerView {
        worker: worker.id,
        data: worker.data_address.clone(),
        route,
        connect_ms,
        first: layout.first_block().is_some_and(|block| block.first == Some(worker.id)),
        blocks: known().filter(|(_, cached)| cached.chunks > 0).count(),
        chunks: blocks.iter().map(|block| block.chunks()).sum(),
        chunks_present: known().map(|(_, cached)| cached.chunks).sum(),
        first_block_chunks: layout.blocks.first().map_or(0, Block::chunks),
        first_block_chunks_present: known().find(|(block, _)| block.index == 0).map_or(0, |(_, cached)| cached.chunks),
        error,
    }
}

impl WorkerView {
    /// In a table; `blocks` are those of the file.
    pub fn row(&self, blocks: usize) -> [String; 7] {
        [
            format!("{}{}", self.worker, if self.first { "*" } else { "" }),
            self.data.clone(),
            self.route.to_owned(),
            format!("{}/{blocks}", self.blocks),
            format!("{}/{}", self.chunks_present, self.chunks),
            format!("{}/{}", self.first_block_chunks_present, self.first_block_chunks),
            self.error.clone().unwrap_or_else(|| if self.first { "asked first".to_owned() } else { String::new() }),
        ]
    }
}
