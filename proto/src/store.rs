//! The store of a mount, as its URI names it: its kind, what that can do, and what its options are called.
//!
//! `s3://BUCKET[/PREFIX]`, `gs://BUCKET[/PREFIX]`, `azblob://CONTAINER[/PREFIX]`, `file:///DIRECTORY`, and
//! `memory://NAME[/PREFIX]` for tests. A prefix is taken as it stands (no percent-decoding) and ends in `/`; slashes at
//! the end of a URI make no difference, nor does the case of its scheme.

pub mod azblob_options;
pub mod gs_options;
pub mod s3_options;

use std::fmt;

/// The kind of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Azblob,
    File,
    Memory,
}

/// What a store can do, as far as it makes a difference to a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Objects are written, copied and deleted.
    pub writes: bool,
    /// A write is refused where the object is not the one that it expects. Without, writes are sent without conditions.
    pub conditional_writes: bool,
    /// So is an upload in parts, at its end. Without, what is there is looked at just before.
    pub conditional_uploads: bool,
    /// Parts of objects are copied into an upload. Without, an object is copied whole, whatever its length.
    pub part_copies: bool,
    /// Objects keep metadata beside their bytes.
    pub metadata: bool,
    /// Listings come in the order of keys. Without, each is sorted before it is handed out.
    pub ordered_listings: bool,
    /// A listing can begin behind any key, whether there is such a one or not.
    pub start_after: bool,
    /// A URI leads to the same objects from every host.
    pub shared: bool,
}

impl Capabilities {
    /// What a mount that may write has to do without, for whoever makes it.
    pub fn limits(self) -> Vec<&'static str> {
        let missing = [
            (self.conditional_writes, "the store refuses no write: it replaces what another program writes meanwhile"),
            (
                self.conditional_uploads || !self.conditional_writes,
                "the store does not refuse objects that come in parts (of 8 MiB and more): they replace what another \
                 program writes in the moment in which they are completed",
            ),
            (self.metadata, "the store keeps no attributes of files"),
            (self.ordered_listings, "the store lists in no order: directories are sorted here, up to 64 MiB of names"),
        ];
        missing.into_iter().filter(|(has, _)| self.writes && !has).map(|(_, limit)| limit).collect()
    }
}

/// Those that messages offer.
const OFFERED: [Scheme; 4] = [Scheme::S3, Scheme::Gs, Scheme::Azblob, Scheme::File];

impl Scheme {
    pub const ALL: [Self; 5] = [Self::S3, Self::Gs, Self::Azblob, Self::File, Self::Memory];

    /// That of a URI, whatever follows it; `None` for one that is not known, or where there is none.
    pub fn of(uri: &str) -> Option<Self> {
        let (name, _) = uri.split_once("://")?;
        Self::ALL.into_iter().find(|scheme| scheme.name().eq_ignore_ascii_case(name))
    }

    /// As URIs have it, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Azblob => "azblob",
            Self::File => "file",
            Self::Memory => "memory",
        }
    }

    /// How its URIs are written, for messages.
    pub fn form(self) -> &'static str {
        match self {
            Self::S3 => "s3://BUCKET[/PREFIX]",
            Self::Gs => "gs://BUCKET[/PREFIX]",
            Self::Azblob => "azblob://CONTAINER[/PREFIX]",
            Self::File => "file:///DIRECTORY",
            Self::Memory => "memory://NAME[/PREFIX]",
        }
    }

    /// What says where one of its stores is, for messages.
    pub fn place(self) -> &'static str {
        match self {
            Self::S3 => s3_options::ENDPOINT,
            Self::Gs => gs_options::ENDPOINT,
            Self::Azblob => "azblob.account and azblob.endpoint_url",
            Self::File => "the directory",
            Self::Memory => "the name",
        }
    }

    /// What its stores can do; a single one may do less.
    pub fn capabilities(self) -> Capabilities {
        let all = Capabilities {
            writes: true,
            conditional_writes: true,
            conditional_uploads: true,
            part_copies: true,
            metadata: true,
            ordered_listings: true,
            start_after: true,
            shared: true,
        };
        match self {
            Self::S3 => all,
            Self::Gs => Capabilities { conditional_uploads: false, part_copies: false, ..all },
            Self::Azblob => Capabilities { part_copies: false, start_after: false, ..all },
            Self::File => Capabilities { ordered_listings: true, ..Capabilities::default() },
            Self::Memory => Capabilities { shared: false, ..all },
        }
    }

    /// Names of the options that its mounts may have.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Self::S3 => &s3_options::ALL,
            Self::Gs => &gs_options::ALL,
            Self::Azblob => &azblob_options::ALL,
            Self::File | Self::Memory => &[],
        }
    }

    /// Those whose values may be shown to everybody.
    pub(crate) fn shown_options(self) -> &'static [&'static str] {
        match self {
            Self::S3 => &s3_options::SHOWN,
            Self::Gs => &gs_options::SHOWN,
            Self::Azblob => &azblob_options::SHOWN,
            Self::File | Self::Memory => &[],
        }
    }
}

