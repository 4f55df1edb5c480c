//! A disk that can lose its power: an ext4 file system of its own, in a file of this machine's.
//!
//! The loss is the file system's own (`EXT4_IOC_SHUTDOWN`, without flushing its journal): from that moment on nothing
//! reaches the disk, every call of a program that wants to write or sync fails, and what was not on the disk is gone
//! when it is mounted again. That is what a host loses when its power fails.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::ioctl::{Setter, ioctl, opcode};

use crate::wait::eventually;

/// Names of their directories begin with it, and with the number of the test's process.
const PREFIX: &str = "cavern-disk-";
/// The file has holes: only what is written takes room.
const BYTES: u64 = 2 << 30;
/// For processes to end, and the kernel to let go of the device.
const PATIENCE: Duration = Duration::from_secs(20);
/// `EXT4_IOC_SHUTDOWN`, and its way of not even writing the journal.
const SHUTDOWN: rustix::ioctl::Opcode = opcode::read::<u32>(b'X', 125);
const WITHOUT_THE_JOURNAL: u32 = 2;

/// A mounted disk. It goes when it is dropped, which must be after everything that uses it is gone.
pub struct Disk {
    directory: PathBuf,
}

impl Disk {
    /// A new, empty one. Needs root.
    #[track_caller]
    pub fn make() -> Self {
        remove_leftovers();
        let prefix = format!("{PREFIX}{}-", std::process::id());
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir().unwrap().keep();
        let disk = Self { directory };
        let image = disk.image();
        File::create(&image).and_then(|file| file.set_len(BYTES)).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "nodiscard"]).arg(&image));
        fs::create_dir(disk.path()).unwrap();
        disk.mount();
        disk
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.directory.join("disk")
    }

    /// The power fails. `end_all` ends all who use the disk; it is mounted again when this returns.
    #[track_caller]
    pub fn lose_power(&self, end_all: impl FnOnce()) {
        let root = File::open(self.path()).unwrap();
        // SAFETY: the request reads one `u32`, which lives as long as the call.
        #[expect(unsafe_code, reason = "there is no other way to ask for it")]
        let lost = unsafe { ioctl(&root, Setter::<SHUTDOWN, u32>::new(WITHOUT_THE_JOURNAL)) };
        lost.unwrap();
        drop(root);
        end_all();
        let device = device_of(&self.path()).expect("it is mounted");
        eventually("nobody uses the disk any more", PATIENCE, || {
            Command::new("umount").arg(self.path()).output().unwrap().status.success().then_some(())
        });
        // What is mounted anywhere else would come back as it was: without power.
        eventually("the device is free", PATIENCE, || (!is_in_use(&device)).then_some(()));
        self.mount();
    }

    fn image(&self) -> PathBuf {
        self.directory.join("image")
    }

    #[track_caller]
    fn mount(&self) {
        // The kernel frees the loop device with the mount.
        run(Command::new("mount").args(["-t", "ext4", "-o", "loop"]).arg(self.image()).arg(self.path()));
        run(Command::new("mount").arg("--make-private").arg(self.path()));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        remove(&self.directory);
    }
}

/// The loop device that is mounted at a path.
fn device_of(path: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let line = table.lines().find(|line| line.split(' ').nth(4).is_some_and(|point| Path::new(point) == path))?;
    Some(line.split_once(" - ")?.1.split(' ').nth(1)?.trim_start_matches("/dev/").to_owned())
}

fn is_in_use(device: &str) -> bool {
    Path::new(&format!("/sys/block/{device}/loop/backing_file")).exists()
}

/// Those of tests that were killed.
fn remove_leftovers() {
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
            remove(&entry.path());
        }
    }
}

/// Also of one that is still used: it goes with its last user then.
fn remove(directory: &Path) {
    let disk = directory.join("disk");
    if device_of(&disk).is_some() {
        let gone = Command::new("umount").arg(&disk).output().is_ok_and(|output| output.status.success());
        if !gone {
            let _later = Command::new("umount").arg("--lazy").arg(&disk).output();
        }
    }
    let _ = fs::remove_dir_all(directory);
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
