//! Half a million names: what an image of them takes, of memory while it is written and of bytes then. In a process of
//! its own, whose memory nobody else has grown.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};

use cavern_erofs::{
    Attributes, Content, Device, EachEntry, Error, Extent, Image, Node, Options, Place, Times, Timestamp, Tree,
    write_image,
};

const DIRECTORIES: u64 = 500;
const FILES: u64 = 1000;

/// Directories of files by rule, in the order of their names; ids of files follow those of directories.
struct ByRule;

fn attributes(permissions: u16, number: u64) -> Attributes {
    let mtime = Timestamp { seconds: 1_700_000_000 + number.cast_signed(), nanoseconds: 1 };
    Attributes { permissions, uid: 1000, gid: 1000, links: 1, mtime }
}

impl Tree for ByRule {
    type Error = Error;

    fn entries(&mut self, directory: u64, each: EachEntry<'_>) -> Result<(), Error> {
        let count = if directory == 0 { DIRECTORIES } else { FILES };
        for number in 0..count {
            let extents = [Extent { length: 50_000, place: Place::Device { device: 1, offset: number << 16 } }];
            let is_directory = directory == 0;
            let node = Node {
                id: if is_directory { number + 1 } else { directory * FILES + number },
                attributes: attributes(if is_directory { 0o755 } else { 0o644 }, number),
                xattrs: &[],
                content: if is_directory { Content::Directory } else { Content::File(&extents) },
            };
            each(format!("a name of thirty bytes {number:07}").as_bytes(), &node)?;
        }
        Ok(())
    }
}

/// Of `/proc/self/status`, in bytes.
fn status(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn half_a_million_names_take_little() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let image = File::create(&path).unwrap();
    let devices = [Device { blocks: u32::MAX, tag: [0; 64] }];
    let time = Timestamp { seconds: 1_700_000_000, nanoseconds: 0 };
    let spill = directory.path();
    let options = Options { spill, uuid: [0; 16], label: "", time, times: Times::Own, devices: &devices };
    let root = Node { id: 0, attributes: attributes(0o755, 0), xattrs: &[], content: Content::Directory };
    // 5 sets the highest amount back to the present one, where the kernel can; else the test asks for more.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS:");
    let summary = write_image(&image, &root, &mut ByRule, &options).unwrap();
    let taken = status("VmHWM:").saturating_sub(before);
    assert!(taken < 8 << 20, "{taken} bytes of memory");
    assert_eq!(summary.names, DIRECTORIES * (FILES + 1));
    assert_eq!(summary.content_bytes, DIRECTORIES * FILES * 50_000);
    // With a time each.
    assert!(summary.image_bytes / summary.names < 150, "{} bytes", summary.image_bytes);
    let image = Image::open(File::open(&path).unwrap()).unwrap();
    let below = image.lookup(&image.root().unwrap(), b"a name of thirty bytes 0000123").unwrap().unwrap();
    let file = image.lookup(&below, b"a name of thirty bytes 0000999").unwrap().unwrap();
    assert_eq!(file.attributes, attributes(0o644, 999));
    let place = Place::Device { device: 1, offset: 999 << 16 };
    assert_eq!(image.extents(&file, 0..u64::MAX).unwrap(), [Extent { length: 50_000, place }]);
}
