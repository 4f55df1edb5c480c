//! Patterns of names as the shell has them: `*`, `?`, `[a-z]`, `[!a-z]`, and `\` before a character that is meant
//! itself.

use std::str::FromStr;

/// A pattern of whole names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// Any characters, or none.
    Any,
    One(Set),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Set {
    All,
    Character(char),
    Ranges { ranges: Vec<(char, char)>, negated: bool },
}

impl Set {
    fn has(&self, character: char) -> bool {
        match self {
            Self::All => true,
            Self::Character(own) => *own == character,
            Self::Ranges { ranges, negated } => {
                ranges.iter().any(|(first, last)| (*first..=*last).contains(&character)) != *negated
            }
        }
    }
}

impl Glob {
    /// Whether a name matches, from its first character to its last.
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut at, mut part) = (0, 0);
        // Where to go on when the last `*` takes one character more.
        let mut back: Option<(usize, usize)> = None;
        while at < name.len() {
            match self.0.get(part) {
                Some(Part::Any) => {
                    back = Some((at, part));
                    part += 1;
                }
                Some(Part::One(set)) if set.has(name[at]) => {
                    at += 1;
                    part += 1;
                }
                _ => match back {
                    None => return false,
                    Some((from, star)) => {
                        back = Some((from + 1, star));
                        (at, part) = (from + 1, star + 1);
                    }
                },
            }
        }
        self.0[part..].iter().all(|part| *part == Part::Any)
    }
}

impl FromStr for Glob {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rest = text.chars();
        let mut parts = Vec::new();
        while let Some(character) = rest.next() {
            parts.push(match character {
                '*' => Part::Any,
                '?' => Part::One(Set::All),
                '\\' => Part::One(Set::Character(rest.next().ok_or_else(|| format!("\"{text}\" ends in a \\"))?)),
                // As the shell has it: a bracket that is not closed is meant itself.
                '[' => match ranges(rest.as_str()) {
                    Some((set, after)) => {
                        rest = after.chars();
                        Part::One(set)
                    }
                    None => Part::One(Set::Character('[')),
                },
                character => Part::One(Set::Character(character)),
            });
        }
        Ok(Self(parts))
    }
}

/// What stands in brackets, and what comes after them.
fn ranges(text: &str) -> Option<(Set, &str)> {
    let (negated, inner) = match text.strip_prefix(['!', '^']) {
        Some(inner) => (true, inner),
        None => (false, text),
    };
    // A bracket that comes first is one of the set.
    let first = inner.chars().next()?.len_utf8();
    let end = first + inner[first..].find(']')?;
    let characters: Vec<char> = inner[..end].chars().collect();
    let (mut ranges, mut at) = (Vec::new(), 0);
    while at < characters.len() {
        match characters[at..] {
            [from, '-', to, ..] => {
                ranges.push((from, to));
                at += 3;
            }
            _ => {
                ranges.push((characters[at], characters[at]));
                at += 1;
            }
        }
    }
    Some((Set::Ranges { ranges, negated }, &inner[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, matching, others) in [
            ("*", &["", "a", "a.b"][..], &[][..]),
            ("*.jpg", &["a.jpg", ".jpg", "a.jpg.jpg"], &["a.jpeg", "ajpg", "a.jpg2"]),
            ("a?c", &["abc", "aéc"], &["ac", "abbc"]),
            ("[a-c]x[!0-9]", &["axz", "cx-"], &["dxz", "ax5", "x"]),
            ("a*b*c", &["abc", "aXbYc", "abbcc"], &["acb", "ab"]),
            ("[]x]", &["]", "x"], &["[", "a"]),
            ("[x", &["[x"], &["x"]),
            (r"\*", &["*"], &["a"]),
            ("[a-]", &["a", "-"], &["b"]),
            ("", &[""], &["a"]),
        ] {
            let glob: Glob = pattern.parse().unwrap();
            matching.iter().for_each(|name| assert!(glob.matches(name), "{pattern} does not match {name}"));
            others.iter().for_each(|name| assert!(!glob.matches(name), "{pattern} matches {name}"));
        }
        assert!(r"a\".parse::<Glob>().is_err());
    }

    #[test]
    fn many_stars_do_not_take_for_ever() {
        let glob: Glob = "*a".repeat(30).parse().unwrap();
        assert!(!glob.matches(&"a".repeat(29)) && glob.matches(&"ba".repeat(60)));
        assert!(!format!("{}b", "*a".repeat(60)).parse::<Glob>().unwrap().matches(&"a".repeat(255)));
    }
}
