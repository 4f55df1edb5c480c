//! The disks below the directories of a host's processes.

mod measured;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use cavern_conf::Tier;
use rustix::fs::{Access, major, minor};

use self::measured::Measured;
use super::finding::{Check, Finding, Level};
use super::host::can_be_made;
use super::place::{Holds, Place};
use crate::console;
use crate::local::mounted::idle_automount;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// No disk has anything on it sooner: the sync was answered out of memory.
const SYNC_SUSPICIOUS: Duration = Duration::from_micros(10);
/// Each change of the namespace waits for a sync of the master.
const SYNC_SLOW: Duration = Duration::from_millis(20);
/// Below this an SSD is none, or is busy with something else.
const SSD_BYTES_PER_SECOND: u64 = 100 * MIB;
/// With less a directory is not written to for a measurement.
const MEASURED_FREE_MIN: u64 = 128 * MIB;

/// A place and what was seen there.
#[derive(Debug)]
pub struct Looked {
    place: Place,
    /// `None` where it is yet to be made, and can be; or why it cannot be used.
    seen: io::Result<Option<Disk>>,
}

/// The file system of a directory.
#[derive(Debug)]
struct Disk {
    /// Its number, and the disk that it is on, which several may have.
    number: u64,
    device: String,
    kind: Kind,
    total: u64,
    free: u64,
    /// Files that there may be, and that may still be made; none where there is no such limit.
    files: Option<(u64, u64)>,
    /// `None` where there is no room for that.
    measured: Option<io::Result<Measured>>,
}

/// What a file system is, as far as that matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Disk,
    Memory,
    /// Of other hosts, or of a process: its name.
    Network(&'static str),
    /// The writable layer of a container.
    Overlay,
}

/// By the numbers of statfs(2).
fn kind(magic: u32) -> Kind {
    match magic {
        0x0102_1994 | 0x8584_58f6 => Kind::Memory,
        0x6969 => Kind::Network("NFS"),
        0xfe53_4d42 | 0xff53_4d42 => Kind::Network("SMB"),
        0x6573_5546 => Kind::Network("FUSE"),
        0x0102_1997 => Kind::Network("9P"),
        0x00c3_6400 => Kind::Network("Ceph"),
        0x0bd0_0bd0 => Kind::Network("Lustre"),
        0x794c_7630 => Kind::Overlay,
        _ => Kind::Disk,
    }
}

/// What is said of a place whose disk an automounter has not mounted yet: no look has it mounted. *Blocking*.
pub fn idle(place: &Place) -> Option<Finding> {
    let (what, automount) = (place.name(), idle_automount(&place.path)?);
    let automount = automount.display();
    Some(Finding::note(
        Check::Directory,
        format!("{what} was not looked at: the automount at {automount} is idle, and is mounted on first use"),
        "nothing is known of the disk there",
        format!("`ls {automount}/` has it mounted: ask again then"),
    ))
}

impl Looked {
    /// Looks at a directory, and writes some MiB to it for a moment. Waits for a disk that hangs. *Blocking*.
    pub fn at(place: Place) -> Self {
        let seen = match Disk::at(&place.path) {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound && place.is_made && can_be_made(&place.path) => {
                Ok(None)
            }
            seen => seen.map(Some),
        };
        Self { place, seen }
    }

    /// What is wrong with it by itself.
    pub fn judge(&self) -> Vec<Finding> {
        let Self { place, seen } = self;
        let (what, role) = (place.name(), place.role.name());
        let why = format!("`cv {role}` does not start, or what is written there fails");
        let disk = match seen {
            Ok(Some(disk)) => disk,
            Ok(None) => return vec![Finding::ok(Check::Directory, format!("{what} is made by `cv {role}`"))],
            Err(cause) => {
                let todo = format!(
                    "make it, or mount its disk, for the user of `cv {role}`, and run this as that user; where no such \
                     process is to run here, name the others with `--role`"
                );
                return vec![Finding::error(Check::Directory, format!("{what} cannot be used: {cause}"), why, todo)];
            }
        };
        let (free, total) = (console::size(disk.free), console::size(disk.total));
        let mut found =
            vec![Finding::ok(Check::Directory, format!("{what} can be written to, {free} of {total} free"))];
        found.extend(disk.judge_kind(place));
        found.extend(disk.judge_space(place));
        match &disk.measured {
            Some(Ok(measured)) => found.extend(disk.judge_measured(place, measured)),
            Some(Err(cause)) => found.push(Finding::error(
                Check::Directory,
                format!("a file in {what} cannot be written and synced: {cause}"),
                why,
                "look at the disk with `dmesg` and smartctl, and at quotas",
            )),
            None => {}
        }
        found
    }
}

