//! The rules of POSIX, as Linux has them (`fs/attr.c`, `fs/namei.c`, `fs/posix_acl.c`): what a name can be, what a mode
//! and an access list allow, and what a change makes of mode, owner, times and count of names.
//!
//! The master applies them to its records. A client that answers for a directory applies them to the attributes that it
//! has, and a cache-mode mount to those that the bucket keeps. All are functions of what they are given: no clock, no
//! storage.

pub mod acl;
mod attributes;
mod error;
pub mod mode;
mod name;
mod permission;
mod space;
pub mod xattr;

pub use attributes::{
    attributes_set, changes_content, check_owner, content_changed, created, directory_changed, inode_changed,
    loses_privileges, name_added, name_dropped,
};
pub use error::Refusal;
pub use name::{check_create, check_name};
pub use permission::{Right, XattrChange, check_sticky, not_the_one, permits, right_to_set, right_to_xattr};
pub use space::{block_takes, file_takes};
