//! The FUSE client: a namespace of Cavern as directories and files of this host.
//!
//! [`kernel`] speaks the FUSE protocol and knows nothing of what is served.

pub mod kernel;
