//! What the master will make of a change, for the attributes of what it touches. Each function does what the change of
//! its name does at the master, for the plain case; whatever is not plain is not predicted.

use cavern_proto::block_id::block_length;
use cavern_proto::master::{Attr, CommitContent, CreateInode, Kind, OwnAttributes, SetAttr, Time};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o0010;
/// Longest target of a symlink.
const TARGET_MAX: usize = 4095;

/// What is made in a directory without access lists, under a name that is free; its number is for the caller to give.
pub(super) fn created(create: &CreateInode, owner: (u32, u32), directory: &Attr, now_ns: i64) -> Option<Attr> {
    let kind = create.kind();
    let target = create.target.len();
    let is_plain = match kind {
        Kind::File | Kind::Directory => target == 0,
        Kind::Symlink => (1..=TARGET_MAX).contains(&target),
        _ => false,
    };
    if !is_plain || directory.has_xattrs {
        return None;
    }
    let (uid, mut gid) = owner;
    let mut mode = if kind == Kind::Symlink { 0o777 } else { create.mode & 0o7777 & !(create.umask & 0o777) };
    if directory.mode & SET_GROUP_ID != 0 {
        gid = directory.gid;
        mode |= if kind == Kind::Directory { SET_GROUP_ID } else { 0 };
    }
    Some(Attr {
        kind: create.kind,
        mode,
        uid,
        gid,
        size: target as u64,
        mtime_ns: now_ns,
        ctime_ns: now_ns,
        nlink: if kind == Kind::Directory { 2 } else { 1 },
        atime_ns: now_ns,
        own: OwnAttributes::None.into(),
        allocated: (kind == Kind::File).then_some(0),
        btime_ns: Some(now_ns),
        ..Attr::default()
    })
}

/// A directory that got names, or lost some; `directories` of them led to directories.
pub(super) fn directory_changed(directory: &Attr, directories: i32, now_ns: i64) -> Attr {
    let nlink = directory.nlink.saturating_add_signed(directories);
    Attr { mtime_ns: now_ns, ctime_ns: now_ns, nlink, ..*directory }
}

/// What has lost its last name.
pub(super) fn unlinked(attr: &Attr, now_ns: i64) -> Attr {
    Attr { ctime_ns: now_ns, nlink: 0, ..*attr }
}

/// What has another name.
pub(super) fn moved(attr: &Attr, now_ns: i64) -> Attr {
    Attr { ctime_ns: now_ns, ..*attr }
}

/// Other attributes for what has no access list and no capability, and keeps its length.
pub(super) fn attributes_set(attr: &Attr, set: &SetAttr, now_ns: i64) -> Option<Attr> {
    if set.size.is_some() || attr.has_xattrs {
        return None;
    }
    let time = |time: Time| if time.now { now_ns } else { time.ns };
    let mut changed = *attr;
    let is_given_away = set.uid.is_some() || set.gid.is_some();
    if (set.kill_privileges || is_given_away) && attr.kind() != Kind::Directory {
        changed.mode &= !SET_USER_ID;
        if changed.mode & GROUP_EXECUTES != 0 || set.kill_set_group_id {
            changed.mode &= !SET_GROUP_ID;
        }
    }
    changed.mode = set.mode.map_or(changed.mode, |mode| mode & 0o7777);
    changed.uid = set.uid.unwrap_or(attr.uid);
    changed.gid = set.gid.unwrap_or(attr.gid);
    changed.atime_ns = set.atime.map_or(attr.atime_ns, time);
    changed.mtime_ns = set.mtime.map_or(attr.mtime_ns, time);
    changed.ctime_ns = now_ns;
    Some(changed)
}

/// The first content of a file of which the master knows no block, and nobody but this client has changed any.
pub(super) fn committed(attr: &Attr, commit: &CommitContent, block_size: u64, now_ns: i64) -> Option<Attr> {
    let is_untouched = (attr.version, attr.generation, attr.size, attr.allocated) == (0, 0, 0, Some(0));
    let changes = commit.grow_to > 0 || commit.changed || !commit.made.is_empty();
    let is_first = commit.made.iter().all(|made| made.generation == 0 && made.joined.is_empty());
    if !is_untouched || !changes || !is_first || attr.kind() != Kind::File {
        return None;
    }
    let taken = commit.made.iter().map(|made| {
        let reported = made.allocated.map(|bytes| bytes.min(block_size));
        reported.unwrap_or_else(|| u64::from(block_length(commit.grow_to, block_size, made.index)))
    });
    let allocated = Some(taken.sum());
    Some(Attr { size: commit.grow_to, version: 1, mtime_ns: now_ns, ctime_ns: now_ns, allocated, ..*attr })
}