/// A URI that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreUri {
    /// Absolute, without a `/` at the end unless it is the root.
    File { directory: String },
    /// Of each other scheme. Prefixes are empty, or end in `/`.
    Bucket { scheme: Scheme, name: String, prefix: String },
}

/// Why a text is no URI of a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}; {remedy}")]
pub struct StoreUriError {
    /// The URI.
    pub what: String,
    pub reason: &'static str,
    /// Names the URIs that there are.
    pub remedy: String,
}

impl StoreUri {
    /// # Errors
    /// [`StoreUriError`] for an unknown scheme, for a bucket or prefix that no store can have, and for a directory that
    /// is not absolute.
    pub fn parse(uri: &str) -> Result<Self, StoreUriError> {
        let wrong = |reason: &'static str| StoreUriError {
            what: format!("UFS URI {uri:?}"),
            reason,
            remedy: format!("use {}", OFFERED.map(Scheme::form).join(", or ")),
        };
        let (_, rest) = uri.split_once("://").ok_or_else(|| wrong("it names no scheme"))?;
        let scheme = Scheme::of(uri).ok_or_else(|| wrong("its scheme is not known"))?;
        if scheme == Scheme::File {
            let path = rest.strip_prefix('/').ok_or_else(|| wrong("the directory must be absolute"))?;
            let path = path.trim_end_matches('/');
            check_components(path).map_err(wrong)?;
            return Ok(Self::File { directory: format!("/{path}") });
        }
        let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_end_matches('/');
        check_components(path).map_err(wrong)?;
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        if name.is_empty() {
            return Err(wrong("it names no bucket"));
        }
        // Host names and paths are made of it, so nothing that means something there may be in it.
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if scheme != Scheme::Memory && (!name.chars().all(legal) || name.starts_with('.') || name.len() > 255) {
            return Err(wrong("the bucket's name has characters that no bucket can have"));
        }
        Ok(Self::Bucket { scheme, name: name.to_owned(), prefix })
    }

    /// The name of its bucket, or container.
    pub fn bucket(&self) -> Option<&str> {
        match self {
            Self::Bucket { scheme, name, .. } if *scheme != Scheme::Memory => Some(name),
            Self::Bucket { .. } | Self::File { .. } => None,
        }
    }

    pub fn scheme(&self) -> Scheme {
        match self {
            Self::File { .. } => Scheme::File,
            Self::Bucket { scheme, .. } => *scheme,
        }
    }
}

/// The one spelling of it.
impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { directory } => write!(f, "file://{directory}"),
            Self::Bucket { scheme, name, prefix } => {
                let place = format!("{name}/{prefix}");
                write!(f, "{}://{}", scheme.name(), place.trim_end_matches('/'))
            }
        }
    }
}

