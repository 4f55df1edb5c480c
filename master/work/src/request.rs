//! Requests that their callers may send again after a lost answer, to this master or to a later one.
//!
//! What changes the state and is not the same when it is done twice goes into the log under the id that its caller has
//! chosen ([`cavern_state::requests`]). A service looks first whether the request is answered already, so that neither
//! a bucket is asked nor a worker is emptied for it; what is decided counts in the log, where two attempts at the same
//! time meet.
//!
//! | request | sent again |
//! |---|---|
//! | mount, unmount, load, export, retry of a job, removal of a worker | done once, by its id |
//! | change of a mount | gives it what it has already: nothing is done |
//! | registration of a worker | finds the worker by its uuid |
//! | begin and end of draining | finds the mark as it is to be |
//! | cancelling a job | finds that it has ended |
//! | adding a master | finds it by its address: `cv raft add` |
//! | removing a master, transfer of the lead | finds the group so: numbers of masters are not used again |
//! | changes of the namespace | have their numbers within their session |
//! | creation and import of a view | finds what was made under its name |
//! | deletion of a view | finds none of the name |
//! | refresh, free, snapshot, fsck | does again what changes nothing the second time |

use bytes::Bytes;
use cavern_proto::record::RequestRecord;
use cavern_state::TypedCommand;
use cavern_state::outcome::Requested;
use prost::Message;

use crate::error::WorkError;
use crate::reader::StateReader;

/// Bytes of an id.
const ID_BYTES: usize = 16;

/// The id of a request; the default is none, of callers that know of no ids.
#[derive(Clone, Debug, Default)]
pub struct Request {
    id: Bytes,
}

impl Request {
    /// # Errors
    /// [`WorkError::Invalid`] for what is no id.
    pub fn new(id: Bytes) -> Result<Self, WorkError> {
        match id.len() {
            0 | ID_BYTES => Ok(Self { id }),
            other => Err(WorkError::Invalid(format!("a request's id has {other} bytes and not {ID_BYTES}"))),
        }
    }

    /// What became of it, if it was done.
    pub async fn answer(&self, reader: &StateReader) -> Result<Option<RequestRecord>, WorkError> {
        if self.id.is_empty() {
            return Ok(None);
        }
        let id = self.id.clone();
        reader.read(move |tables| Ok(tables.request(&id)?)).await
    }

    /// The command that does it once.
    pub fn command<C: TypedCommand>(&self, command: C) -> Requested<C> {
        self.command_with(command, &())
    }

    /// The command that does it once, with an answer that is kept.
    pub fn command_with<C: TypedCommand>(&self, command: C, reply: &impl Message) -> Requested<C> {
        Requested { id: self.id.clone(), reply: reply.encode_to_vec().into(), command }
    }
}
