//! IAM policies, as far as sessions have them: statements that allow or deny actions on resources, with conditions on
//! the prefix of a listing. What is not known is refused, and not taken for nothing.

use serde::Deserialize;

/// What a session may do.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Policy {
    #[serde(rename = "Version")]
    version: Version,
    #[serde(rename = "Statement")]
    statements: Vec<Statement>,
}

/// Patterns have variables in this version.
#[derive(Clone, Copy, Debug, Deserialize)]
enum Version {
    #[serde(rename = "2012-10-17")]
    V2012,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "PascalCase")]
struct Statement {
    #[expect(dead_code, reason = "a name for people")]
    #[serde(default)]
    sid: String,
    effect: Effect,
    action: Patterns,
    resource: Patterns,
    #[serde(default)]
    condition: Condition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Effect {
    Allow,
    Deny,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "PascalCase")]
struct Condition {
    string_like: Option<OnPrefix>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OnPrefix {
    #[serde(rename = "s3:prefix")]
    prefix: Patterns,
}

/// One, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Several(Vec<String>),
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// As `s3:GetObject`.
    pub action: &'a str,
    /// An ARN.
    pub resource: &'a str,
    /// Of a listing that has one.
    pub prefix: Option<&'a str>,
}

impl Policy {
    /// # Errors
    /// What is wrong with the document.
    pub(crate) fn parse(document: &str) -> Result<Self, String> {
        let policy: Self = serde_json::from_str(document).map_err(|error| error.to_string())?;
        let Version::V2012 = policy.version;
        Ok(policy)
    }

    pub(crate) fn allows(&self, wanted: Wanted<'_>) -> bool {
        let fits = |effect: Effect| self.statements.iter().any(|one| one.effect == effect && one.fits(wanted));
        fits(Effect::Allow) && !fits(Effect::Deny)
    }
}

impl Statement {
    fn fits(&self, wanted: Wanted<'_>) -> bool {
        let on_prefix = self.condition.string_like.as_ref();
        self.action.fit(wanted.action)
            && self.resource.fit(wanted.resource)
            && on_prefix.is_none_or(|on| wanted.prefix.is_some_and(|prefix| on.prefix.fit(prefix)))
    }
}

impl Patterns {
    fn fit(&self, text: &str) -> bool {
        match self {
            Self::One(pattern) => fits(pattern, text),
            Self::Several(patterns) => patterns.iter().any(|pattern| fits(pattern, text)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Any,
    One,
    Literal(char),
}

/// Whether a pattern fits all of a text: `*` stands for any characters, `?` for one, and `${*}`, `${?}`, `${$}` for
/// what is in the braces. Takes the product of their lengths at most.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = Vec::new();
    let mut rest = pattern;
    while let Some(first) = rest.chars().next() {
        let escaped = ["${*}", "${?}", "${$}"].into_iter().find(|variable| rest.starts_with(variable));
        let (part, length) = match (escaped.and_then(|variable| variable.chars().nth(2)), first) {
            (Some(literal), _) => (Part::Literal(literal), 4),
            (None, '*') => (Part::Any, 1),
            (None, '?') => (Part::One, 1),
            (None, other) => (Part::Literal(other), other.len_utf8()),
        };
        parts.push(part);
        rest = &rest[length..];
    }
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut in_text) = (0, 0);
    // Behind the last `*`, and up to where it reaches so far.
    let mut star = None;
    while in_text < text.len() {
        match parts.get(at) {
            Some(Part::Any) => {
                at += 1;
                star = Some((at, in_text));
            }
            Some(part) if *part == Part::One || *part == Part::Literal(text[in_text]) => {
                at += 1;
                in_text += 1;
            }
            _ => {
                let Some((behind, reached)) = star else { return false };
                star = Some((behind, reached + 1));
                (at, in_text) = (behind, reached + 1);
            }
        }
    }
    parts[at..].iter().all(|part| *part == Part::Any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_what_they_say() {
        for (pattern, text, expected) in [
            ("a/*", "a/", true),
            ("a/*", "a/b/c", true),
            ("a/*", "ab/c", false),
            ("*b?d", "abbcd", true),
            ("a${*}/*", "a*/x", true),
            ("a${*}/*", "ax/x", false),
            ("${$}${?}", "$?", true),
            ("${$}${?}", "$x", false),
            ("${a}", "${a}", true),
            ("é*", "éé", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(fits(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_session_may_do_what_is_allowed_and_not_denied() {
        let policy = Policy::parse(
            r#"{"Version": "2012-10-17", "Statement": [
                {"Effect": "Allow", "Action": ["s3:GetObject*", "s3:PutObject"], "Resource": "arn:aws:s3:::b/a/*"},
                {"Effect": "Deny", "Action": "s3:*", "Resource": "arn:aws:s3:::b/a/secret/*"},
                {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::b",
                 "Condition": {"StringLike": {"s3:prefix": "a/*"}}}]}"#,
        )
        .unwrap();
        let may = |action: &str, resource: &str, prefix: Option<&str>| {
            policy.allows(Wanted { action, resource: &format!("arn:aws:s3:::{resource}"), prefix })
        };
        assert!(may("s3:GetObject", "b/a/k", None) && may("s3:PutObject", "b/a/k", None));
        assert!(!may("s3:DeleteObject", "b/a/k", None) && !may("s3:GetObject", "b/k", None));
        assert!(may("s3:GetObjectVersion", "b/a/k", None) && !may("s3:GetObjectVersion", "b/k", None));
        assert!(!may("s3:ListBucketVersions", "b", Some("a/")) && !may("s3:DeleteObjectVersion", "b/a/k", None));
        assert!(!may("s3:GetObject", "b/a/secret/k", None) && !may("s3:GetObject", "other/a/k", None));
        assert!(may("s3:ListBucket", "b", Some("a/")) && may("s3:ListBucket", "b", Some("a/b")));
        assert!(!may("s3:ListBucket", "b", None) && !may("s3:ListBucket", "b", Some("b/")));
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for document in [
            "",
            r#"{"Statement": []}"#,
            r#"{"Version": "2008-10-17", "Statement": []}"#,
            r#"{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*"}]}"#,
            r#"{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "NotAction": "*", "Resource": "*"}]}"#,
            r#"{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*",
                "Condition": {"Bool": {"aws:SecureTransport": "true"}}}]}"#,
        ] {
            assert!(Policy::parse(document).is_err(), "{document}");
        }
    }
}
