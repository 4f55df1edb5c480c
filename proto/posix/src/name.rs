//! Names, and what can be made under one.

use cavern_proto::NAME_MAX;
use cavern_proto::master::{CreateInode, Kind, Naming};
use rustix::io::Errno;

use crate::error::{Refusal, refuse};

/// Longest target of a symlink in bytes, as Linux has it (`PATH_MAX` without its NUL).
const TARGET_MAX: usize = 4095;

/// Whether a directory can hold a name.
///
/// # Errors
/// `ENAMETOOLONG`, `EINVAL`.
pub fn check_name(name: &[u8]) -> Result<(), Refusal> {
    if name.len() > NAME_MAX {
        return refuse(Errno::NAMETOOLONG, format!("a name of {} bytes: {NAME_MAX} are the most", name.len()));
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&0) || name.contains(&b'/') {
        let what = format!("write 1 to {NAME_MAX} bytes without NUL and '/', but neither . nor ..");
        return refuse(Errno::INVAL, format!("{:?} cannot be a name: {what}", String::from_utf8_lossy(name)));
    }
    Ok(())
}

/// Whether something can be made, as far as that is known without a look at its directory.
///
/// # Errors
/// Those of [`check_name`], and of kinds and targets that do not go together.
pub fn check_create(create: &CreateInode) -> Result<(), Refusal> {
    let kind = create.kind();
    match create.naming() {
        Naming::Named => check_name(&create.name)?,
        _ if kind == Kind::File && create.name.is_empty() => {}
        _ => return refuse(Errno::INVAL, "only a file can be without a name"),
    }
    match (kind, create.target.len()) {
        (Kind::Unspecified, _) => refuse(Errno::INVAL, "an inode of no kind"),
        (Kind::Symlink, 0) => refuse(Errno::NOENT, "a symlink that leads nowhere"),
        (Kind::Symlink, length) if length > TARGET_MAX => {
            refuse(Errno::NAMETOOLONG, format!("a symlink's target of {length} bytes"))
        }
        (Kind::Symlink, _) | (_, 0) => Ok(()),
        _ => refuse(Errno::INVAL, "only a symlink has a target"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component_of_a_path() {
        for name in [&b"a"[..], b"...", b".a", b"\xff", &[b'x'; NAME_MAX]] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
        for name in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0"] {
            assert_eq!(check_name(name).unwrap_err().errno, Errno::INVAL, "{name:?}");
        }
        assert_eq!(check_name(&[b'x'; NAME_MAX + 1]).unwrap_err().errno, Errno::NAMETOOLONG);
    }

    #[test]
    fn only_symlinks_have_targets_and_only_files_no_name() {
        let make = |kind: Kind, name: &'static str, target: usize, naming: Naming| {
            let (name, target) = (name.into(), vec![b't'; target].into());
            let create =
                CreateInode { kind: kind.into(), name, target, naming: naming.into(), ..CreateInode::default() };
            check_create(&create).map_err(|refusal| refusal.errno)
        };
        assert_eq!(make(Kind::Symlink, "s", TARGET_MAX, Naming::Named), Ok(()));
        assert_eq!(make(Kind::Symlink, "s", TARGET_MAX + 1, Naming::Named), Err(Errno::NAMETOOLONG));
        assert_eq!(make(Kind::Symlink, "s", 0, Naming::Named), Err(Errno::NOENT));
        assert_eq!(make(Kind::File, "f", 1, Naming::Named), Err(Errno::INVAL));
        assert_eq!(make(Kind::Unspecified, "u", 0, Naming::Named), Err(Errno::INVAL));
        assert_eq!(make(Kind::File, "", 0, Naming::Nameless), Ok(()));
        assert_eq!(make(Kind::File, "f", 0, Naming::Nameless), Err(Errno::INVAL));
        assert_eq!(make(Kind::Directory, "", 0, Naming::NamelessForEver), Err(Errno::INVAL));
    }
}
