//! What can be done about a read, in one line.

use super::Found;

/// The first that applies: what keeps bytes farthest away goes first.
pub fn of(found: &Found) -> String {
    let path = &found.path;
    if found.size == 0 {
        return "the file is empty: nothing is read".to_owned();
    }
    if let Some(lost) = found.workers.iter().find(|worker| worker.first && worker.error.is_some()) {
        return format!(
            "worker {} should have the block, and does not answer: see `cv node list`, and its log",
            lost.worker
        );
    }
    if found.blocks > 0 && found.workers.is_empty() {
        return "no worker is live, so reads go to the bucket: see `cv node list`".to_owned();
    }
    if found.sources.bucket_bytes > 0 {
        return "the bucket was read past the workers, which did not give the bytes in time: see `cv node list`, their \
                logs, and how long the bucket takes (`cavern_ufs_` in the metrics of the workers)"
            .to_owned();
    }
    if found.filled_bytes > 0 {
        return format!(
            "the block was on no worker, or not all of it: this read went to the bucket, and what it read is cached \
             now; `cv load {path}` caches all of the file"
        );
    }
    if found.mode == "fs-mode" && found.blocks == 0 {
        return format!(
            "no worker has a block of the file: it is a hole, or only the bucket has it; `cv load {path}` fetches that"
        );
    }
    let total: f64 = found.steps.iter().map(|step| step.time.ms).sum();
    let metadata: f64 = found.steps.iter().map(|step| step.time.metadata).sum();
    let held = found.workers.iter().find(|worker| worker.first_block_chunks_present > 0);
    if found.sources.network_bytes > 0 {
        let worker = held.map_or_else(|| "the worker".to_owned(), |worker| format!("worker {}", worker.worker));
        return format!(
            "{worker} is on another host (or `client.local_descriptors` is off): bytes come over the network; with a \
             worker on this host that has the block they come by descriptor"
        );
    }
    if metadata * 2.0 > total {
        return "the bytes are on this host; most of the time went to the master, which a mount asks once for what it \
                then keeps: see `cv raft status`"
            .to_owned();
    }
    let (present, chunks) = held.map_or((0, 0), |worker| (worker.chunks_present, worker.chunks));
    if found.mode == "cache-mode" && present < chunks {
        return format!(
            "the beginning is on this host, and {present} of {chunks} chunks of the file; `cv load {path}` caches all"
        );
    }
    "the bytes are on this host: what a mount waited for nevertheless shows `cat MOUNT/.cv/trace`".to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::survey::WorkerView;
    use super::super::{Sources, Step, StepTime};
    use super::*;

    fn worker(present: u32) -> WorkerView {
        WorkerView {
            worker: 3,
            data: String::new(),
            route: "local",
            connect_ms: 0.0,
            first: true,
            blocks: 1,
            chunks: 8,
            chunks_present: present,
            first_block_chunks: 8,
            first_block_chunks_present: present,
            error: None,
        }
    }

    fn found(workers: Vec<WorkerView>) -> Found {
        let time = StepTime {
            ms: 10.0,
            queue: 0.0,
            metadata: 1.0,
            descriptor: 5.0,
            disk: 0.0,
            network: 0.0,
            fetch: 0.0,
            bucket: 0.0,
        };
        Found {
            path: "/t/a".to_owned(),
            mode: "cache-mode",
            key: String::new(),
            etag: String::new(),
            size: 1 << 20,
            blocks: 1,
            workers,
            filled_bytes: 0,
            sources: Sources { descriptor_bytes: 1 << 20, ..Sources::default() },
            steps: vec![Step { step: "open", time }],
            advice: String::new(),
        }
    }

    #[test]
    fn the_farthest_place_decides() {
        let said = |found: &Found, expected: &str| {
            let advice = of(found);
            assert!(advice.contains(expected) && !advice.contains('\n'), "{advice}");
        };
        said(&found(vec![worker(8)]), "the bytes are on this host: ");
        said(&found(vec![worker(2)]), "2 of 8 chunks of the file; `cv load /t/a`");
        said(&found(vec![]), "no worker is live");
        said(&Found { size: 0, blocks: 0, ..found(vec![]) }, "the file is empty");
        let cold = Found { filled_bytes: 1, ..found(vec![worker(0)]) };
        said(&cold, "on no worker");
        let past = Sources { bucket_bytes: 5, ..Sources::default() };
        said(&Found { sources: past, ..cold }, "read past the workers");
        let far = Sources { network_bytes: 5, ..Sources::default() };
        said(&Found { sources: far, ..found(vec![worker(8)]) }, "worker 3 is on another host");
        said(&Found { mode: "fs-mode", blocks: 0, ..found(vec![]) }, "no worker has a block");
        let silent = WorkerView { error: Some("refused".to_owned()), ..worker(0) };
        said(&found(vec![silent]), "worker 3 should have the block");
        let mut asked = found(vec![worker(8)]);
        asked.steps[0].time.metadata = 9.0;
        said(&asked, "most of the time went to the master");
    }
}
