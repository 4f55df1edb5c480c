//! Keys that are vended, as they may be shown: whose they are, and until when.

use cavern_proto::master::{KeyStatus, Mount};
use cavern_proto::s3_options::VENDED_ROLE;
use serde::Serialize;

use crate::cli::cert::timestamp;
use crate::console;

/// How the keys of a mount fare that are vended.
#[derive(Debug, Serialize)]
pub struct KeysView {
    /// ARN of the role whose keys they are.
    pub role: String,
    /// When the last ones end that the leader has given out; absent where there are none.
    pub read_until: Option<String>,
    pub write_until: Option<String>,
    /// Why there are no newer ones.
    pub last_error: String,
}

impl KeysView {
    /// `None` where the keys of the mount are not vended.
    pub fn of(mount: &Mount, status: Option<&KeyStatus>) -> Option<Self> {
        let role = mount.options.get(VENDED_ROLE).filter(|role| !role.is_empty())?.clone();
        let status = status.cloned().unwrap_or_default();
        let until = |ns: i64| timestamp(ns / 1_000_000_000).filter(|_| ns > 0);
        let (read_until, write_until) = (until(status.read_until_ns), until(status.write_until_ns));
        Some(Self { role, read_until, write_until, last_error: status.last_error })
    }

    /// Whether STS has given none when it was asked last.
    pub fn is_failing(&self) -> bool {
        !self.last_error.is_empty()
    }

    /// What there is to be said of them.
    pub fn remarks(&self) -> Vec<String> {
        let of = |what: &str, until: Option<&String>| until.map(|until| format!("until {until} to {what}"));
        let all: Vec<_> = [of("read", self.read_until.as_ref()), of("write", self.write_until.as_ref())]
            .into_iter()
            .flatten()
            .collect();
        let ends = if all.is_empty() { "none is given out yet".to_owned() } else { all.join(", ") };
        let mut remarks = vec![format!("keys are vended of {}: {ends}", console::escaped(&self.role))];
        if self.is_failing() {
            remarks.push(format!("no new keys are given out: {}", console::escaped(&self.last_error)));
        }
        remarks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_shown_until_when_keys_last_and_why_there_are_no_others() {
        let options = [(VENDED_ROLE.to_owned(), "arn:aws:iam::1:role/r".to_owned())].into();
        let mount = Mount { options, ..Mount::default() };
        assert!(KeysView::of(&Mount::default(), None).is_none());
        let none = KeysView::of(&mount, None).unwrap();
        assert_eq!(none.remarks(), ["keys are vended of arn:aws:iam::1:role/r: none is given out yet"]);
        let status = KeyStatus {
            read_until_ns: 1_700_000_000_000_000_000,
            last_error: "STS\nis down".to_owned(),
            ..KeyStatus::default()
        };
        let view = KeysView::of(&mount, Some(&status)).unwrap();
        assert_eq!(
            view.remarks(),
            [
                "keys are vended of arn:aws:iam::1:role/r: until 2023-11-14T22:13:20Z to read",
                r"no new keys are given out: STS\nis down"
            ]
        );
    }
}
