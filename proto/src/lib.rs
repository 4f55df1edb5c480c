//! Everything that crosses a wire or a restart: the gRPC services of the master, the framed data plane of the
//! workers, and the records in RocksDB. Behaviour lives here only where two crates must agree on it to the letter.

macro_rules! packages {
    ($($(#[$doc:meta])* $name:ident = $package:literal;)+) => {
        $($(#[$doc])*
        pub mod $name {
            pub use v1::*;

            #[allow(clippy::all, clippy::pedantic)]
            pub mod v1 {
                tonic::include_proto!($package);
            }
        })+
    };
}

packages! {
    /// The master's services and messages (`proto/master.proto`).
    master = "cavern.master.v1";
    /// Messages of the workers' data plane (`proto/data.proto`).
    data = "cavern.data.v1";
    /// Persisted records (`proto/record.proto`).
    record = "cavern.record.v1";
    /// What masters say to each other (`proto/raft.proto`).
    raft = "cavern.raft.v1";
    /// What a mount leaves to the process that goes on (`proto/journal.proto`).
    journal = "cavern.journal.v1";
}

/// All of them, as an encoded `google.protobuf.FileDescriptorSet`.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

pub mod block_id;
pub mod bounded;
pub mod chunk;
mod client_rules;
pub mod frame;
mod join;
pub mod locks;
mod mount;
mod not_leading;
pub mod reserved;
mod status_detail;
mod store;
mod users;
pub mod view_file;

pub use block_id::{BlockId, ContentId};
pub use chunk::{CHUNK_BYTES, ChunkMap};
pub use client_rules::ClientAccess;
pub use mount::{HIDDEN, shown_option};
pub use not_leading::NotLeading;
pub use status_detail::StatusDetail;
pub use store::{Capabilities, Scheme, StoreUri, StoreUriError, azblob_options, gs_options, s3_options};
pub use users::NOBODY;

/// What the clients of commands call themselves to the master. They come and go with their commands, which is no news
/// to its log.
pub const COMMAND_CLIENT: &str = "cv";

/// Inode id of the namespace's root.
pub const ROOT_INODE: u64 = 1;

/// Longest name of one path component, in bytes (as Linux has it).
pub const NAME_MAX: usize = 255;

/// Replicas of a block, at most.
pub const REPLICAS_MAX: u32 = 4;
