//! Changes of names and inodes in fs-mode mounts, as POSIX has them: one file per kind of change, each a part of
//! [`MutationContext`](context::MutationContext), which says what a change is made with.
//!
//! What a change makes of the attributes of inodes, and what it takes to be allowed, are the rules of [`cavern_posix`],
//! which clients apply as well to what they answer for. What they are applied to is found here.
//!
//! Every change checks all that can be wrong before it writes anything, so a refusal leaves no trace (but for a lock's,
//! whose request may wait after it). Permissions are mostly not looked at here: the kernel of the caller has done that,
//! with the owner and mode that it was given. Whether the mount is there for the client is; and where it limits the
//! users of a client, [`permission`] checks each change for the user who asks.

pub mod attributes;
pub mod content;
pub mod context;
pub mod create;
pub mod link;
pub mod lock;
pub mod open_references;
pub mod permission;
pub mod quota;
pub mod rename;
