use std::io;
use std::path::Path;

use rustix::fs::Access;
use tokio::net::TcpListener;

use super::ProcessError;

/// Listens on `listen` (host:port; port 0 takes a free one). `key` is the configuration key that the address came from,
/// as `worker.listen`; it is named in the error.
///
/// # Errors
/// [`ProcessError::AddressInUse`], or [`ProcessError::Bind`] for what is not an address of this host.
pub async fn bind_tcp(listen: &str, key: &str) -> Result<TcpListener, ProcessError> {
    TcpListener::bind(listen).await.map_err(|source| {
        let (address, key) = (listen.to_owned(), key.to_owned());
        match source.kind() {
            io::ErrorKind::AddrInUse => ProcessError::AddressInUse { address, key },
            _ => ProcessError::Bind { address, key, source },
        }
    })
}

/// Makes sure that `path` is a directory that this process can write to, creating it and its parents (mode 0755 less
/// the umask). `key` is the configuration key that the path came from, as `master.data_dir`. Blocks on the disk.
///
/// # Errors
/// [`ProcessError::Directory`] with the system's reason.
pub fn ensure_dir(path: &Path, key: &str) -> Result<(), ProcessError> {
    let refuse = |source| ProcessError::Directory { path: path.to_owned(), key: key.to_owned(), source };
    std::fs::create_dir_all(path).map_err(refuse)?;
    // Asks the kernel rather than reading the mode bits: read-only file systems, ACLs and capabilities count too.
    rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK | Access::READ_OK).map_err(|errno| refuse(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_port_names_the_key() {
        let first = bind_tcp("127.0.0.1:0", "master.listen").await.unwrap();
        let address = first.local_addr().unwrap().to_string();
        let error = bind_tcp(&address, "master.listen").await.unwrap_err();
        assert!(matches!(error, ProcessError::AddressInUse { .. }));
        let text = error.to_string();
        assert!(text.contains(&address) && text.contains("master.listen"), "{text}");
    }

    #[tokio::test]
    async fn an_address_of_nobody_names_the_key() {
        // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
        for listen in ["192.0.2.1:0", "127.0.0.1", "127.0.0.1:99999", ""] {
            let text = bind_tcp(listen, "worker.listen").await.unwrap_err().to_string();
            assert!(text.contains("cannot listen on") && text.contains("worker.listen"), "{text}");
        }
    }

    #[test]
    fn directories_are_created_or_refused_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = dir.path().join("a/b/c");
        ensure_dir(&fresh, "master.data_dir").unwrap();
        assert!(fresh.is_dir());
        ensure_dir(&fresh, "master.data_dir").unwrap();

        let file = dir.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let text = ensure_dir(&path, "worker.dirs").unwrap_err().to_string();
            assert!(text.contains(&path.display().to_string()) && text.contains("worker.dirs"), "{text}");
        }
        // A file system that nobody can write to, not even root.
        assert!(ensure_dir(Path::new("/proc/1"), "worker.dirs").is_err());
    }
}
