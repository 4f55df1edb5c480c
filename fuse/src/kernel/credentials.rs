//! What the kernel does not send about a caller: the groups that he is in beside his own, and whether he may leave
//! set-user-ID bits of a file that he changes. Both are in `/proc` while he waits for his answer.

use cavern_proto::master::User;

use super::request::Caller;

/// The bit of CAP_FSETID in a set of capabilities.
const FSETID: u32 = 4;

/// Groups and capabilities of a caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    groups: Vec<u32>,
    keeps_privileges: bool,
}

impl Credentials {
    /// Of a caller that waits for an answer. One who cannot be looked at, since he is in another namespace of
    /// processes, is in his own group alone, and may do what his user may.
    pub async fn of(caller: Caller) -> Self {
        let status = match caller.thread {
            0 => None,
            thread => tokio::fs::read_to_string(format!("/proc/{thread}/status")).await.ok(),
        };
        Self::parse(caller, status.as_deref())
    }

    fn parse(caller: Caller, status: Option<&str>) -> Self {
        let line = |name: &str| status?.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let groups = line("Groups").unwrap_or_default().split_whitespace().filter_map(|group| group.parse().ok());
        // A privileged user of another user namespace has all capabilities, too, and none here.
        let has_capability = || {
            let effective = line("CapEff").and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
            effective.is_none_or(|set| set >> FSETID & 1 == 1)
        };
        Self { groups: groups.chain([caller.gid]).collect(), keeps_privileges: caller.uid == 0 && has_capability() }
    }

    /// Whether whatever he changes keeps its set-user-ID and set-group-ID bits: he has CAP_FSETID.
    pub fn keeps_privileges(&self) -> bool {
        self.keeps_privileges
    }

    /// Who he is for a master that judges what he asks for.
    pub fn into_user(self, caller: Caller) -> User {
        let Caller { uid, gid, .. } = caller;
        User { uid, gid, groups: self.groups }
    }

    pub fn is_in(&self, group: u32) -> bool {
        self.groups.contains(&group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_capabilities_are_those_of_the_process() {
        let status = "Name:\tsh\nGroups:\t4 24 1000 \nCapPrm:\t000001ffffffffff\nCapEff:\t0000000000000010\n";
        let of = |uid, status| Credentials::parse(Caller { uid, gid: 7, thread: 1 }, status);
        let root = of(0, Some(status));
        assert!(root.keeps_privileges() && [4, 24, 1000, 7].iter().all(|group| root.is_in(*group)) && !root.is_in(0));
        assert!(!of(1000, Some(status)).keeps_privileges(), "capabilities of another user namespace");
        let lacking = status.replace("10\n", "0f\n");
        assert!(!of(0, Some(lacking.as_str())).keeps_privileges());
        let unknown = of(0, None);
        assert!(unknown.keeps_privileges() && unknown.is_in(7) && !unknown.is_in(4));
        assert!(!of(1, None).keeps_privileges() && !of(1, Some("")).is_in(4));
    }

    #[tokio::test]
    async fn a_caller_is_found_by_his_thread() {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        let known = Credentials::of(Caller { uid: 0, gid: 4242, thread }).await;
        assert!(known.is_in(4242));
        let groups = rustix::process::getgroups().unwrap();
        assert!(groups.iter().all(|group| known.is_in(group.as_raw())));
    }
}
