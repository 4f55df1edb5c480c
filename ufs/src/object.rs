//! What a store says about its objects.

/// One object, as a listing or a HEAD describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectMeta {
    /// The full key, byte for byte as the store has it.
    pub key: String,
    /// Length in bytes.
    pub size: u64,
    /// The version's name, without quotes; empty where the store gives none.
    pub etag: String,
    /// Last modification, nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// What is kept with it; empty in a listing, and where the store keeps nothing.
    pub metadata: Metadata,
}

/// How far a listing reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListMode {
    /// What lies directly under the prefix: objects, and prefixes up to the next `/`.
    Directory,
    /// Every object under the prefix; no prefixes.
    Recursive,
}

/// One page of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// In key order. Holds `prefix` itself where the bucket has such a key (a directory marker), and keys that cannot
    /// be file names: hiding those is the namespace's business.
    pub objects: Vec<ObjectMeta>,
    /// Full, in key order, each ending in `/`.
    pub prefixes: Vec<String>,
    /// Keys which cannot be represented in UTF-8 and so cannot be asked for; they are in neither list.
    pub hidden: u64,
    /// The listing begins anew after this page, which is empty: the pages before did not come in key order, and what
    /// was concluded from them does not hold.
    pub restarts: bool,
}

/// What is kept with an object: names (lower-case letters, digits and `-`) and values (printable ASCII), in the order
/// of the names.
pub type Metadata = std::collections::BTreeMap<String, String>;

/// What a change of an object expects under its key. A store that has something else there answers
/// [`UfsError::VersionChanged`](crate::UfsError::VersionChanged), or `NotFound` where it has nothing; one that does not
/// know such conditions makes the change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition<'a> {
    Anything,
    Nothing,
    /// This version.
    Version(&'a str),
}

impl<'a> Precondition<'a> {
    /// The version that must be there; empty where it does not matter which.
    pub(crate) fn version(self) -> &'a str {
        if let Self::Version(etag) = self { etag } else { "" }
    }
}
