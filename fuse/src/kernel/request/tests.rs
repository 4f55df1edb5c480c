//! What is decoded, and what is refused.

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;

fn message(number: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
    let header = InHeader { len, opcode: number, unique: 42, node: 7, uid: 3, gid: 4, pid: 5, ..InHeader::default() };
    [header.as_bytes(), body].concat()
}

#[test]
fn a_lookup_is_decoded() {
    let bytes = message(opcode::LOOKUP, b"name\0");
    let request = Request::decode(&bytes).unwrap();
    assert_eq!((request.unique, request.node, request.caller), (42, 7, Caller { uid: 3, gid: 4, thread: 5 }));
    assert!(matches!(request.operation, Operation::Lookup { name: b"name" }));
}

#[test]
fn a_name_without_an_end_is_malformed() {
    let bytes = message(opcode::LOOKUP, b"name");
    assert_eq!(Request::decode(&bytes).err(), Some(Malformed { unique: Some(42), opcode: opcode::LOOKUP }));
}

#[test]
fn a_batch_that_promises_more_than_it_holds_is_malformed() {
    let mut body = abi::BatchForgetIn { count: u32::MAX, dummy: 0 }.as_bytes().to_vec();
    body.extend_from_slice(abi::ForgetOne { node: 1, nlookup: 1 }.as_bytes());
    assert!(Request::decode(&message(opcode::BATCH_FORGET, &body)).is_err());
    body[..4].copy_from_slice(&1u32.to_ne_bytes());
    let bytes = message(opcode::BATCH_FORGET, &body);
    let Operation::BatchForget(forgets) = Request::decode(&bytes).unwrap().operation else { panic!("not a batch") };
    assert_eq!(forgets.iter().collect::<Vec<_>>(), [(1, 1)]);
}

#[test]
fn changes_of_names_are_decoded() {
    let mut rename = abi::Rename2In { newdir: 9, flags: 2, padding: 0 }.as_bytes().to_vec();
    rename.extend_from_slice(b"old\0new\0");
    let bytes = message(opcode::RENAME2, &rename);
    let Operation::Rename { name, new_parent, new_name, flags } = Request::decode(&bytes).unwrap().operation else {
        panic!("not a rename")
    };
    assert_eq!((name, new_parent, new_name, flags), (&b"old"[..], 9, &b"new"[..], 2));
    rename.pop();
    assert!(Request::decode(&message(opcode::RENAME2, &rename)).is_err(), "the second name has no end");

    let bytes = message(opcode::SYMLINK, b"link\0../target\0");
    let Operation::Symlink { name, target } = Request::decode(&bytes).unwrap().operation else {
        panic!("not a symlink")
    };
    assert_eq!((name, target), (&b"link"[..], &b"../target"[..]));

    let mut set = abi::SetxattrIn { size: 3, flags: 1 }.as_bytes().to_vec();
    set.extend_from_slice(b"user.a\0v\0w");
    let bytes = message(opcode::SETXATTR, &set);
    let Operation::Setxattr { name, value, flags, .. } = Request::decode(&bytes).unwrap().operation else {
        panic!("not a setxattr")
    };
    assert_eq!((name, value, flags), (&b"user.a"[..], &b"v\0w"[..], 1));
    for (setxattr_flags, expected) in [(0, false), (abi::setxattr::ACL_KILL_SGID, true)] {
        let more = abi::SetxattrInExtension { setxattr_flags, padding: 0 };
        let bytes = message(opcode::SETXATTR, &[&set[..8], more.as_bytes(), &set[8..]].concat());
        let Operation::Setxattr { name, value, clears_set_group_id, .. } = Request::decode(&bytes).unwrap().operation
        else {
            panic!("not a setxattr")
        };
        assert_eq!((name, value, clears_set_group_id), (&b"user.a"[..], &b"v\0w"[..], expected));
    }
    set[0] = 4;
    assert!(Request::decode(&message(opcode::SETXATTR, &set)).is_err(), "the value is shorter than it says");
}

#[test]
fn only_what_is_valid_of_attributes_is_set() {
    let set = abi::SetattrIn {
        valid: fattr::MODE | fattr::ATIME | fattr::MTIME | fattr::MTIME_NOW,
        mode: libc::S_IFREG | 0o4755,
        uid: 5,
        atime: (-2i64).cast_unsigned(),
        atimensec: 999_999_999,
        ..abi::SetattrIn::default()
    };
    let bytes = message(opcode::SETATTR, set.as_bytes());
    let Operation::Setattr(set) = Request::decode(&bytes).unwrap().operation else { panic!("not a setattr") };
    let (atime, mtime) = (Some(NewTime::At(-1_000_000_001)), Some(NewTime::Now));
    assert_eq!(set, NewAttributes { mode: Some(0o4755), atime, mtime, ..NewAttributes::default() });
}

