//! `--client`: which clients a mount is there for, how fast they may go on there, and whom their users count as.

use std::fmt::Write as _;

use cavern_conf::ByteSize;
use cavern_proto::master::{ClientRule, IdRange, UserLimits};
use clap::Args;

/// Between the ranges of one option.
const AND: char = '+';
const HOW: &str = "write it as NAME, or as NAME=OPTION,… with ro, rw, quotas, ttl, operations=N, bytes=SIZE, \
    root_squash, all_squash, anonuid=N, anongid=N, uids=LOW-HIGH or gids=LOW-HIGH (several with + between them)";

#[derive(Args)]
pub(super) struct ClientArgs {
    /// A client that the mount is there for, by the name in its certificate, with * for any characters. Several times:
    /// the first that fits counts. Without any it is there for all clients.
    ///
    /// Behind = there may be options, as exports of NFS have them: ro (to be read only, and without the keys of the
    /// bucket) or rw; operations=N and bytes=SIZE (as many in a second for each client, what is more waits: operations
    /// in the namespace, and what workers are read and written); and in fs-mode quotas (it may set quotas, which
    /// otherwise admins do) and ttl (the same of how long files live), root_squash (root is nobody),
    /// all_squash (everybody is), uids=LOW-HIGH and gids=LOW-HIGH (whoever is in none of these is nobody; several have
    /// a + in between), anonuid=N and anongid=N (who nobody is, 65534 otherwise). With root_squash or any behind it the
    /// users of the client are judged by the master.
    #[arg(long, value_name = "NAME[=OPTION,…]", value_parser = rule)]
    client: Vec<ClientRule>,
}

impl ClientArgs {
    pub(super) fn rules(&self) -> Vec<ClientRule> {
        self.client.clone()
    }
}

fn rule(text: &str) -> Result<ClientRule, String> {
    let (name, options) = match text.split_once('=') {
        Some((name, options)) => (name, Some(options)),
        None => (text, None),
    };
    if name.is_empty() {
        return Err(HOW.to_owned());
    }
    let (mut is_read_only, mut users) = (None, None::<UserLimits>);
    let mut rule = ClientRule { name: name.to_owned(), ..ClientRule::default() };
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        if let "ro" | "rw" = option {
            if is_read_only.replace(option == "ro").is_some() {
                return Err("ro or rw, once".to_owned());
            }
            continue;
        }
        if take_setting(&mut rule, option)? || take_rate(&mut rule, option)? {
            continue;
        }
        limit(users.get_or_insert_default(), option)?;
    }
    let read_only = is_read_only.unwrap_or(false);
    if read_only && rule.grants_settings() {
        return Err("a client that only reads sets neither quotas nor ttl: leave these out, or ro".to_owned());
    }
    Ok(ClientRule { read_only, users, ..rule })
}

/// Takes an option into what a client may set for others, if it is one of these.
fn take_setting(rule: &mut ClientRule, option: &str) -> Result<bool, String> {
    let is_granted = match option {
        "quotas" => &mut rule.sets_quotas,
        "ttl" => &mut rule.sets_ttls,
        _ => return Ok(false),
    };
    if std::mem::replace(is_granted, true) { Err(format!("{option}: once")) } else { Ok(true) }
}

/// Takes an option into the rates of a rule, if it is one of these.
fn take_rate(rule: &mut ClientRule, option: &str) -> Result<bool, String> {
    let (rate, per_second) = match option.split_once('=') {
        Some(("operations", text)) => {
            let operations = text.parse().map_err(|_| format!("{option}: {text:?} is no number"))?;
            (&mut rule.operations_per_second, operations)
        }
        Some(("bytes", text)) => {
            let bytes = text.parse::<ByteSize>().map_err(|error| format!("{option}: {error}"))?;
            (&mut rule.bytes_per_second, bytes.bytes())
        }
        _ => return Ok(false),
    };
    match (std::mem::replace(rate, per_second), per_second) {
        (_, 0) => {
            Err(format!("{option}: a client that may do nothing needs no rule; leave the option out for any number"))
        }
        (0, _) => Ok(true),
        _ => Err(format!("{option}: once")),
    }
}

