//! Numbers of users and groups, as the files of this host have them.

use std::fs;

/// The number of a user: itself, or as `/etc/passwd` has it. Blocks on the disk.
///
/// # Errors
/// The sentence for whoever wrote it.
pub fn user_id(text: &str) -> Result<u32, String> {
    id_of(text, "/etc/passwd")
}

/// The number of a group: itself, or as `/etc/group` has it. Blocks on the disk.
///
/// # Errors
/// As [`user_id`].
pub fn group_id(text: &str) -> Result<u32, String> {
    id_of(text, "/etc/group")
}

fn id_of(text: &str, file: &str) -> Result<u32, String> {
    // The last number is what chown(2) takes for "as it is".
    if let Ok(id) = text.parse::<u32>() {
        return if id == u32::MAX { Err(format!("{id} is no owner")) } else { Ok(id) };
    }
    let known = fs::read_to_string(file).map_err(|error| format!("{file} cannot be read: {error}; use a number"))?;
    id_in(text, &known).ok_or_else(|| format!("{file} has no \"{text}\": use a number"))
}

fn id_in(name: &str, known: &str) -> Option<u32> {
    let mut lines = known.lines().map(|line| line.split(':'));
    let mut fields = lines.find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
    fields.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_up_and_a_number_is_itself() {
        assert_eq!((user_id("root"), group_id("root"), group_id("7")), (Ok(0), Ok(0), Ok(7)));
        assert_eq!(id_in("b", "a:x:1:\nb:x:20:a,b\n"), Some(20));
        assert_eq!(id_in("c", "a:x:1:\nb:x:20:c\nc:x\n"), None);
        assert!(group_id("no such group").unwrap_err().contains("use a number"));
        assert!(user_id("4294967295").unwrap_err().contains("no owner"));
    }
}
