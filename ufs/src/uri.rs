//! UFS URIs: `s3://BUCKET[/PREFIX]`, `file:///DIRECTORY`, and `memory://NAME[/PREFIX]` for tests.
//!
//! A prefix is taken as it stands (no percent-decoding) and always ends in `/`; one `/` more or less at the end of the
//! URI makes no difference.

use crate::error::UfsError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    S3 { bucket: String, prefix: String },
    File { directory: String },
    Memory { name: String, prefix: String },
}

const FORMS: &str = "use s3://BUCKET[/PREFIX], or file:///DIRECTORY";

impl Location {
    pub(crate) fn parse(uri: &str) -> Result<Self, UfsError> {
        let wrong = |reason: &str| UfsError::invalid(format!("UFS URI {uri:?}"), reason, FORMS);
        let (scheme, rest) = uri.split_once("://").ok_or_else(|| wrong("it names no scheme"))?;
        if scheme.eq_ignore_ascii_case("file") {
            let path = rest.strip_prefix('/').ok_or_else(|| wrong("the directory must be absolute"))?;
            let path = path.strip_suffix('/').unwrap_or(path);
            check_components(path).map_err(wrong)?;
            return Ok(Self::File { directory: format!("/{path}") });
        }
        let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.strip_suffix('/').unwrap_or(path);
        check_components(path).map_err(wrong)?;
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        if name.is_empty() {
            return Err(wrong("it names no bucket"));
        }
        let name = name.to_owned();
        match scheme.to_ascii_lowercase().as_str() {
            "s3" => {
                // Host names and paths are made of it, so nothing that means something there may be in it.
                let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                if !name.chars().all(legal) || name.starts_with('.') || name.len() > 255 {
                    return Err(wrong("the bucket's name has characters that no bucket can have"));
                }
                Ok(Self::S3 { bucket: name, prefix })
            }
            "memory" => Ok(Self::Memory { name, prefix }),
            _ => Err(wrong("its scheme is not known")),
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

    fn s3(bucket: &str, prefix: &str) -> Location {
        Location::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() }
    }

    #[test]
    fn a_prefix_ends_in_one_slash() {
        assert_eq!(Location::parse("s3://b").unwrap(), s3("b", ""));
        assert_eq!(Location::parse("s3://b/").unwrap(), s3("b", ""));
        assert_eq!(Location::parse("S3://b/a/c").unwrap(), s3("b", "a/c/"));
        assert_eq!(Location::parse("s3://b/a/c/").unwrap(), s3("b", "a/c/"));
        assert_eq!(Location::parse("s3://b/a %20+ü").unwrap(), s3("b", "a %20+ü/"));
    }

    #[test]
    fn directories_are_absolute() {
        let file = |directory: &str| Location::File { directory: directory.to_owned() };
        assert_eq!(Location::parse("file:///").unwrap(), file("/"));
        assert_eq!(Location::parse("file:///data/x/").unwrap(), file("/data/x"));
        assert!(Location::parse("file://data").is_err());
    }

    #[test]
    fn what_is_no_uri_is_told_apart() {
        for (uri, reason) in [
            ("", "no scheme"),
            ("b/p", "no scheme"),
            ("gs://b", "not known"),
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
            let message = Location::parse(uri).unwrap_err().to_string();
            assert!(message.contains(reason), "{uri}: {message}");
            assert!(message.contains("use s3://"), "{uri}: {message}");
        }
    }
}
