//! What is left of a role's rights: the policy of a session, as STS takes it.
//!
//! Reading is GetObject, and ListBucket below the prefix; both of earlier versions, too, where the bucket keeps them:
//! views read what was replaced since. Writing is PutObject, DeleteObject, and what goes on and gives up an upload;
//! tags, since a copy takes those of its source along. To delete a version, access lists and the settings of the bucket
//! are out of reach: what was deleted or overwritten in a bucket with versions can be had back.

use serde_json::{Value, json};

use crate::error::UfsError;
use crate::s3::keys::KeyRight;

/// Longest policy, in characters, as AWS limits it.
const POLICY_MAX: usize = 2048;

const LIST: &[&str] = &["s3:ListBucket", "s3:ListBucketVersions"];
const READ: &[&str] = &["s3:GetObject", "s3:GetObjectVersion"];
const WRITE: &[&str] = &[
    "s3:GetObject",
    "s3:GetObjectVersion",
    "s3:GetObjectTagging",
    "s3:PutObject",
    "s3:PutObjectTagging",
    "s3:DeleteObject",
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
];

/// For keys of a role that are good for a prefix, which is empty or ends in `/`.
///
/// # Errors
/// [`UfsError::Invalid`] where the policy is longer than STS takes.
pub(super) fn of(role: &str, bucket: &str, prefix: &str, right: KeyRight) -> Result<String, UfsError> {
    // Other stores have no partitions, and take AWS's name of the first.
    let partition = role.split(':').nth(1).filter(|partition| partition.starts_with("aws")).unwrap_or("aws");
    let bucket = format!("arn:{partition}:s3:::{bucket}");
    let within = format!("{}*", literal(prefix));
    let actions = match right {
        KeyRight::Read => READ,
        KeyRight::Write => WRITE,
    };
    let mut list = json!({ "Effect": "Allow", "Action": LIST, "Resource": bucket });
    if !prefix.is_empty() {
        list["Condition"] = json!({ "StringLike": { "s3:prefix": within } });
    }
    let objects = json!({ "Effect": "Allow", "Action": actions, "Resource": format!("{bucket}/{within}") });
    let policy = ascii(&json!({ "Version": "2012-10-17", "Statement": [objects, list] }));
    if policy.len() > POLICY_MAX {
        let what = format!("the prefix \"{}\"", prefix.escape_debug());
        let reason =
            format!("the policy of its keys would have {} characters, and STS takes {POLICY_MAX}", policy.len());
        return Err(UfsError::invalid(what, reason, "mount a shorter prefix, or leave s3.credentials.vended_role out"));
    }
    Ok(policy)
}

/// The pattern that fits this text only.
fn literal(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '*' | '?' | '$' => pattern.extend(['$', '{', character, '}']),
            _ => pattern.push(character),
        }
    }
    pattern
}

/// As JSON in ASCII: STS takes no characters beyond U+00FF.
fn ascii(document: &Value) -> String {
    let text = document.to_string();
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if (' '..='~').contains(&character) {
            escaped.push(character);
        } else {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLE: &str = "arn:aws:iam::123456789012:role/train";

    fn parsed(role: &str, prefix: &str, right: KeyRight) -> Value {
        serde_json::from_str(&of(role, "b", prefix, right).unwrap()).unwrap()
    }

    #[test]
    fn rights_end_where_the_prefix_does() {
        let policy = parsed(ROLE, "a/b/", KeyRight::Read);
        assert_eq!(policy["Version"], "2012-10-17");
        let [objects, list] = [&policy["Statement"][0], &policy["Statement"][1]];
        assert_eq!(objects["Resource"], "arn:aws:s3:::b/a/b/*");
        assert_eq!(objects["Action"], json!(["s3:GetObject", "s3:GetObjectVersion"]));
        let listing = json!(["s3:ListBucket", "s3:ListBucketVersions"]);
        assert_eq!((&list["Action"], &list["Resource"]), (&listing, &json!("arn:aws:s3:::b")));
        assert_eq!(list["Condition"], json!({ "StringLike": { "s3:prefix": "a/b/*" } }));
        let policy = parsed(ROLE, "a/b/", KeyRight::Write);
        let actions = policy["Statement"][0]["Action"].as_array().unwrap();
        for action in ["s3:GetObjectVersion", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"] {
            assert!(actions.contains(&action.into()), "{action}");
        }
        let is_harmless = |action: &str| !action.contains('*') && action != "s3:DeleteObjectVersion";
        assert!(actions.iter().all(|action| is_harmless(action.as_str().unwrap())), "{actions:?}");
        // A whole bucket is listed without a prefix, too.
        let policy = parsed(ROLE, "", KeyRight::Read);
        assert_eq!(policy["Statement"][0]["Resource"], "arn:aws:s3:::b/*");
        assert_eq!(policy["Statement"][1].get("Condition"), None);
    }

    #[test]
    fn what_means_something_in_a_pattern_stands_for_itself() {
        let policy = parsed(ROLE, "a*/$x?/\"é\u{1f600}/", KeyRight::Read);
        let pattern = "a${*}/${$}x${?}/\"é\u{1f600}/*";
        assert_eq!(policy["Statement"][0]["Resource"], format!("arn:aws:s3:::b/{pattern}"));
        assert_eq!(policy["Statement"][1]["Condition"]["StringLike"]["s3:prefix"], pattern);
        assert!(of(ROLE, "b", "é\u{1f600}/", KeyRight::Read).unwrap().is_ascii());
    }

    #[test]
    fn buckets_are_in_the_partition_of_the_role() {
        let resource = |role: &str| parsed(role, "", KeyRight::Read)["Statement"][1]["Resource"].clone();
        assert_eq!(resource("arn:aws-cn:iam::123456789012:role/train"), "arn:aws-cn:s3:::b");
        assert_eq!(resource("arn:minio:iam:::role/any"), "arn:aws:s3:::b");
    }

    #[test]
    fn a_policy_that_sts_does_not_take_is_refused_with_the_prefix() {
        assert!(of(ROLE, "b", &format!("{}/", "p".repeat(700)), KeyRight::Write).is_ok());
        let error = of(ROLE, "b", &format!("{}/", "p".repeat(1000)), KeyRight::Read).unwrap_err().to_string();
        assert!(error.contains("ppp/") && error.contains("2048") && error.contains("shorter prefix"), "{error}");
        // Each of these takes four characters.
        assert!(of(ROLE, "b", &format!("{}/", "*".repeat(300)), KeyRight::Read).is_err());
    }
}
