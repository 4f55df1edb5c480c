//! Mounts, workers, jobs, and requests.

use cavern_proto::master::{Job, Mount};
use cavern_proto::record::{IndexRecord, RequestRecord, SecretsRecord, WorkerRecord};

use super::Tables;
use crate::error::Result;
use crate::schema;

impl Tables<'_> {
    pub fn mount(&self, id: u32) -> Result<Option<Mount>> {
        self.get(schema::Mounts, id)
    }

    pub fn mounts(&self) -> Result<Vec<Mount>> {
        self.rows(schema::Mounts, ()).page(usize::MAX, |row| row.value())
    }

    pub fn worker(&self, id: u64) -> Result<Option<WorkerRecord>> {
        self.get(schema::Workers, id)
    }

    pub fn workers(&self) -> Result<Vec<WorkerRecord>> {
        self.rows(schema::Workers, ()).page(usize::MAX, |row| row.value())
    }

    pub fn job(&self, id: u64) -> Result<Option<Job>> {
        self.get(schema::Jobs, id)
    }

    pub fn jobs(&self) -> Result<Vec<Job>> {
        self.rows(schema::Jobs, ()).page(usize::MAX, |row| row.value())
    }

    /// Which key the credentials are sealed with.
    pub fn secrets(&self) -> Result<SecretsRecord> {
        Ok(self.get(schema::Secrets, ())?.unwrap_or_default())
    }

    /// What became of the request under this id.
    pub fn request(&self, id: &[u8]) -> Result<Option<RequestRecord>> {
        self.get(schema::Requests, id)
    }

    pub fn index(&self, mount_id: u32) -> Result<Option<IndexRecord>> {
        self.get(schema::Indexes, mount_id)
    }
}