#[test]
fn times_that_cannot_be_kept_are_told_from_others() {
    let time = |seconds: i64, mtimensec| {
        let mtime = seconds.cast_unsigned();
        let set = abi::SetattrIn { valid: fattr::MTIME, mtime, mtimensec, ..abi::SetattrIn::default() };
        let bytes = message(opcode::SETATTR, set.as_bytes());
        let Operation::Setattr(set) = Request::decode(&bytes).unwrap().operation else { panic!("not a setattr") };
        set.mtime.unwrap()
    };
    let last = i64::MAX / 1_000_000_000;
    assert_eq!(time(last, 854_775_807), NewTime::At(i64::MAX));
    for (seconds, nanoseconds) in [(last, 854_775_808), (last + 1, 0), (-last - 2, 0), (i64::MAX, 0), (i64::MIN, 0)] {
        assert_eq!(time(seconds, nanoseconds), NewTime::OutOfRange, "{seconds} s");
    }
}

#[test]
fn what_is_not_served_is_recognized_whatever_its_body() {
    for number in [37, 999] {
        let bytes = message(number, &[]);
        assert!(matches!(Request::decode(&bytes).unwrap().operation, Operation::Unsupported { .. }), "{number}");
    }
}

#[test]
fn no_more_is_copied_than_the_answer_can_count() {
    let copy = abi::CopyFileRangeIn {
        fh_in: 3,
        off_in: 1 << 40,
        nodeid_out: 8,
        fh_out: 4,
        off_out: 5,
        len: 1 << 50,
        flags: 0,
    };
    for (number, count, length) in [
        (opcode::COPY_FILE_RANGE, CopyCount::Bits32, u64::from(u32::MAX)),
        (opcode::COPY_FILE_RANGE_64, CopyCount::Bits64, 1 << 50),
    ] {
        let bytes = message(number, copy.as_bytes());
        let Operation::CopyFileRange(decoded) = Request::decode(&bytes).unwrap().operation else {
            panic!("not a copy")
        };
        assert_eq!(decoded, CopyRange { from_fh: 3, from: 1 << 40, to_fh: 4, to: 5, length, count });
        assert!(Request::decode(&message(number, &copy.as_bytes()[..48])).is_err());
    }
}

#[test]
fn locks_and_their_ends_are_decoded() {
    let lock = abi::FileLock { start: 5, end: 9, kind: 1, pid: 77 };
    let ask = abi::LkIn { fh: 3, owner: 4, lock, lk_flags: abi::lk::FLOCK, padding: 0 };
    for (number, waits) in [(opcode::SETLK, false), (opcode::SETLKW, true)] {
        let bytes = message(number, ask.as_bytes());
        let Operation::Setlk { request, wait } = Request::decode(&bytes).unwrap().operation else {
            panic!("not a lock")
        };
        assert_eq!((request, wait), (LockRequest { fh: 3, owner: 4, lock, is_flock: true }, waits));
    }
    assert!(Request::decode(&message(opcode::GETLK, &ask.as_bytes()[..40])).is_err());
    let release = abi::ReleaseIn { fh: 3, lock_owner: 4, ..abi::ReleaseIn::default() };
    let bytes = message(opcode::RELEASE, release.as_bytes());
    assert!(matches!(Request::decode(&bytes).unwrap().operation, Operation::Release { fh: 3 }));
    let flush = abi::FlushIn { fh: 3, lock_owner: 4, ..abi::FlushIn::default() };
    let bytes = message(opcode::FLUSH, flush.as_bytes());
    assert!(matches!(Request::decode(&bytes).unwrap().operation, Operation::Flush { fh: 3, lock_owner: 4 }));
}

#[test]
fn a_write_has_as_many_bytes_as_it_says() {
    let mut write = abi::WriteIn { fh: 3, offset: 1 << 40, size: 4, flags: 2, ..abi::WriteIn::default() };
    let body = [write.as_bytes(), b"data and more"].concat();
    let bytes = message(opcode::WRITE, &body);
    let Operation::Write { fh, offset, data, flags, kill_privileges, writer } =
        Request::decode(&bytes).unwrap().operation
    else {
        panic!("not a write")
    };
    assert_eq!((fh, offset, data, flags, kill_privileges, writer), (3, 1 << 40, &b"data"[..], 2, false, None));
    (write.write_flags, write.lock_owner) = (abi::write::LOCKOWNER, 9);
    let bytes = message(opcode::WRITE, &[write.as_bytes(), b"data"].concat());
    let operation = Request::decode(&bytes).unwrap().operation;
    assert!(matches!(operation, Operation::Write { writer: Some(9), .. }));
    write.size = 5;
    let body = [write.as_bytes(), b"data"].concat();
    assert!(Request::decode(&message(opcode::WRITE, &body)).is_err());
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Request::decode(&bytes);
    }

    #[test]
    fn garbage_behind_a_sound_header_never_panics(
        number in 0u32..60,
        body in proptest::collection::vec(any::<u8>(), 0..200),
        declared in any::<u32>(),
        extensions in any::<u16>(),
    ) {
        let mut bytes = message(number, &body);
        if let Ok(request) = Request::decode(&bytes)
            && let Operation::BatchForget(forgets) = request.operation
        {
            prop_assert!(forgets.iter().count() <= body.len() / 16);
        }
        bytes[36..38].copy_from_slice(&extensions.to_ne_bytes());
        let _ = Request::decode(&bytes);
        bytes[..4].copy_from_slice(&declared.to_ne_bytes());
        let _ = Request::decode(&bytes);
    }
}
