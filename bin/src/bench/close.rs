//! `close` with its result: a FUSE file system reports there what went wrong with bytes that were written before, and
//! dropping a file does not say it.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd as _;

/// Closes a file.
///
/// # Errors
/// What `close` says. The descriptor is gone then as well.
#[expect(unsafe_code, reason = "the standard library has no close that answers")]
pub fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the file owned the descriptor and has given it up, so nobody else uses or closes it.
    let result = unsafe { libc::close(descriptor) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_closed_file_is_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"content").unwrap();
        close(file.reopen().unwrap()).unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"content");
    }
}
