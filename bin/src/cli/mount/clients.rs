//! `--client`: which clients a mount is there for.

use cavern_proto::master::ClientRule;
use clap::Args;

/// Behind a name: its client changes nothing.
const READ_ONLY: &str = "=ro";

#[derive(Args)]
pub(super) struct ClientArgs {
    /// A client that the mount is there for, by the name in its certificate, with * for any characters; with =ro behind
    /// it, to be read only, and without the keys of the bucket. Several times: the first that fits counts. Without any
    /// it is there for all clients.
    #[arg(long, value_name = "NAME[=ro]", value_parser = rule)]
    client: Vec<ClientRule>,
}

impl ClientArgs {
    pub(super) fn rules(&self) -> Vec<ClientRule> {
        self.client.clone()
    }
}

fn rule(text: &str) -> Result<ClientRule, String> {
    let (name, read_only) = match text.strip_suffix(READ_ONLY) {
        Some(name) => (name, true),
        None => (text, false),
    };
    if name.is_empty() || name.contains('=') {
        return Err(format!("write it as NAME, or as NAME{READ_ONLY} for a client that only reads"));
    }
    Ok(ClientRule { name: name.to_owned(), read_only })
}

/// As `--client` has them.
pub(super) fn shown_rules(rules: &[ClientRule]) -> Vec<String> {
    rules.iter().map(|rule| format!("{}{}", rule.name, if rule.read_only { READ_ONLY } else { "" })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_as_they_are_given() {
        for text in ["a", "a-*", "a=ro", "*=ro"] {
            assert_eq!(shown_rules(&[rule(text).unwrap()]), [text]);
        }
        for text in ["", "=ro", "a=rw", "a=ro=ro", "a="] {
            assert!(rule(text).is_err(), "{text}");
        }
    }
}
