//! `--client`: which clients a mount is there for, how fast they may go on there, and whom their users count as.

use cavern_conf::ByteSize;
use cavern_proto::master::{ClientRule, IdRange};
use clap::Args;

/// Between the ranges of one option.
const AND: &str = "+";
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
    /// users of the client are checked by the master.
    #[arg(long, value_name = "NAME[=OPTION,…]", value_parser = rule)]
    pub(super) client: Vec<ClientRule>,
}

fn rule(text: &str) -> Result<ClientRule, String> {
    let (name, options) = text.split_once('=').map_or((text, None), |(name, options)| (name, Some(options)));
    if name.is_empty() {
        return Err(HOW.to_owned());
    }
    let mut rule = ClientRule { name: name.to_owned(), ..ClientRule::default() };
    let mut given: Vec<&str> = Vec::new();
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        let (key, value) = option.split_once('=').map_or((option, None), |(key, value)| (key, Some(value)));
        let once = if matches!(key, "ro" | "rw") { "ro or rw" } else { key };
        if given.contains(&once) && !matches!(key, "uids" | "gids") {
            return Err(format!("{once}: once"));
        }
        given.push(once);
        take(&mut rule, key, value).map_err(|wrong| format!("{option}: {wrong}"))?;
    }
    if rule.read_only && rule.grants_settings() {
        return Err("a client that only reads sets neither quotas nor ttl: leave these out, or ro".to_owned());
    }
    Ok(rule)
}

/// Takes one option into a rule.
fn take(rule: &mut ClientRule, key: &str, value: Option<&str>) -> Result<(), String> {
    let rate = |rate: u64| match rate {
        0 => Err("a client that may do nothing needs no rule; leave the option out for any number".to_owned()),
        rate => Ok(rate),
    };
    match (key, value) {
        ("ro", None) => rule.read_only = true,
        ("rw", None) => {}
        ("quotas", None) => rule.sets_quotas = true,
        ("ttl", None) => rule.sets_ttls = true,
        ("operations", Some(text)) => {
            rule.operations_per_second = rate(text.parse::<u64>().map_err(|_| format!("{text:?} is no number"))?)?;
        }
        ("bytes", Some(text)) => {
            let bytes = text.parse::<ByteSize>()?;
            rule.bytes_per_second = rate(bytes.bytes())?;
        }
        ("root_squash", None) => rule.users.get_or_insert_default().root_squash = true,
        ("all_squash", None) => rule.users.get_or_insert_default().all_squash = true,
        ("anonuid", Some(text)) => rule.users.get_or_insert_default().anon_uid = Some(id(text)?),
        ("anongid", Some(text)) => rule.users.get_or_insert_default().anon_gid = Some(id(text)?),
        ("uids", Some(text)) => rule.users.get_or_insert_default().uids.extend(ranges(text)?),
        ("gids", Some(text)) => rule.users.get_or_insert_default().gids.extend(ranges(text)?),
        _ => return Err(format!("no option of a client: {HOW}")),
    }
    Ok(())
}

fn id(text: &str) -> Result<u32, String> {
    // All ones are none to a kernel.
    let id = text.parse().ok().filter(|id| *id != u32::MAX);
    id.ok_or_else(|| format!("{text:?} is no number of a user or a group, 0 to 4294967294"))
}

fn ranges(text: &str) -> Result<Vec<IdRange>, String> {
    let range = |text: &str| {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (low, high) = (id(low)?, id(high)?);
        if low > high { Err(format!("{low} is behind {high}")) } else { Ok(IdRange { low, high }) }
    };
    text.split(AND).map(range).collect()
}

/// As `--client` has it.
pub(super) fn shown_rule(rule: &ClientRule) -> String {
    let is_limited = rule.users.is_some() || rule.has_rates() || rule.grants_settings();
    let users = rule.users.clone().unwrap_or_default();
    let flag = |is_set: bool, name: &str| is_set.then(|| name.to_owned());
    let number = |name: &str, number: u64| format!("{name}={number}");
    let (operations, bytes) = (rule.operations_per_second, rule.bytes_per_second);
    let options = [
        flag(rule.read_only, "ro"),
        flag(!rule.read_only && is_limited, "rw"),
        flag(rule.sets_quotas, "quotas"),
        flag(rule.sets_ttls, "ttl"),
        (operations != 0).then(|| number("operations", operations)),
        (bytes != 0).then(|| format!("bytes={}", ByteSize::from_bytes(bytes))),
        flag(users.root_squash, "root_squash"),
        flag(users.all_squash, "all_squash"),
        users.anon_uid.map(|uid| number("anonuid", uid.into())),
        users.anon_gid.map(|gid| number("anongid", gid.into())),
        shown_ranges("uids", &users.uids),
        shown_ranges("gids", &users.gids),
    ];
    let options: Vec<String> = options.into_iter().flatten().collect();
    if options.is_empty() { rule.name.clone() } else { format!("{}={}", rule.name, options.join(",")) }
}

fn shown_ranges(name: &str, ranges: &[IdRange]) -> Option<String> {
    let range = |IdRange { low, high }: &IdRange| match low == high {
        true => low.to_string(),
        false => format!("{low}-{high}"),
    };
    let shown: Vec<String> = ranges.iter().map(range).collect();
    (!shown.is_empty()).then(|| format!("{name}={}", shown.join(AND)))
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
            assert_eq!(shown_rule(&rule(text).unwrap()), text);
        }
        for (text, shown) in [
            ("a=rw", "a"),
            ("a=bytes=1024KiB,ro", "a=ro,bytes=1MiB"),
            ("a=root_squash", "a=rw,root_squash"),
            ("a=uids=1,uids=3-4", "a=rw,uids=1+3-4"),
        ] {
            assert_eq!(shown_rule(&rule(text).unwrap()), shown);
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
