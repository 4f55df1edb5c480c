//! Parts of a file that no worker is asked for by name: holes, what was staged on this host, and what is left of an
//! object in a file that is being changed.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::time::Instant;

use super::file::OpenFile;
use super::local_file::{PastEnd, read_file};
use super::reader::BlockReader;
use crate::error::ClientError;

/// Where a part is.
pub(crate) enum PartLocation {
    /// Nobody has written it: zeros.
    Hole,
    /// In a file of this host, from this byte on.
    Staged(Arc<File>, u64),
    /// These bytes of an object, and zeros behind them.
    Object(Arc<OpenFile>, Range<u64>),
}

/// Whose memory a part takes. What is read of an object is always the reader's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// It is charged to the memory budget.
    Reader,
    /// Whoever puts it together with others has room for it.
    Caller,
}

impl BlockReader {
    /// All `length` bytes of a part. `name` is that of the file.
    ///
    /// # Errors
    /// [`ClientError::Io`] when a file of this host cannot be read; of an object, those of [`OpenFile::read`].
    pub(crate) async fn read_part(
        &self,
        at: PartLocation,
        length: usize,
        payer: Owner,
        deadline: Instant,
        name: impl FnOnce() -> String + Send,
    ) -> Result<Bytes, ClientError> {
        let charge = match (&at, payer) {
            (PartLocation::Object(..), _) | (_, Owner::Caller) => None,
            (_, Owner::Reader) => Some(self.charge(length, deadline).await?),
        };
        let bytes = match at {
            PartLocation::Object(object, within) => return read_object(&object, within, length).await,
            PartLocation::Staged(file, offset) => {
                read_file(file, offset, length, PastEnd::Missing, deadline, name).await?
            }
            PartLocation::Hole => vec![0; length],
        };
        Ok(match charge {
            Some(charge) => charge.hold(bytes),
            None => bytes.into(),
        })
    }
}

async fn read_object(object: &OpenFile, within: Range<u64>, length: usize) -> Result<Bytes, ClientError> {
    let wanted = (within.end - within.start) as usize;
    let bytes = object.read_object(within.start, wanted).await?;
    if bytes.len() != wanted {
        let reason = format!("{}: {} bytes instead of {wanted} of the old content", object.node(), bytes.len());
        return Err(ClientError::Invalid(reason));
    }
    if wanted == length {
        return Ok(bytes);
    }
    // Nobody waits for memory who holds some.
    let mut padded = BytesMut::from(bytes);
    padded.resize(length, 0);
    Ok(padded.freeze())
}