/// The disk that a partition is on; of any other device its number.
fn disk_of(major: u32, minor: u32) -> String {
    let number = format!("{major}:{minor}");
    let Ok(device) = fs::canonicalize(format!("/sys/dev/block/{number}")) else { return number };
    let disk = if device.join("partition").exists() { device.parent() } else { Some(device.as_path()) };
    disk.and_then(Path::file_name).map_or(number, |name| name.to_string_lossy().into_owned())
}

impl Disk {
    fn at(path: &Path) -> io::Result<Self> {
        let _is_directory = fs::read_dir(path)?;
        rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK)?;
        let (space, number) = (rustix::fs::statvfs(path)?, fs::metadata(path)?.dev());
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        Ok(Self {
            number,
            device: disk_of(major(number), minor(number)),
            kind: kind(rustix::fs::statfs(path)?.f_type as u32),
            total: space.f_blocks.saturating_mul(space.f_frsize),
            free,
            files: (space.f_files > 0).then_some((space.f_files, space.f_favail)),
            measured: (free >= MEASURED_FREE_MIN).then(|| Measured::of(path)),
        })
    }

    fn judge_kind(&self, place: &Place) -> Option<Finding> {
        let (what, check) = (place.name(), Check::FileSystem);
        let level = if place.holds == Holds::Namespace { Level::Error } else { Level::Warning };
        let is_memory_tier = place.holds == Holds::Blocks(Tier::Mem);
        let (what, why, todo) = match self.kind {
            Kind::Disk if is_memory_tier => {
                let todo = "choose a tmpfs, as /dev/shm, or name the tier of the disk: [SSD] or [HDD]";
                let what = format!("{what} has the tier MEM, and is on a disk");
                return Some(Finding::note(check, what, "blocks are placed as if it were memory", todo));
            }
            Kind::Disk => return None,
            Kind::Memory if is_memory_tier => return None,
            Kind::Overlay | Kind::Memory | Kind::Network("FUSE") if place.holds == Holds::Staged => {
                let what = format!("{what} is on overlayfs or FUSE, or in memory");
                let why = "the kernel mounts no views from there";
                let todo = "choose a directory on a local disk, if views are to be mounted with `cv view mount`";
                return Some(Finding::note(Check::Erofs, what, why, todo));
            }
            _ if place.holds == Holds::Staged => return None,
            Kind::Network(kind) => (
                format!("{what} is on {kind}"),
                "it is slower than the bucket may be, and its locks and syncs are not those of a local disk",
                "choose a directory on a local disk",
            ),
            Kind::Memory => (
                format!("{what} is in memory"),
                "a restart of the host loses what is there: the namespace, or blocks that no bucket has yet",
                "choose a directory on a local disk; a worker's in memory is spelled [MEM:SIZE]",
            ),
            Kind::Overlay => (
                format!("{what} is in the writable layer of a container"),
                "it is gone with the container, and slower than a volume",
                "mount a volume there",
            ),
        };
        Some(Finding::new(level, check, what, why, todo))
    }

    fn judge_space(&self, place: &Place) -> Vec<Finding> {
        let (mut found, what, free) = (Vec::new(), place.name(), console::size(self.free));
        if self.free < place.wanted_free {
            let wanted = console::size(place.wanted_free);
            let (level, why) = match place.holds {
                Holds::Namespace if self.free < GIB / 4 => (Level::Error, "a master that cannot write its log ends"),
                Holds::Namespace => (Level::Warning, "the log, and the snapshots that cut it, need as much"),
                _ if self.free < GIB => (Level::Warning, "writers wait, or get ENOSPC, when it is full"),
                _ => (Level::Note, "writers wait for each other where more than that is on its way (staging_size)"),
            };
            let what = format!("{what} has {free} free, and {wanted} are wanted");
            found.push(Finding::new(level, Check::DiskSpace, what, why, "free some, or choose another disk"));
        }
        if let Some((all, left)) = self.files.filter(|(all, left)| *left < all / 100) {
            let what = format!("the file system of {what} has room for {left} of {all} files yet");
            let why = "each cached block is a file: none can be made when it has no more, whatever space is free";
            let todo = "remove files, or make the file system anew with more inodes (mkfs.ext4 -i), or XFS";
            found.push(Finding::warning(Check::DiskSpace, what, why, todo));
        }
        found
    }

    fn judge_measured(&self, place: &Place, measured: &Measured) -> Vec<Finding> {
        let (what, is_disk) = (place.name(), self.kind != Kind::Memory);
        let Measured { sync, bytes_per_second, punches_holes } = *measured;
        let mut found = Vec::new();
        let micros = sync.as_micros();
        if is_disk && sync < SYNC_SUSPICIOUS {
            found.push(Finding::warning(
                Check::DiskSync,
                format!("a sync in {what} takes {micros} µs"),
                "no disk is so fast: what is said to be on disk may be lost with the power or the virtual machine",
                "look for mounts with `volatile` or `nobarrier`, eatmydata, and virtual disks with cache=unsafe",
            ));
        } else if sync > SYNC_SLOW && place.holds == Holds::Namespace {
            found.push(Finding::warning(
                Check::DiskSync,
                format!("a sync in {what} takes {} ms", micros / 1000),
                "each change of the namespace waits for one",
                "give the master an NVMe of its own, best one whose cache survives a loss of power",
            ));
        } else {
            found.push(Finding::ok(Check::DiskSync, format!("a sync in {what} takes {micros} µs")));
        }
        let speed = format!("{what} takes {} in a second", console::size(bytes_per_second));
        found.push(match place.holds {
            Holds::Blocks(Tier::Ssd) if bytes_per_second < SSD_BYTES_PER_SECOND => {
                let todo = "see what else writes there (iostat -x), or name the tier HDD";
                Finding::note(Check::DiskSpeed, speed, "that is less than an SSD should take", todo)
            }
            _ => Finding::ok(Check::DiskSpeed, speed),
        });
        if !punches_holes && place.holds != Holds::Namespace {
            let why = "what is freed within a file is overwritten with zeros, and keeps its space";
            let todo = "choose ext4, XFS, Btrfs or tmpfs";
            found.push(Finding::note(Check::HolePunching, format!("{what} can punch no holes"), why, todo));
        }
        found
    }
}

