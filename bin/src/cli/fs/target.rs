//! Where `cv fs get` writes: a directory of this host, and nothing that is not beneath it.
//!
//! Who may write to the namespace decides which names a copy has, and could first have a symbolic link made and then
//! something behind it. So no link is followed on the way down, by the kernel's word (openat2(2)), and what is written
//! gets a fresh name before it takes the place of what was there: a link is replaced, never written through.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use cavern_conf::host;
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, readlinkat, renameat, symlinkat, unlinkat,
};
use rustix::io::Errno;

use crate::error::{CliError, Context as _};

pub struct Target {
    root: OwnedFd,
    path: PathBuf,
}

impl Target {
    /// A directory, which the user has named: links on the way to it are the user's.
    pub fn open(path: &Path) -> Result<Self, CliError> {
        Self::opened(path).context(format_args!("cannot write to {}", path.display()))
    }

    fn opened(path: &Path) -> rustix::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: openat(CWD, path, flags, Mode::empty())?, path: path.to_owned() })
    }

    /// The directory of a file that the user has named, and its name there.
    pub fn of_file(path: &Path) -> Result<(Self, String), CliError> {
        let named = || path.file_name()?.to_str().map(str::to_owned);
        let name = named().ok_or_else(|| CliError::Usage(format!("{} is no name of a file", path.display())))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok((Self::opened(parent).context(format_args!("cannot write {}", path.display()))?, name))
    }

    /// As messages name what is beneath.
    pub fn shown(&self, path: &str) -> String {
        self.path.join(path).display().to_string()
    }

    /// Opens a directory beneath, through no link.
    fn directory(&self, path: &str) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.root, path, flags, Mode::empty(), resolve)
    }

    /// The directory that a path is in, and the name there.
    fn place<'p>(&self, path: &'p str) -> Result<(OwnedFd, &'p str), CliError> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        let directory = self.directory(parent).map_err(|error| self.blocked(parent, error))?;
        Ok((directory, name))
    }

    fn blocked(&self, path: &str, error: Errno) -> CliError {
        let shown = self.shown(path);
        CliError::Failed(match error {
            Errno::LOOP | Errno::XDEV | Errno::NOTDIR => {
                format!(
                    "{shown} is no directory on this host, but in the namespace it is: remove it, or name another \
                     target"
                )
            }
            Errno::NOSYS => format!("cannot write to {shown}: the kernel must have openat2, as Linux has since 5.6"),
            error => format!("cannot write to {shown}: {error}"),
        })
    }

    pub fn make_directory(&self, path: &str) -> Result<(), CliError> {
        let (directory, name) = self.place(path)?;
        match mkdirat(&directory, name, Mode::from_raw_mode(0o777)) {
            Err(Errno::EXIST) => self.directory(path).map(drop).map_err(|error| self.blocked(path, error)),
            made => made.context(format_args!("cannot create {}", self.shown(path))),
        }
    }

    pub fn make_link(&self, path: &str, to: &[u8]) -> Result<(), CliError> {
        let (directory, name) = self.place(path)?;
        if readlinkat(&directory, name, Vec::new()).is_ok_and(|known| known.as_bytes() == to) {
            return Ok(());
        }
        let temporary = temporary_name();
        let made = symlinkat(OsStr::from_bytes(to), &directory, &temporary).and_then(|()| {
            renameat(&directory, &temporary, &directory, name).inspect_err(|_| {
                // That it could not be renamed is what counts.
                let _ = unlinkat(&directory, &temporary, AtFlags::empty());
            })
        });
        made.context(format_args!("cannot create {}", self.shown(path)))
    }

    /// A file that is there when it is kept.
    pub fn draft(&self, path: &str) -> Result<Draft, CliError> {
        let (directory, name) = self.place(path)?;
        let temporary = temporary_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let what = format!("cannot write {}", self.shown(path));
        let file = openat(&directory, &temporary, flags, Mode::from_raw_mode(0o666)).context(&what)?;
        let name = name.to_owned();
        Ok(Draft { directory, temporary, name, what, file: file.into(), is_kept: false })
    }
}

/// Not made of the name, which may be as long as names can be.
fn temporary_name() -> String {
    format!(".cv-get-{}.partial", host::unique_name())
}

/// A file under a temporary name. Dropped without being kept, it is removed.
pub struct Draft {
    directory: OwnedFd,
    temporary: String,
    name: String,
    what: String,
    file: File,
    is_kept: bool,
}

impl Draft {
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Puts it in the place of whatever has the name.
    pub fn keep(mut self) -> Result<(), CliError> {
        renameat(&self.directory, &self.temporary, &self.directory, &self.name).context(&self.what)?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_kept {
            // Why it is not kept is what counts.
            let _ = unlinkat(&self.directory, &self.temporary, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_is_written_through_links() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("file"), "untouched").unwrap();
        fs::create_dir(root.path().join("inside")).unwrap();
        let target = Target::open(root.path()).unwrap();
        target.make_link("out", outside.path().as_os_str().as_bytes()).unwrap();
        target.make_link("within", b"inside").unwrap();
        target.make_link("file", outside.path().join("file").as_os_str().as_bytes()).unwrap();
        for link in ["out", "within"] {
            let error = target.make_directory(link).unwrap_err().to_string();
            assert!(error.contains("is no directory on this host"), "{error}");
            assert!(target.make_directory(&format!("{link}/deep")).is_err());
            assert!(target.draft(&format!("{link}/file")).is_err());
            assert!(target.make_link(&format!("{link}/link"), b"x").is_err());
        }
        for path in ["../escaped", "inside/../../escaped"] {
            assert!(target.draft(path).is_err() && target.make_directory(path).is_err(), "{path}");
        }
        let mut draft = target.draft("file").unwrap();
        draft.file().write_all(b"new").unwrap();
        draft.keep().unwrap();
        assert_eq!(fs::read(root.path().join("file")).unwrap(), b"new");
        assert_eq!(fs::read(outside.path().join("file")).unwrap(), b"untouched");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(root.path().join("inside")).unwrap().count(), 0);
    }

    #[test]
    fn a_second_copy_takes_the_place_of_the_first_and_a_broken_one_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let target = Target::open(root.path()).unwrap();
        for round in ["one", "two"] {
            target.make_directory("d").unwrap();
            target.make_link("d/link", round.as_bytes()).unwrap();
            target.make_link("d/same", b"same").unwrap();
            let mut draft = target.draft(&"n".repeat(255)).unwrap();
            draft.file().write_all(round.as_bytes()).unwrap();
            draft.keep().unwrap();
            drop(target.draft("d/broken").unwrap());
        }
        assert_eq!(fs::read_link(root.path().join("d/link")).unwrap(), Path::new("two"));
        assert_eq!(fs::read_dir(root.path().join("d")).unwrap().count(), 2);
        assert_eq!(fs::read(root.path().join("n".repeat(255))).unwrap(), b"two");
        // A link to a directory gives way as well.
        symlink("d", root.path().join("to-d")).unwrap();
        target.draft("to-d").unwrap().keep().unwrap();
        assert!(root.path().join("to-d").is_file());
        let (of_file, name) = Target::of_file(&root.path().join("d/f")).unwrap();
        of_file.draft(&name).unwrap().keep().unwrap();
        assert!(root.path().join("d/f").is_file());
    }
}
