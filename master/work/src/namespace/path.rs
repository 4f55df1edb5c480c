//! Paths of the namespace.

use cavern_posix::check_name;

use crate::error::WorkError;

/// Longest path, in bytes, and its deepest nesting.
const PATH_MAX: usize = 4096;
const COMPONENTS_MAX: usize = 1024;

/// The components of an absolute path.
pub fn components(path: &str) -> Result<Vec<&str>, WorkError> {
    let shown = || path.chars().take(100).collect::<String>();
    if !path.starts_with('/') {
        return Err(WorkError::Invalid(format!("the path {:?} is not absolute: begin it with /", shown())));
    }
    if path.len() > PATH_MAX {
        return Err(WorkError::Invalid(format!("the path {:?}… is longer than {PATH_MAX} bytes", shown())));
    }
    let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
    if names.len() > COMPONENTS_MAX {
        return Err(WorkError::Invalid(format!("the path {:?}… has more than {COMPONENTS_MAX} components", shown())));
    }
    for name in &names {
        check_name(name.as_bytes())?;
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_are_absolute_and_plain() {
        assert_eq!(components("/").unwrap(), Vec::<&str>::new());
        assert_eq!(components("/a//b/").unwrap(), ["a", "b"]);
        for bad in ["", "a", "a/b", "/a/../b", "/.", "/a\0b", &format!("/{}", "x".repeat(256)), &"/a".repeat(2500)] {
            assert!(matches!(components(bad), Err(WorkError::Invalid(_))), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_path_is_taken_or_refused(path in ".{0,300}") {
            if let Ok(names) = components(&path) {
                prop_assert!(names.iter().all(|name| !name.is_empty() && *name != ".." && !name.contains('\0')));
            }
        }
    }
}
