//! Asks the bucket about one name, and records the answer: a HEAD for the object and a LIST for what is below `name/`,
//! at the same time. Used where a listing of the whole directory would take too long (a name in a huge directory that
//! was never listed), and where somebody wants to know now (`Revalidate`, `consistency = always`).

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::ListingGroup;
use cavern_proto::reserved::VIEW;
use cavern_state::Directory;
use cavern_state::records::is_version;
use cavern_ufs::{Listed, is_name};

use super::adopt::WindowTail;
use super::diff::listed_entry;
use super::{CheckReason, Listings};
use crate::error::WorkError;
use crate::mounts::OpenMount;

impl Listings {
    /// After this the namespace says about `name` in `directory` what the bucket said at some time after the call.
    pub async fn refresh_name(&self, directory: u64, name: &Bytes, why: CheckReason) -> Result<(), WorkError> {
        if !is_name(name) || std::str::from_utf8(name).is_err() {
            return Ok(());
        }
        self.0.metrics.one_name_checks.inc();
        let place = self.0.reader.directory(directory).await?;
        if place.mount_id == 0 {
            return Ok(());
        }
        let mount = self.0.mounts.get(place.mount_id)?;
        if mount.is_fs_mode() {
            if place.record.listed_ns == 0
                && let Some(listed) = self.ask(&mount, &place, name, why).await?
            {
                let names = vec![(name.clone(), listed)];
                self.propose_adoption(&place, &mount, names, String::new(), WindowTail::Unknown).await?;
            }
            return Ok(());
        }
        // What is asked now is newer, whatever clock the listing was dated by.
        self.0.reader.clock().witness(place.record.listed_ns);
        loop {
            let check = self.0.checks.begin(directory, name);
            let asked_ns = self.0.reader.clock().now_ns();
            let listed = self.ask(&mount, &place, name, why).await?;
            let Some(turn) = check.turn().await else {
                // A later answer about the name says nothing of what is below it.
                if why == CheckReason::WrittenBelow {
                    continue;
                }
                return Ok(());
            };
            if self.record(&mount, &place, name, listed, (asked_ns, why)).await? {
                turn.done();
                return Ok(());
            }
        }
    }

    pub(super) async fn ask(
        &self,
        mount: &OpenMount,
        place: &Directory,
        name: &Bytes,
        why: CheckReason,
    ) -> Result<Option<Listed>, WorkError> {
        if place.is_mount_root() && name.starts_with(VIEW.as_bytes()) {
            // No listing has it.
            return Ok(None);
        }
        let prefix = place.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(place.inode))?;
        let key = format!("{prefix}{}", String::from_utf8_lossy(name));
        let (directory, looked_up) = (place.inode, name.clone());
        let known = self.0.reader.read(move |tables| Ok(tables.dentry(directory, &looked_up)?)).await?;
        let head = async { Ok::<_, WorkError>(self.head(mount, &key).await?.as_ref().map(Listed::of)) };
        let below = format!("{key}/");
        let list = Box::pin(async {
            let mut lister = self.list(mount, &below);
            while let Some(page) = self.next_page(mount, &mut lister).await? {
                if !page.objects.is_empty() || !page.prefixes.is_empty() || page.hidden > 0 {
                    return Ok(Some(Listed::Directory));
                }
            }
            Ok::<_, WorkError>(None)
        });
        // What is known decides what is asked first. A directory wins over an object of the same name.
        match known.map(|dentry| dentry.kind()) {
            Some(Kind::Directory) => match list.await? {
                Some(directory) => Ok(Some(directory)),
                None => head.await,
            },
            None if why == CheckReason::Unknown => {
                let (file, directory) = tokio::try_join!(head, list)?;
                Ok(directory.or(file))
            }
            _ => match head.await? {
                Some(file) => Ok(Some(file)),
                None => list.await,
            },
        }
    }

    /// Puts what the bucket said into the namespace; false when it must be asked again, because a listing began
    /// meanwhile.
    async fn record(
        &self,
        mount: &OpenMount,
        place: &Directory,
        name: &Bytes,
        listed: Option<Listed>,
        (asked_ns, why): (i64, CheckReason),
    ) -> Result<bool, WorkError> {
        let _gate = mount.gate.read().await;
        let flight = self.flight(place.inode);
        let _step = match &flight {
            Some(flight) => Some(flight.step.lock().await),
            None => None,
        };
        let index = self.index_run(mount.id());
        let _page = match &index {
            Some(index) => Some(index.step.write().await),
            None => None,
        };
        let (directory, looked_up, wanted) = (place.inode, name.clone(), listed.clone());
        let is_known = self.0.reader.read(move |tables| {
            let Some(dentry) = tables.dentry(directory, &looked_up)? else { return Ok(wanted.is_none()) };
            Ok(match wanted {
                None => false,
                Some(Listed::Directory) => dentry.kind() == Kind::Directory && why != CheckReason::WrittenBelow,
                Some(Listed::File { size, mtime_ns, etag }) => tables.inode(dentry.inode)?.is_some_and(|record| {
                    record.kind() == Kind::File && record.mtime_ns == mtime_ns && is_version(&record, &etag, size)
                }),
            })
        });
        let is_known = is_known.await?;
        // Not before: a listing leaves alone what is noted, and whoever asks may give up as long as this waits.
        if let Some(index) = &index
            && !index.record_check(place.inode, name, asked_ns)?
        {
            return Ok(false);
        }
        if let Some(flight) = &flight
            && !flight.record_check(name, asked_ns)?
        {
            return Ok(false);
        }
        if is_known {
            return Ok(true);
        }
        // A directory that is made anew is one that was never listed.
        let is_removed = listed.is_none() || why == CheckReason::WrittenBelow;
        let remove = if is_removed { vec![name.clone()] } else { Vec::new() };
        let upsert = listed.map(|listed| listed_entry(name.clone(), listed)).into_iter().collect();
        let group = ListingGroup {
            directory: place.path.clone(),
            remove,
            upsert,
            listed_ns: 0,
            expect_inode: place.inode,
            observed_ns: asked_ns,
        };
        self.propose_listing(mount.id(), vec![group]).await?;
        Ok(true)
    }
}