fn check_components(path: &str) -> Result<(), &'static str> {
    if path.is_empty() {
        return Ok(());
    }
    for component in path.split('/') {
        match component {
            "" => return Err("its prefix has an empty component (`//`)"),
            "." | ".." => return Err("its prefix has `.` or `..` as a component"),
            _ if component.contains('\0') => return Err("its prefix has a NUL"),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(bucket: &str, prefix: &str) -> StoreUri {
        StoreUri::Bucket { scheme: Scheme::S3, name: bucket.to_owned(), prefix: prefix.to_owned() }
    }

    #[test]
    fn a_prefix_ends_in_one_slash() {
        assert_eq!(StoreUri::parse("s3://b").unwrap(), s3("b", ""));
        assert_eq!(StoreUri::parse("s3://b/").unwrap(), s3("b", ""));
        assert_eq!(StoreUri::parse("S3://b/a/c").unwrap(), s3("b", "a/c/"));
        assert_eq!(StoreUri::parse("s3://b/a/c//").unwrap(), s3("b", "a/c/"));
        assert_eq!(StoreUri::parse("s3://b/a %20+ü").unwrap(), s3("b", "a %20+ü/"));
    }

    #[test]
    fn directories_are_absolute() {
        let file = |directory: &str| StoreUri::File { directory: directory.to_owned() };
        assert_eq!(StoreUri::parse("file:///").unwrap(), file("/"));
        assert_eq!(StoreUri::parse("file:///data/x/").unwrap(), file("/data/x"));
        assert!(StoreUri::parse("file://data").is_err());
    }

    #[test]
    fn each_uri_has_one_spelling() {
        for (uri, spelling) in [
            ("S3://b/", "s3://b"),
            ("s3://b/a b/", "s3://b/a b"),
            ("GS://b/p/", "gs://b/p"),
            ("azblob://c", "azblob://c"),
            ("File:///", "file:///"),
            ("file:///d/", "file:///d"),
            ("MEMORY://m/p/", "memory://m/p"),
        ] {
            let parsed = StoreUri::parse(uri).unwrap();
            assert_eq!(parsed.to_string(), spelling);
            assert_eq!(StoreUri::parse(spelling).unwrap(), parsed);
            assert_eq!(Scheme::of(uri), Some(parsed.scheme()));
        }
    }

    #[test]
    fn what_is_no_uri_is_told_apart_and_the_known_ones_are_named() {
        for (uri, reason) in [
            ("", "no scheme"),
            ("b/p", "no scheme"),
            ("gcs://b", "not known"),
            ("gs://", "no bucket"),
            ("azblob://c@evil/p", "no bucket can have"),
            ("s3://", "no bucket"),
            ("s3:///p", "no bucket"),
            ("s3://b//p", "empty component"),
            ("s3://b/a/../c", "`..`"),
            ("s3://b/./c", "`.`"),
            ("s3://b@evil", "no bucket can have"),
            ("s3://b:80/x", "no bucket can have"),
            ("s3://b?x=1", "no bucket can have"),
            ("s3://../x", "no bucket can have"),
        ] {
            let message = StoreUri::parse(uri).unwrap_err().to_string();
            assert!(message.contains(reason), "{uri}: {message}");
            for form in OFFERED.map(Scheme::form) {
                assert!(message.contains(form), "{uri}: {message}");
            }
        }
    }

    #[test]
    fn what_is_shown_is_an_option_of_its_store() {
        for scheme in Scheme::ALL {
            assert!(scheme.shown_options().iter().all(|name| scheme.options().contains(name)), "{scheme:?}");
            let prefix = format!("{}.", scheme.name());
            assert!(scheme.options().iter().all(|name| name.starts_with(&prefix)), "{scheme:?}");
        }
    }

    #[test]
    fn secrets_of_no_store_are_shown() {
        for secret in [gs_options::KEY, azblob_options::KEY, azblob_options::SAS, s3_options::SECRET] {
            assert!(Scheme::ALL.iter().all(|scheme| !scheme.shown_options().contains(&secret)), "{secret}");
        }
    }

    #[test]
    fn what_a_store_cannot_do_is_said_to_whoever_mounts_it_for_writing() {
        let limits = |scheme: Scheme| scheme.capabilities().limits();
        for scheme in [Scheme::S3, Scheme::Azblob, Scheme::Memory, Scheme::File] {
            assert!(limits(scheme).is_empty(), "{scheme:?}");
        }
        assert!(matches!(limits(Scheme::Gs)[..], [limit] if limit.contains("in parts")));
        let none = Capabilities { writes: true, ..Capabilities::default() };
        assert_eq!(none.limits().len(), 3);
    }
}