/// What is wrong with directories that are on one disk.
pub fn judge_together(looked: &[Looked]) -> Vec<Finding> {
    let mut file_systems: BTreeMap<u64, (u64, Vec<&Place>)> = BTreeMap::new();
    let mut disks: BTreeMap<&str, Vec<&Place>> = BTreeMap::new();
    for Looked { place, seen } in looked {
        if let (Ok(Some(disk)), Holds::Blocks(_) | Holds::Namespace) = (seen, place.holds) {
            file_systems.entry(disk.number).or_insert((disk.total, Vec::new())).1.push(place);
            disks.entry(&disk.device).or_default().push(place);
        }
    }
    let sizes = file_systems.into_values().filter_map(|(total, places)| judge_size(total, &places));
    sizes.chain(disks.into_iter().flat_map(|(device, places)| judge_shared(device, &places))).collect()
}

fn names(places: &[&Place]) -> String {
    places.iter().map(|place| place.name()).collect::<Vec<_>>().join(" and ")
}

/// Of the directories of a file system that has so many bytes.
fn judge_size(total: u64, places: &[&Place]) -> Option<Finding> {
    let bounded: Vec<&Place> = places.iter().filter(|place| place.capacity.is_some()).copied().collect();
    let capacity = bounded.iter().filter_map(|place| place.capacity).fold(0, u64::saturating_add);
    let (together, all) = (console::size(capacity), console::size(total));
    (capacity > total).then(|| {
        Finding::error(
            Check::DiskSize,
            format!("{} may take {together}, and the file system has {all}", names(&bounded)),
            "the worker lowers its capacity when the disk is full, and evicts what it has just cached",
            "write a smaller capacity in worker.dirs, or none: [SSD]/path takes what the file system has",
        )
    })
}

