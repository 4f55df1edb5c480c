//! Which clients a mount is there for, by the names in their certificates.

use crate::master::{ClientRule, Mount, UserLimits};

/// What a client may do in a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAccess {
    /// The mount is not there for it.
    None,
    ReadOnly,
    /// Whatever the mount allows.
    Full,
}

impl ClientAccess {
    pub fn can_see(self) -> bool {
        self != Self::None
    }
}

impl Mount {
    /// Whether there are clients that it is not there for.
    pub fn is_restricted(&self) -> bool {
        !self.clients.is_empty()
    }

    /// What the client of this name may do; the empty name is that of one that has not shown any.
    pub fn access_of(&self, client: &str) -> ClientAccess {
        if !self.is_restricted() {
            return ClientAccess::Full;
        }
        match self.rule_of(client) {
            None => ClientAccess::None,
            Some(rule) if rule.read_only => ClientAccess::ReadOnly,
            Some(_) => ClientAccess::Full,
        }
    }

    /// How the users of a client are limited, if they are.
    pub fn limits_of(&self, client: &str) -> Option<&UserLimits> {
        self.rule_of(client)?.users.as_ref()
    }

    /// Whether there are clients whose users are limited.
    pub fn limits_users(&self) -> bool {
        self.clients.iter().any(|rule| rule.users.is_some())
    }

    /// Operations and bytes in a second that a client may have; 0 for any number.
    pub fn rates_of(&self, client: &str) -> (u64, u64) {
        self.rule_of(client).map_or((0, 0), |rule| (rule.operations_per_second, rule.bytes_per_second))
    }

    /// Whether a client may set quotas in it.
    pub fn may_set_quotas(&self, client: &str) -> bool {
        self.rule_of(client).is_some_and(|rule| rule.sets_quotas)
    }

    /// Whether a client may set how long files in it live.
    pub fn may_set_ttls(&self, client: &str) -> bool {
        self.rule_of(client).is_some_and(|rule| rule.sets_ttls)
    }

    /// Whether there are clients that may set either.
    pub fn grants_settings(&self) -> bool {
        self.clients.iter().any(ClientRule::grants_settings)
    }

    /// Whether there are clients that go on no faster than at a rate.
    pub fn has_rates(&self) -> bool {
        self.clients.iter().any(ClientRule::has_rates)
    }

    fn rule_of(&self, client: &str) -> Option<&ClientRule> {
        self.clients.iter().find(|rule| rule.fits(client))
    }
}

impl ClientRule {
    /// Whether a client that it fits may set quotas, or how long files live.
    pub fn grants_settings(&self) -> bool {
        self.sets_quotas || self.sets_ttls
    }

    pub fn has_rates(&self) -> bool {
        self.operations_per_second != 0 || self.bytes_per_second != 0
    }

    /// Whether it is about the client of this name.
    pub fn fits(&self, client: &str) -> bool {
        !client.is_empty() && matches(self.name.as_bytes(), client.as_bytes())
    }
}

/// Whether a pattern, whose `*` stands for any characters, fits a name. Takes the product of their lengths at most.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name) = (0, 0);
    // Behind the last `*`, and up to where it reaches so far.
    let mut star = None;
    while in_name < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, in_name));
            }
            Some(byte) if *byte == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => {
                let Some((behind, reached)) = star else { return false };
                star = Some((behind, reached + 1));
                (at, in_name) = (behind, reached + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mount(rules: &[(&str, bool)]) -> Mount {
        let rules = rules.iter().map(|(name, read_only)| ClientRule {
            name: (*name).to_owned(),
            read_only: *read_only,
            ..ClientRule::default()
        });
        Mount { clients: rules.collect(), ..Mount::default() }
    }

    #[test]
    fn the_first_rule_that_fits_counts() {
        let mount = mount(&[("train-7", true), ("train-*", false), ("eval", true)]);
        for (client, access) in [
            ("train-7", ClientAccess::ReadOnly),
            ("train-70", ClientAccess::Full),
            ("train-", ClientAccess::Full),
            ("train", ClientAccess::None),
            ("eval", ClientAccess::ReadOnly),
            ("evaluation", ClientAccess::None),
            ("", ClientAccess::None),
        ] {
            assert_eq!(mount.access_of(client), access, "{client}");
        }
    }

    #[test]
    fn without_rules_it_is_there_for_all_and_with_any_not_for_whoever_has_no_name() {
        assert_eq!(mount(&[]).access_of(""), ClientAccess::Full);
        assert_eq!(mount(&[("*", false)]).access_of(""), ClientAccess::None);
        assert_eq!(mount(&[("*", false)]).access_of("a"), ClientAccess::Full);
    }

    #[test]
    fn rates_are_those_of_the_rule_that_fits() {
        let mut mount = mount(&[("a-1", false), ("a-*", false)]);
        assert!(!mount.has_rates());
        mount.clients[1].bytes_per_second = 7;
        assert!(mount.has_rates());
        mount.clients[0].operations_per_second = 5;
        assert_eq!(["a-1", "a-2", "b"].map(|client| mount.rates_of(client)), [(5, 0), (0, 7), (0, 0)]);
    }

    #[test]
    fn quotas_and_times_to_live_are_set_by_whom_the_rule_that_fits_lets_do_so() {
        let mut mount = mount(&[("a-1", false), ("a-*", false)]);
        assert!(!mount.grants_settings() && !mount.may_set_quotas("a-2"));
        (mount.clients[1].sets_quotas, mount.clients[0].sets_ttls) = (true, true);
        assert!(mount.grants_settings());
        assert_eq!(["a-1", "a-2", "b", ""].map(|client| mount.may_set_quotas(client)), [false, true, false, false]);
        assert_eq!(["a-1", "a-2", "b", ""].map(|client| mount.may_set_ttls(client)), [true, false, false, false]);
        assert!(!Mount::default().may_set_quotas("a-1"));
    }

    #[test]
    fn stars_stand_for_any_characters() {
        for (pattern, name, fits) in [
            ("*", "a", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "axxbyybzc", true),
            ("a*b*c", "axxbyyb", false),
            ("*a", "baa", true),
            ("**a**", "a", true),
            ("a", "ab", false),
            ("ab", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
    }

    proptest! {
        #[test]
        fn it_matches_as_the_definition_says(pattern in "[ab*]{0,6}", name in "[ab]{0,8}") {
            fn defined(pattern: &[u8], name: &[u8]) -> bool {
                match pattern.split_first() {
                    None => name.is_empty(),
                    Some((b'*', rest)) => (0..=name.len()).any(|taken| defined(rest, &name[taken..])),
                    Some((byte, rest)) => name.first() == Some(byte) && defined(rest, &name[1..]),
                }
            }
            let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
            prop_assert_eq!(matches(pattern, name), defined(pattern, name));
        }
    }
}
