//! The bytes of a small tree, which the kernel and `fsck.erofs` have read: whoever changes them changes what exists.

use std::collections::BTreeMap;

use cavern_erofs::{Extent, Image, Place, Timestamp};

use super::model::{Model, TIME, Thing, What};

/// Of 12,288: all that are not zero, with the ones beside them.
const BYTES: &[(usize, &str)] = &[
    (1024, "e2e1f5e08c547df0030000000c008000060000000000000000f1536500000000"),
    (1056, "0500000003000000000000000000000075757575757575757575757575757575"),
    (1088, "766965770000000000000000000000000c000000000002000900000000000000"),
    (1152, "6465763100000000000000000000000000000000000000000000000000000000"),
    (1216, "4000000000000000000000000000000000000000000000000000000000000000"),
    (1280, "6465763200000000000000000000000000000000000000000000000000000000"),
    (1344, "ffffffff00000000000000000000000000000000000000000000000000000000"),
    (4096, "01000000ed410000510000000000000002000000800000000000000000000000"),
    (4128, "00f1536500000000050000000300000000000000000000000000000000000000"),
    (4160, "08000300a481010088130000000000002100000082000000e803e80300000000"),
    (4192, "000000000000000000000000010103006b76616c000000000000010007000000"),
    (4224, "0900000080810000000000400100000035000000840000007011010000000000"),
    (4256, "09f1536500000000070000000100000000000000000000000000000000000000"),
    (4288, "0000020009000000000000000000000000000000000000000000000000000000"),
    (4320, "04000000ffa10100050000000000000000000000870000000000000000000000"),
    (4352, "612f622f63000000000000000000000000000000000000000000000000000000"),
    (4384, "0000000080810100000000000000000000000000890000000000000000000000"),
    (4416, "04000000ed4102002800000000000000000000008a0000000000000000000000"),
    (4448, "8a00000000000000240002008000000000000000250002008900000000000000"),
    (4480, "270001002e2e2e65000000000000000000000000000000000000000000000000"),
    (8192, "8000000000000000480002008000000000000000490002008200000000000000"),
    (8224, "4b00010084000000000000004c0001008a000000000000004f00020087000000"),
    (8256, "00000000500007002e2e2e61626967646c000000000000000000000000000000"),
];

/// Files in two devices, one of 5 GiB with a time of its own, a symlink, an attribute, and a directory.
pub fn small_tree() -> Model {
    let mut model = Model::new();
    let piece = |device, block: u64, length| {
        What::File(vec![Extent { length, place: Place::Device { device, offset: block * 4096 } }])
    };
    let mut a = Thing::new(0o644, piece(1, 7, 5000));
    (a.attributes.uid, a.attributes.gid) = (1000, 1000);
    a.xattrs.insert(b"user.k".to_vec(), b"val".to_vec());
    model.add(0, b"a", a);
    let mut big = Thing::new(0o600, piece(2, 9, 5 << 30));
    big.attributes.uid = 70_000;
    big.attributes.mtime = Timestamp { seconds: TIME.seconds + 9, nanoseconds: 7 };
    model.add(0, b"big", big);
    let d = model.add(0, b"d", Thing::new(0o755, What::Directory(BTreeMap::new())));
    model.add(d, b"e", Thing::new(0o600, What::File(Vec::new())));
    model.add(0, b"l", Thing::new(0o777, What::Symlink(b"a/b/c".to_vec())));
    model
}

#[test]
fn a_small_tree_has_these_bytes() {
    let mut expected = vec![0; 3 * 4096];
    for &(place, row) in BYTES {
        for (index, digits) in row.as_bytes().chunks(2).enumerate() {
            expected[place + index] = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
        }
    }
    let model = small_tree();
    let bytes = model.bytes();
    let differing = expected.iter().zip(&bytes).position(|(expected, byte)| expected != byte);
    assert_eq!((bytes.len(), differing), (expected.len(), None));
    model.assert_same(&Image::open(&bytes).unwrap());
}
