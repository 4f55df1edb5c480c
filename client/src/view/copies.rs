//! Copies of views on this host: image, pages and index as they are in the object, and beside them what was recorded of
//! the view.
//!
//! They are in a directory of this user alone, below `client.staging_directory`, by cluster. That must not be one where
//! everybody can put another directory in the place of it. A copy gets its name when it is on disk and has been
//! compared with its hash, and is believed from then on. Whoever shows a view holds a shared lock (flock) of its file:
//! a copy goes when its view is gone and nobody has one.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cavern_conf::host;
use cavern_proto::master::View;
use prost::Message as _;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

/// Of a record.
const RECORD_BYTES_MAX: u64 = 64 << 10;
const RECORD: &str = "record";
const DRAFT: &str = "tmp-";
/// Of the mode of a directory.
const EVERYBODY_WRITES: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Bytes of a view that are kept on a host, the first ones of its object.
pub(super) fn copied_bytes(view: &View) -> u64 {
    view.image_bytes.saturating_add(view.pages_bytes).saturating_add(view.index_bytes)
}

/// Those of one cluster. All calls may wait for a disk.
pub(super) struct Copies {
    user: PathBuf,
    cluster: PathBuf,
}

/// A file that gets its name when it is whole, and goes otherwise.
pub(super) struct CopyDraft {
    file: File,
    path: PathBuf,
}

impl CopyDraft {
    /// Another handle on the file, to write it.
    pub(super) fn opened(self) -> io::Result<(File, Self)> {
        Ok((self.file.try_clone()?, self))
    }
}

impl Drop for CopyDraft {
    fn drop(&mut self) {
        // One that has its name by now is not found.
        let _ = fs::remove_file(&self.path);
    }
}

