//! Permissions as chmod(1) takes them: octal, or symbolic as `u+rwX,go-w`.

use std::str::FromStr;

use cavern_posix::mode::{MODE_BITS, SET_GROUP_ID, SET_USER_ID};
use cavern_proto::master::Kind;

/// Set-user-id and set-group-id: of a directory they stay unless they are named.
const SET_IDS: u32 = SET_USER_ID | SET_GROUP_ID;

/// What is to become of the permissions of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModeChange(Vec<Step>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Add,
    Remove,
    Set,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bits {
    /// These; with execution where the file has it for anybody, or is a directory, if `execute_if_any`.
    These { bits: u32, execute_if_any: bool },
    /// Those that one class (0o700, 0o070 or 0o007) has.
    OfClass(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// Bits of the classes that are named; 0 when none is: then all, but for what the umask takes away.
    affected: u32,
    operator: Operator,
    bits: Bits,
    /// Of [`SET_IDS`], those that are named.
    named_ids: u32,
}

impl ModeChange {
    /// The permissions that a file of this kind has after the change.
    pub fn apply(&self, mode: u32, kind: Kind, umask: u32) -> u32 {
        let is_directory = kind == Kind::Directory;
        self.0.iter().fold(mode & MODE_BITS, |mode, step| {
            let left_out = if is_directory { SET_IDS & !step.named_ids } else { 0 };
            let bits = match step.bits {
                Bits::OfClass(class) => spread(mode & class),
                Bits::These { bits, execute_if_any: true } if is_directory || mode & 0o111 != 0 => bits | 0o111,
                Bits::These { bits, .. } => bits,
            };
            let affected = if step.affected == 0 { !umask } else { step.affected };
            let bits = bits & affected & !left_out;
            match step.operator {
                Operator::Add => mode | bits,
                Operator::Remove => mode & !bits,
                Operator::Set if step.affected == 0 => mode & left_out | bits,
                Operator::Set => mode & (!step.affected | left_out) | bits,
            }
        })
    }
}

/// The permissions that are of one class, for all three.
fn spread(bits: u32) -> u32 {
    [0o444, 0o222, 0o111].into_iter().filter(|right| bits & right != 0).sum()
}

impl FromStr for ModeChange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            let bits = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= MODE_BITS);
            let bits = bits.ok_or_else(|| format!("\"{text}\" is no octal mode: 0 to 7777"))?;
            // As GNU has it: five digits say that all bits are meant.
            let named_ids = if text.len() > 4 { SET_IDS } else { bits & SET_IDS };
            let bits = Bits::These { bits, execute_if_any: false };
            return Ok(Self(vec![Step { affected: 0o7777, operator: Operator::Set, bits, named_ids }]));
        }
        let clauses = text.split(',').map(clause).collect::<Option<Vec<_>>>();
        let steps = clauses.ok_or_else(|| format!("\"{text}\" is no mode: try 0644, u+x or go-w,a+rX"))?;
        Ok(Self(steps.into_iter().flatten().collect()))
    }
}

/// `[ugoa]*([-+=]([rwxXst]*|[ugo]))+`
fn clause(text: &str) -> Option<Vec<Step>> {
    let start = text.find(['+', '-', '='])?;
    let mut affected = 0;
    for class in text[..start].chars() {
        affected |= match class {
            'u' => 0o4700,
            'g' => 0o2070,
            'o' => 0o1007,
            'a' => 0o7777,
            _ => return None,
        };
    }
    let mut steps = Vec::new();
    let mut rest = &text[start..];
    while let Some(operator) = rest.chars().next() {
        let operator = match operator {
            '+' => Operator::Add,
            '-' => Operator::Remove,
            _ => Operator::Set,
        };
        let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |at| at + 1);
        let (bits, ids) = bits(&rest[1..end])?;
        let in_reach = if affected == 0 { ids } else { ids & affected };
        steps.push(Step { affected, operator, bits, named_ids: in_reach });
        rest = &rest[end..];
    }
    Some(steps)
}

/// What is given or taken, and which of [`SET_IDS`] it names.
fn bits(text: &str) -> Option<(Bits, u32)> {
    let class = match text {
        "u" => 0o700,
        "g" => 0o070,
        "o" => 0o007,
        _ => 0,
    };
    if class != 0 {
        return Some((Bits::OfClass(class), 0));
    }
    let (mut bits, mut execute_if_any) = (0, false);
    for right in text.chars() {
        match right {
            'r' => bits |= 0o444,
            'w' => bits |= 0o222,
            'x' => bits |= 0o111,
            'X' => execute_if_any = true,
            's' => bits |= SET_IDS,
            't' => bits |= 0o1000,
            _ => return None,
        }
    }
    Some((Bits::These { bits, execute_if_any }, bits & SET_IDS))
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
