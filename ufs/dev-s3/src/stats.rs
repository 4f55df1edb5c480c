//! Counters of requests and bytes, by operation and by kind.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::operation::{Kind, Operation};

/// The counters of a running store. A request is counted when it arrives.
#[derive(Default)]
pub struct Stats {
    operations: [AtomicU64; Operation::ALL.len()],
    bytes_out: AtomicU64,
    errors: AtomicU64,
    faults: AtomicU64,
}

/// A reading of the counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StatsSnapshot {
    /// Requests by kind: `GET` and `HEAD` (of objects), `LIST`, `PUT`, `COPY`, `DELETE`, `MULTIPART`, `BUCKET`,
    /// `OTHER`.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Requests by S3 operation.
    pub operations: BTreeMap<&'static str, u64>,
    pub requests: u64,
    /// Bytes of answers' bodies handed to the connection.
    pub bytes_out: u64,
    /// Answers with a status of 400 and above, faults included.
    pub errors: u64,
    /// Requests that a fault rule made fail.
    pub faults: u64,
}

impl StatsSnapshot {
    /// Requests of one kind.
    pub fn count(&self, kind: Kind) -> u64 {
        self.kinds.get(kind.name()).copied().unwrap_or(0)
    }
}

impl Stats {
    pub(crate) fn request(&self, operation: Operation) {
        self.operations[operation as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, bytes: u64) {
        self.bytes_out.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads all counters; kinds and operations that never occurred are listed with 0.
    pub fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = StatsSnapshot {
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            ..StatsSnapshot::default()
        };
        for operation in Operation::ALL {
            let count = self.operations[*operation as usize].load(Ordering::Relaxed);
            *snapshot.kinds.entry(operation.kind().name()).or_default() += count;
            snapshot.operations.insert(operation.name(), count);
            snapshot.requests += count;
        }
        snapshot
    }

    /// Sets all counters to 0.
    pub fn reset(&self) {
        for counter in self.operations.iter().chain([&self.bytes_out, &self.errors, &self.faults]) {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_up_and_reset() {
        let stats = Stats::default();
        stats.request(Operation::PutObject);
        stats.request(Operation::UploadPart);
        stats.request(Operation::GetObject);
        stats.sent(7);
        let snapshot = stats.snapshot();
        assert_eq!((snapshot.count(Kind::Put), snapshot.count(Kind::Get), snapshot.count(Kind::Head)), (2, 1, 0));
        assert_eq!((snapshot.requests, snapshot.bytes_out, snapshot.operations["UploadPart"]), (3, 7, 1));
        stats.reset();
        assert_eq!(stats.snapshot().requests, 0);
    }
}