/// Takes one option into the limits of users.
fn limit(users: &mut UserLimits, option: &str) -> Result<(), String> {
    // All ones are none to a kernel.
    let id = |text: &str| match text.parse::<u32>() {
        Ok(u32::MAX) | Err(_) => Err(format!("{option}: {text:?} is no number of a user or a group, 0 to 4294967294")),
        Ok(id) => Ok(id),
    };
    let range = |text: &str| {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (low, high) = (id(low)?, id(high)?);
        if low > high { Err(format!("{option}: {low} is behind {high}")) } else { Ok(IdRange { low, high }) }
    };
    let ranges = |text: &str| text.split(AND).map(range).collect::<Result<Vec<_>, _>>();
    match option.split_once('=') {
        None if option == "root_squash" => users.root_squash = true,
        None if option == "all_squash" => users.all_squash = true,
        Some(("anonuid", text)) => users.anon_uid = Some(id(text)?),
        Some(("anongid", text)) => users.anon_gid = Some(id(text)?),
        Some(("uids", text)) => users.uids.extend(ranges(text)?),
        Some(("gids", text)) => users.gids.extend(ranges(text)?),
        _ => return Err(format!("{option:?} is no option of a client: {HOW}")),
    }
    Ok(())
}

/// As `--client` has them.
pub(super) fn shown_rules(rules: &[ClientRule]) -> Vec<String> {
    rules.iter().map(shown_rule).collect()
}

fn shown_rule(rule: &ClientRule) -> String {
    let mut options = Vec::new();
    options.extend(rule.read_only.then(|| "ro".to_owned()));
    if !rule.read_only && (rule.users.is_some() || rule.has_rates() || rule.grants_settings()) {
        options.push("rw".to_owned());
    }
    options.extend(rule.sets_quotas.then(|| "quotas".to_owned()));
    options.extend(rule.sets_ttls.then(|| "ttl".to_owned()));
    let ClientRule { operations_per_second, bytes_per_second, .. } = *rule;
    options.extend((operations_per_second != 0).then(|| format!("operations={operations_per_second}")));
    options.extend((bytes_per_second != 0).then(|| format!("bytes={}", ByteSize::from_bytes(bytes_per_second))));
    if let Some(users) = &rule.users {
        options.extend(users.root_squash.then(|| "root_squash".to_owned()));
        options.extend(users.all_squash.then(|| "all_squash".to_owned()));
        options.extend(users.anon_uid.map(|uid| format!("anonuid={uid}")));
        options.extend(users.anon_gid.map(|gid| format!("anongid={gid}")));
        options.extend(shown_ranges("uids", &users.uids));
        options.extend(shown_ranges("gids", &users.gids));
    }
    match options.is_empty() {
        true => rule.name.clone(),
        false => format!("{}={}", rule.name, options.join(",")),
    }
}

fn shown_ranges(name: &str, ranges: &[IdRange]) -> Option<String> {
    let mut shown = format!("{name}=");
    for (place, IdRange { low, high }) in ranges.iter().enumerate() {
        if place > 0 {
            shown.push(AND);
        }
        let _written = if low == high { write!(shown, "{low}") } else { write!(shown, "{low}-{high}") };
    }
    (!ranges.is_empty()).then_some(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_shown_as_they_are_given() {
        for text in [
            "a",
            "a-*",
            "a=ro",
            "*=ro",
            "a=rw,root_squash",
            "a=rw,operations=2000",
            "a=rw,quotas",
            "a=rw,quotas,ttl,operations=7,root_squash",
            "a=ro,operations=1,bytes=64MiB",
            "a-*=rw,bytes=1500B,all_squash",
            "a=ro,all_squash,anonuid=7,anongid=8",
            "a=rw,root_squash,uids=1000-1999+3000,gids=100",
            "a=rw,root_squash,anonuid=4294967294,anongid=4294967294",
        ] {
            assert_eq!(shown_rules(&[rule(text).unwrap()]), [text]);
        }
        for (text, shown) in [
            ("a=rw", "a"),
            ("a=bytes=1024KiB,ro", "a=ro,bytes=1MiB"),
            ("a=root_squash", "a=rw,root_squash"),
            ("a=uids=1,uids=3-4", "a=rw,uids=1+3-4"),
        ] {
            assert_eq!(shown_rules(&[rule(text).unwrap()]), [shown]);
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in [
            "",
            "=ro",
            "a=",
            "a=ro=ro",
            "a=ro,rw",
            "a=ro,",
            "a=no_root_squash",
            "a=ro,quotas",
            "a=ttl,ro",
            "a=quotas,quotas",
            "a=quotas=1",
            "a=operations",
            "a=operations=0",
            "a=operations=-1",
            "a=operations=1.5",
            "a=operations=1,operations=2",
            "a=bytes=0",
            "a=bytes=1XiB",
            "a=bytes=1MiB,bytes=1MiB",
            "a=anonuid",
            "a=anonuid=x",
            "a=anonuid=-1",
            "a=anonuid=4294967295",
            "a=anongid=4294967295",
            "a=uids=1-4294967295",
            "a=uids=",
            "a=uids=9-8",
            "a=uids=1-2-3",
            "a=uids=1,2",
            "a=gids=4294967296",
        ] {
            assert!(rule(text).is_err(), "{text}");
        }
    }
}
