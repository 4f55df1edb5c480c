//! The request log: one JSON object per line and request, written when the last byte of the answer is handed over (or
//! its connection is gone). Whoever has an answer whole finds its line in the file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use cavern_conf::host;
use serde::Serialize;

use crate::error::DevS3Error;
use crate::operation::Target;

/// An open log. Each line is one `write` in append mode, so lines of concurrent requests do not mix and no lock is
/// needed.
pub struct RequestLog {
    file: File,
}

#[derive(Serialize)]
struct Line<'a> {
    time_ms: i64,
    kind: &'static str,
    op: &'static str,
    bucket: &'a str,
    key: &'a str,
    /// As the client wrote it.
    #[serde(skip_serializing_if = "Option::is_none")]
    range: Option<&'a str>,
    /// 0 where no answer was given.
    status: u16,
    bytes: u64,
}

impl RequestLog {
    /// Opens or creates the file at `path`, for appending.
    ///
    /// # Errors
    /// [`DevS3Error::Io`].
    pub fn open(path: &Path) -> Result<Self, DevS3Error> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(DevS3Error::io("open the request log", path))?;
        Ok(Self { file })
    }

    /// Appends one line; a full disk must not fail the request, so errors are only logged.
    pub(crate) fn append(&self, target: &Target, range: Option<&str>, status: u16, bytes: u64) {
        let time_ms = host::wall_ns() / 1_000_000;
        let line = Line {
            time_ms,
            kind: target.operation.kind().name(),
            op: target.operation.name(),
            bucket: &target.bucket,
            key: &target.key,
            range,
            status,
            bytes,
        };
        let written = serde_json::to_vec(&line).map_err(std::io::Error::from).and_then(|mut text| {
            text.push(b'\n');
            (&self.file).write_all(&text)
        });
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write to the request log");
        }
    }
}
