//! Permissions as chmod(1) takes them: octal, or symbolic as `u+rwX,go-w`.

use std::str::FromStr;

use cavern_posix::mode::{MODE_BITS, SET_GROUP_ID, SET_USER_ID};
use cavern_proto::master::Kind;

/// Set-user-id and set-group-id: of a directory they stay unless they are named.
const SET_IDS: u32 = SET_USER_ID | SET_GROUP_ID;
const OPERATORS: [char; 3] = ['+', '-', '='];

/// What is to become of the permissions of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeChange(String);

impl ModeChange {
    /// The permissions that a file of this kind has after the change.
    pub fn apply(&self, mode: u32, kind: Kind, umask: u32) -> u32 {
        // What makes no sense was refused when it was given.
        changed(&self.0, mode & MODE_BITS, kind == Kind::Directory, umask).unwrap_or(mode)
    }
}

impl FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        changed(text, 0, false, 0).map(|_| Self(text.to_owned())).ok_or_else(|| {
            if text.starts_with(|first: char| first.is_ascii_digit()) {
                format!("\"{text}\" is no octal mode: 0 to 7777")
            } else {
                format!("\"{text}\" is no mode: try 0644, u+x or go-w,a+rX")
            }
        })
    }
}

/// The permissions after a change; `None` where that makes no sense.
fn changed(text: &str, mode: u32, is_directory: bool, umask: u32) -> Option<u32> {
    if text.starts_with(|first: char| first.is_ascii_digit()) {
        let bits = u32::from_str_radix(text, 8).ok().filter(|bits| *bits <= MODE_BITS)?;
        // As GNU has it: five digits say that all bits are meant.
        let stays = if is_directory && text.len() <= 4 { mode & SET_IDS } else { 0 };
        return Some(stays | bits);
    }
    text.split(',').try_fold(mode, |mode, clause| clause_applied(clause, mode, is_directory, umask))
}

/// `[ugoa]*([-+=]([rwxXst]*|[ugo]))+`
fn clause_applied(text: &str, mode: u32, is_directory: bool, umask: u32) -> Option<u32> {
    let (classes, mut rest) = text.split_at(text.find(OPERATORS)?);
    // Bits of the classes that are named; 0 when none is: then all, but for what the umask takes away.
    let named = classes.chars().try_fold(0, |named, class| {
        let bits = match class {
            'u' => 0o4700,
            'g' => 0o2070,
            'o' => 0o1007,
            'a' => 0o7777,
            _ => return None,
        };
        Some(named | bits)
    })?;
    let reach = if named == 0 { 0o7777 } else { named };
    let mut mode = mode;
    while let Some(operator) = rest.chars().next() {
        let end = rest[1..].find(OPERATORS).map_or(rest.len(), |at| at + 1);
        let (bits, ids) = bits(&rest[1..end], mode, is_directory)?;
        let stays = if is_directory { SET_IDS & !(ids & reach) } else { 0 };
        let bits = bits & !stays & if named == 0 { !umask } else { named };
        mode = match operator {
            '+' => mode | bits,
            '-' => mode & !bits,
            _ => mode & (!reach | stays) | bits,
        };
        rest = &rest[end..];
    }
    Some(mode)
}

/// What is given or taken, and which of [`SET_IDS`] are named. A file with these permissions gets execution by `X`
/// where it has it for anybody, or is a directory.
fn bits(text: &str, mode: u32, is_directory: bool) -> Option<(u32, u32)> {
    let class = match text {
        "u" => mode & 0o700,
        "g" => mode & 0o070,
        "o" => mode & 0o007,
        _ => {
            let bits = text.chars().try_fold(0, |bits, right| {
                let right = match right {
                    'r' => 0o444,
                    'w' => 0o222,
                    'x' => 0o111,
                    'X' if is_directory || mode & 0o111 != 0 => 0o111,
                    'X' => 0,
                    's' => SET_IDS,
                    't' => 0o1000,
                    _ => return None,
                };
                Some(bits | right)
            })?;
            return Some((bits, bits & SET_IDS));
        }
    };
    Some(([0o444, 0o222, 0o111].into_iter().filter(|right| class & right != 0).sum(), 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn applied(text: &str, mode: u32, kind: Kind) -> u32 {
        text.parse::<ModeChange>().unwrap().apply(mode, kind, 0o022)
    }

    #[test]
    fn modes_change_as_chmod_changes_them() {
        for (text, before, after) in [
            ("644", 0o4755, 0o644),
            ("4755", 0, 0o4755),
            ("u+x", 0o644, 0o744),
            ("go-rwx", 0o777, 0o700),
            ("a=r", 0o777, 0o444),
            ("u=rw,go=r", 0o777, 0o644),
            ("+w", 0o444, 0o644),
            ("+x", 0o644, 0o755),
            ("=r", 0o777, 0o444),
            ("u+s,g+s,+t", 0o755, 0o7755),
            ("u-s", 0o4755, 0o755),
            ("g=u", 0o740, 0o770),
            ("o=g-w", 0o760, 0o764),
            ("a+X", 0o644, 0o644),
            ("a+X", 0o744, 0o755),
            ("u=", 0o755, 0o055),
        ] {
            assert_eq!(applied(text, before, Kind::File), after, "{text} on {before:o}");
        }
    }

    #[test]
    fn directories_keep_their_set_ids_unless_these_are_named() {
        for (text, before, after) in [
            ("755", 0o2700, 0o2755),
            ("00755", 0o2700, 0o755),
            ("2700", 0o755, 0o2700),
            ("g=rx", 0o2700, 0o2750),
            ("g-s", 0o2755, 0o755),
            ("a+X", 0o600, 0o711),
            ("=rx", 0o2700, 0o2555),
        ] {
            assert_eq!(applied(text, before, Kind::Directory), after, "{text} on {before:o}");
        }
    }

    #[test]
    fn what_is_no_mode_is_refused() {
        for text in ["", "8", "77777", "u", "u+z", "z+x", "u+x,", "+ug", "1+x"] {
            assert!(text.parse::<ModeChange>().is_err(), "{text:?}");
        }
    }
}
