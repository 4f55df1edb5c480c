//! How the files of a data directory are made, opened and replaced.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

/// Of the files of blocks: they have what files of the namespace have that only some may read.
const FILE_MODE: u32 = 0o600;

/// Times of access are of no use here, and each would be a change of the inode to be written. What is no file is not
/// opened: a pipe would be waited for, and where a link leads is not ours.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    let open = |more: OFlags| {
        let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | more;
        File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
    };
    let file = match open(OFlags::NOATIME) {
        // Only the owner may do without.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => open(OFlags::empty()),
        opened => opened,
    }?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::NotFound, "something that is no file is in its place"))
    }
}

/// Makes a file of so many bytes, all of them a hole.
pub(super) fn create_file(path: &Path, bytes: u32) -> io::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).mode(FILE_MODE).open(path)?;
    let sized = if bytes == 0 { Ok(()) } else { file.set_len(u64::from(bytes)) };
    match sized {
        Ok(()) => Ok(file),
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Writes at an offset of a file.
///
/// # Errors
/// How many bytes were written, and why no more.
pub(super) fn write_at(file: &File, offset: u32, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], u64::from(offset) + done as u64) {
            Ok(0) => return Err((done, io::ErrorKind::WriteZero.into())),
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err((done, error)),
        }
    }
    Ok(())
}

/// Puts a file in the place of what has its name in a directory, in one step; it is on disk when this returns.
pub(super) fn replace_file(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = directory.join(format!("{name}.new"));
    let mut file = File::options().write(true).create(true).truncate(true).mode(FILE_MODE).open(&fresh)?;
    io::Write::write_all(&mut file, bytes)?;
    file.sync_all()?;
    std::fs::rename(&fresh, directory.join(name))?;
    File::open(directory)?.sync_all()
}
