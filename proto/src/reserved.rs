//! Names of objects that a cluster keeps for itself in a bucket, below the prefix of a mount. No file of an fs-mode
//! mount comes from one of them, and none has the name of one: its object would be written over it.

/// Tells other clusters whose the prefix is.
pub const CLAIM: &str = ".cavern-cluster";
/// Begins the names of objects that were written once more, out of the way of others; the cluster's id follows.
pub const PRESERVED: &str = ".cavern-preserved-";

/// Begins the names of the objects of views; 32 hexadecimal digits follow. No listing of a bucket shows them.
pub const VIEW: &str = ".cavern-view-";

/// Whether a name in the root of a mount is that of such an object, or may become that of one.
pub fn is_reserved(name: &[u8]) -> bool {
    name == CLAIM.as_bytes() || name.starts_with(PRESERVED.as_bytes()) || name.starts_with(VIEW.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_names_are_free() {
        let view = ".cavern-view-0123456789abcdef0123456789abcdef";
        for name in [".cavern-cluster", ".cavern-preserved-", ".cavern-preserved-0123456789abcdef-7-9", view] {
            assert!(is_reserved(name.as_bytes()), "{name}");
        }
        for name in [
            ".cavern",
            ".cavern-cluster2",
            ".cavern-preserved",
            "cavern-preserved-",
            "a.cavern-cluster",
            ".cavern-view",
        ] {
            assert!(!is_reserved(name.as_bytes()), "{name}");
        }
    }
}