impl Copies {
    /// Makes nothing.
    pub(super) fn new(staging: &Path, cluster_id: &str) -> io::Result<Self> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if cluster_id.is_empty() || !cluster_id.bytes().all(is_name) {
            return Err(io::Error::other("no master has said yet which cluster this is"));
        }
        // Where that is not so, each may rename what is another's.
        if fs::metadata(staging).is_ok_and(|status| status.mode() & (EVERYBODY_WRITES | STICKY) == EVERYBODY_WRITES) {
            let text = format!("anybody may rename what is in {}: chmod +t it", staging.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let user = staging.join(format!("cavern-views-{}", geteuid().as_raw()));
        let cluster = user.join(cluster_id);
        Ok(Self { user, cluster })
    }

    /// Where the copy of a view is, if there is one.
    pub(super) fn path(&self, id: u32) -> PathBuf {
        self.cluster.join(id.to_string())
    }

    fn record_path(&self, id: u32) -> PathBuf {
        self.cluster.join(format!("{id}.{RECORD}"))
    }

    /// The copy of a view, locked for as long as the file is open.
    pub(super) fn load(&self, id: u32) -> io::Result<Option<(View, File)>> {
        if !self.exist()? {
            return Ok(None);
        }
        let (Some(view), Some(file)) = (self.record(id)?, open_file(&self.path(id))?) else { return Ok(None) };
        let is_held = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        let status = file.metadata()?;
        // One that is about to go is none.
        let is_whole = status.nlink() > 0 && status.len() == copied_bytes(&view);
        Ok((is_held && is_whole).then_some((view, file)))
    }

    fn record(&self, id: u32) -> io::Result<Option<View>> {
        let Some(file) = open_file(&self.record_path(id))? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(RECORD_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(View::decode(&bytes[..]).ok().filter(|view| view.id == id))
    }

    /// What was recorded of all views that there are copies of.
    pub(super) fn all(&self) -> io::Result<Vec<View>> {
        let copies = self.names()?.into_iter().filter(|(_, rest)| rest.is_empty());
        copies.filter_map(|(id, _)| self.record(id).transpose()).collect()
    }

    /// The files that there are: which view each is of, and what comes behind that in its name.
    fn names(&self) -> io::Result<Vec<(u32, String)>> {
        let mut names = Vec::new();
        if self.exist()? {
            for entry in fs::read_dir(&self.cluster)? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                let (id, rest) = name.split_once('.').unwrap_or((&name, ""));
                names.extend(id.parse().map(|id| (id, rest.to_owned())));
            }
        }
        Ok(names)
    }

    /// Whether there may be any.
    fn exist(&self) -> io::Result<bool> {
        Ok(is_own(&self.user)? && is_own(&self.cluster)?)
    }

    /// An empty file for a copy of a view.
    pub(super) fn begin(&self, id: u32) -> io::Result<CopyDraft> {
        for directory in [&self.user, &self.cluster] {
            if !is_own(directory)? {
                DirBuilder::new().mode(0o700).create(directory).or_else(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => is_own(directory).map(drop),
                    _ => Err(error),
                })?;
            }
        }
        let path = self.cluster.join(format!("{id}.{DRAFT}{}", host::unique_name()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockShared)?;
        Ok(CopyDraft { file, path })
    }

    /// Makes a draft that is complete the copy of a view.
    pub(super) fn keep(&self, draft: &CopyDraft, view: &View) -> io::Result<File> {
        let mut record = self.begin(view.id)?;
        record.file.write_all(&view.encode_to_vec())?;
        for (draft, path) in [(draft, self.path(view.id)), (&record, self.record_path(view.id))] {
            draft.file.sync_all()?;
            fs::rename(&draft.path, path)?;
        }
        File::open(&self.cluster)?.sync_all()?;
        draft.file.try_clone()
    }

    /// Removes the copies of all other views, and what was not completed, as far as no process has it open.
    pub(super) fn sweep(&self, views: &HashSet<u32>) -> io::Result<()> {
        for (id, rest) in self.names()? {
            let is_left = rest.starts_with(DRAFT) || !views.contains(&id);
            // A record goes with its copy.
            if !is_left || rest == RECORD && self.path(id).exists() {
                continue;
            }
            let path = if rest.is_empty() { self.path(id) } else { self.cluster.join(format!("{id}.{rest}")) };
            let Some(file) = open_file(&path)? else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                fs::remove_file(&path)?;
                if rest.is_empty() {
                    // Where there is none, the copy was none.
                    let _ = fs::remove_file(self.record_path(id));
                }
            }
        }
        Ok(())
    }
}