/// Of the directories of a disk.
fn judge_shared(device: &str, places: &[&Place]) -> Vec<Finding> {
    let is_of_blocks = |place: &&&Place| matches!(place.holds, Holds::Blocks(_));
    let blocks: Vec<&Place> = places.iter().filter(is_of_blocks).copied().collect();
    let mut found = Vec::new();
    if blocks.len() > 1 {
        found.push(Finding::warning(
            Check::DiskShared,
            format!("{} are on one disk, {device}", names(&blocks)),
            "they share its speed, all are lost with it, and without capacities each counts all space as its own",
            "name one directory for each disk, or give each a capacity: [SSD:500GB]/path",
        ));
    }
    if (1..places.len()).contains(&blocks.len()) {
        found.push(Finding::note(
            Check::DiskShared,
            format!("{} are on one disk, {device}", names(places)),
            "syncs of the master wait behind the worker's writes",
            "give the master a disk of its own where changes of the namespace must be fast",
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use cavern_conf::{Effective, Role};

    use super::super::finding::wrong;
    use super::super::process::Process;
    use super::*;

    fn place(role: Role) -> Place {
        let process = Process { role, effective: Effective::defaults() };
        Place { path: "/data".into(), ..Place::of(&process).remove(0) }
    }

    fn disk() -> Disk {
        let measured = Measured { sync: Duration::from_micros(80), bytes_per_second: GIB, punches_holes: true };
        Disk {
            number: 1,
            device: "nvme0n1".to_owned(),
            kind: Kind::Disk,
            total: 100 * GIB,
            free: 50 * GIB,
            files: Some((1000, 500)),
            measured: Some(Ok(measured)),
        }
    }

    fn told(place: Place, disk: Disk) -> Vec<(Level, Check)> {
        wrong(&Looked { place, seen: Ok(Some(disk)) }.judge())
    }

    fn measured(change: impl FnOnce(&mut Measured)) -> Disk {
        let mut disk = disk();
        change(disk.measured.as_mut().unwrap().as_mut().unwrap());
        disk
    }

    #[test]
    fn a_good_disk_is_good_for_all() {
        for role in Role::ALL {
            assert_eq!(told(place(role), disk()), [], "{role:?}");
        }
    }

    #[test]
    fn directories_that_no_process_can_use_are_named() {
        for role in Role::ALL {
            let refused = Looked { place: place(role), seen: Err(io::ErrorKind::PermissionDenied.into()) };
            assert_eq!(wrong(&refused.judge()), [(Level::Error, Check::Directory)]);
            assert_eq!(wrong(&Looked { seen: Ok(None), ..refused }.judge()), []);
        }
        let failing = Disk { measured: Some(Err(io::ErrorKind::StorageFull.into())), ..disk() };
        assert_eq!(told(place(Role::Worker), failing), [(Level::Error, Check::Directory)]);
    }

    #[test]
    fn file_systems_that_do_not_keep_what_they_have_are_named() {
        let on = |role, magic| told(place(role), Disk { kind: kind(magic), ..disk() });
        for magic in [0x6969, 0x6573_5546, 0x0102_1994, 0x794c_7630] {
            assert_eq!(on(Role::Master, magic), [(Level::Error, Check::FileSystem)], "{magic:x}");
            assert_eq!(on(Role::Worker, magic), [(Level::Warning, Check::FileSystem)], "{magic:x}");
        }
        // ext4, XFS, Btrfs.
        for magic in [0xef53, 0x5846_5342, 0x9123_683e] {
            assert_eq!(on(Role::Master, magic), [], "{magic:x}");
        }
        // No file system of images is mounted from there.
        assert_eq!(on(Role::Fuse, 0x0102_1994), [(Level::Note, Check::Erofs)]);
        let memory = Place { holds: Holds::Blocks(Tier::Mem), ..place(Role::Worker) };
        assert_eq!(told(memory.clone(), Disk { kind: Kind::Memory, ..disk() }), []);
        assert_eq!(told(memory, disk()), [(Level::Note, Check::FileSystem)]);
    }

    #[test]
    fn disks_that_are_full_are_named() {
        let free = |role, free| told(place(role), Disk { free, ..disk() });
        assert_eq!(free(Role::Master, GIB), [(Level::Warning, Check::DiskSpace)]);
        assert_eq!(free(Role::Master, MIB), [(Level::Error, Check::DiskSpace)]);
        assert_eq!(free(Role::Fuse, 2 * GIB), [(Level::Note, Check::DiskSpace)]);
        assert_eq!(free(Role::Fuse, MIB), [(Level::Warning, Check::DiskSpace)]);
        assert_eq!(free(Role::Worker, MIB), [], "a cache fills its disk");
        let files = Disk { files: Some((1000, 9)), ..disk() };
        assert_eq!(told(place(Role::Worker), files), [(Level::Warning, Check::DiskSpace)]);
        assert_eq!(told(place(Role::Worker), Disk { files: None, ..disk() }), []);
    }

    #[test]
    fn a_sync_that_is_too_fast_or_too_slow_is_named() {
        let sync = |role, sync| told(place(role), measured(|measured| measured.sync = sync));
        for role in Role::ALL {
            assert_eq!(sync(role, Duration::from_micros(2)), [(Level::Warning, Check::DiskSync)], "{role:?}");
        }
        assert_eq!(sync(Role::Master, Duration::from_millis(50)), [(Level::Warning, Check::DiskSync)]);
        assert_eq!(sync(Role::Worker, Duration::from_millis(50)), []);
        let slow = measured(|measured| measured.bytes_per_second = MIB);
        assert_eq!(told(place(Role::Worker), slow), [(Level::Note, Check::DiskSpeed)]);
        let without = measured(|measured| measured.punches_holes = false);
        assert_eq!(told(place(Role::Worker), without), [(Level::Note, Check::HolePunching)]);
    }

    #[test]
    fn directories_on_one_disk_and_more_than_it_has_are_named() {
        let on = |place: Place, number, device: &str| Looked {
            place,
            seen: Ok(Some(Disk { number, device: device.to_owned(), ..disk() })),
        };
        let blocks = |capacity, number, device| on(Place { capacity, ..place(Role::Worker) }, number, device);
        let namespace = |number, device| on(place(Role::Master), number, device);
        let told = |looked: &[Looked]| wrong(&judge_together(looked));
        assert_eq!(told(&[blocks(None, 1, "a"), blocks(Some(60 * GIB), 2, "b"), namespace(3, "c")]), []);
        assert_eq!(told(&[blocks(None, 1, "a"), blocks(None, 1, "a")]), [(Level::Warning, Check::DiskShared)]);
        assert_eq!(told(&[blocks(Some(101 * GIB), 1, "a")]), [(Level::Error, Check::DiskSize)]);
        let both = [(Level::Error, Check::DiskSize), (Level::Warning, Check::DiskShared)];
        let half = Some(60 * GIB);
        assert_eq!(told(&[blocks(half, 1, "a"), blocks(half, 1, "a")]), both);
        // Two partitions have their space each.
        assert_eq!(told(&[blocks(half, 1, "a"), blocks(half, 2, "a")]), both[1..]);
        assert_eq!(told(&[blocks(None, 1, "a"), namespace(2, "a")]), [(Level::Note, Check::DiskShared)]);
    }

    #[test]
    fn a_directory_is_looked_at_and_left_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        // Of a command that was killed.
        let left = fs::File::create(directory.path().join(".cavern-doctor-left")).unwrap();
        left.set_modified(std::time::UNIX_EPOCH).unwrap();
        let disk = Disk::at(directory.path()).unwrap();
        assert!(disk.total > 0 && !disk.device.is_empty(), "{disk:?}");
        assert!(disk.measured.is_none_or(|measured| measured.unwrap().bytes_per_second > 0));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        // What is missing is made by some.
        let missing = Place { path: directory.path().join("a/b"), ..place(Role::Worker) };
        assert!(Looked::at(Place { is_made: true, ..missing.clone() }).seen.unwrap().is_none());
        assert_eq!(Looked::at(missing).seen.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