/// Whether a directory is there. An error where others have anything to do with it: what is in one that they have not
/// is this user's.
fn is_own(directory: &Path) -> io::Result<bool> {
    let status = match fs::symlink_metadata(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        status => status?,
    };
    if status.is_dir() && status.uid() == geteuid().as_raw() && status.mode() & 0o077 == 0 {
        return Ok(true);
    }
    let text = format!("{} is no directory of this user alone: remove it", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

fn open_file(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn view(id: u32) -> View {
        View { id, image_bytes: 5, pages_bytes: 3, index_bytes: 2, hash: vec![7; 32].into(), ..View::default() }
    }

    /// Makes a copy as another process would.
    fn made(copies: &Copies, id: u32) -> File {
        let mut draft = copies.begin(id).unwrap();
        draft.file.write_all(b"0123456789").unwrap();
        copies.keep(&draft, &view(id)).unwrap()
    }

    fn files(copies: &Copies) -> Vec<String> {
        let entries = fs::read_dir(&copies.cluster).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_copy_is_there_when_it_is_whole() {
        let staging = tempfile::tempdir().unwrap();
        assert!(Copies::new(staging.path(), "").is_err() && Copies::new(staging.path(), "../x").is_err());
        let copies = Copies::new(staging.path(), "abc-1").unwrap();
        assert!(copies.load(1).unwrap().is_none() && copies.all().unwrap().is_empty());
        copies.sweep(&HashSet::new()).unwrap();
        assert_eq!(fs::read_dir(staging.path()).unwrap().count(), 0, "nothing is made by looking");
        drop(copies.begin(1).unwrap());
        assert!(files(&copies).is_empty() && copies.load(1).unwrap().is_none());
        drop(made(&copies, 1));
        let (found, mut file) = copies.load(1).unwrap().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!((found, bytes.as_slice()), (view(1), b"0123456789".as_slice()));
        assert_eq!(
            (copies.all().unwrap(), files(&copies)),
            (vec![view(1)], vec!["1".to_owned(), "1.record".to_owned()])
        );
        assert_eq!(fs::metadata(copies.path(1)).unwrap().permissions().mode() & 0o777, 0o600);

        // Cut off, of another view, or without a record: it is none.
        File::options().write(true).open(copies.path(1)).unwrap().set_len(9).unwrap();
        assert!(copies.load(1).unwrap().is_none());
        fs::rename(copies.path(1), copies.path(2)).unwrap();
        fs::rename(copies.record_path(1), copies.record_path(2)).unwrap();
        assert!(copies.load(2).unwrap().is_none());
        fs::remove_file(copies.record_path(2)).unwrap();
        assert!(copies.load(2).unwrap().is_none());
    }

    #[test]
    fn what_may_be_anybodys_is_refused() {
        let staging = tempfile::tempdir().unwrap();
        let copies = Copies::new(staging.path(), "c").unwrap();
        drop(made(&copies, 1));
        fs::set_permissions(&copies.user, fs::Permissions::from_mode(0o755)).unwrap();
        let error = copies.load(1).unwrap_err().to_string();
        assert!(error.contains("cavern-views-") && error.contains("remove it"), "{error}");
        fs::set_permissions(&copies.user, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(copies.load(1).unwrap().is_some());
        let elsewhere = staging.path().join("elsewhere");
        fs::rename(&copies.user, &elsewhere).unwrap();
        symlink(&elsewhere, &copies.user).unwrap();
        assert!(copies.load(1).is_err() && copies.begin(1).is_err() && copies.sweep(&HashSet::new()).is_err());
        fs::remove_file(&copies.user).unwrap();
        fs::write(&copies.user, "a file").unwrap();
        assert!(copies.load(1).is_err());
        fs::remove_file(&copies.user).unwrap();
        fs::rename(&elsewhere, &copies.user).unwrap();
        assert!(copies.load(1).unwrap().is_some());

        for (mode, is_fit) in [(0o777, false), (0o1777, true), (0o775, true)] {
            fs::set_permissions(staging.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Copies::new(staging.path(), "c").is_ok(), is_fit, "{mode:o}");
        }
    }

    #[test]
    fn what_another_process_shows_is_not_swept_away() {
        let staging = tempfile::tempdir().unwrap();
        let copies = Copies::new(staging.path(), "c").unwrap();
        let shown = [made(&copies, 1), made(&copies, 2), made(&copies, 3)];
        let [first, second, third] = shown;
        let other = Copies::new(staging.path(), "c").unwrap();
        drop((first, third));
        let draft = copies.begin(4).unwrap();
        fs::write(copies.cluster.join("5.tmp-1-1"), "left behind").unwrap();
        fs::write(copies.cluster.join("notes"), "of a person").unwrap();
        fs::write(copies.record_path(6), "without a copy").unwrap();
        other.sweep(&HashSet::from([3])).unwrap();
        let drafts = files(&copies).into_iter().filter(|name| name.contains(DRAFT)).count();
        assert_eq!(drafts, 1, "that which is being written");
        let rest: Vec<_> = files(&copies).into_iter().filter(|name| !name.contains(DRAFT)).collect();
        assert_eq!(rest, ["2", "2.record", "3", "3.record", "notes"]);
        drop((second, draft));
        other.sweep(&HashSet::from([3])).unwrap();
        assert_eq!(files(&copies), ["3", "3.record", "notes"]);
    }
}
