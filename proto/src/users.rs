//! Who a user of a client's host counts as in a mount that limits users, as NFS exports have it.

use crate::master::{IdRange, User, UserLimits};

/// User and group of nobody, where no others are given.
pub const NOBODY: u32 = 65_534;

impl IdRange {
    pub fn contains(&self, id: u32) -> bool {
        (self.low..=self.high).contains(&id)
    }
}

impl User {
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    pub fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }
}

impl UserLimits {
    /// Who a user counts as; one who is not given is nobody. Of groups, those that he may not be in are left out, and
    /// his own is that of nobody then.
    pub fn mapped(&self, user: Option<&User>) -> User {
        let nobody = User { uid: self.nobody(), gid: self.nobodys_group(), groups: Vec::new() };
        let Some(user) = user.filter(|user| !self.all_squash && self.has_uid(user.uid)) else { return nobody };
        let gid = if self.has_gid(user.gid) { user.gid } else { nobody.gid };
        let groups = user.groups.iter().copied().filter(|group| self.has_gid(*group)).collect();
        User { uid: user.uid, gid, groups }
    }

    /// Whether a user counts as himself, and so may own something.
    pub fn has_uid(&self, uid: u32) -> bool {
        !(self.root_squash && uid == 0) && is_within(&self.uids, uid)
    }

    /// Whether a group counts as itself.
    pub fn has_gid(&self, gid: u32) -> bool {
        !(self.root_squash && gid == 0) && is_within(&self.gids, gid)
    }

    pub fn nobody(&self) -> u32 {
        nobody_or(self.anon_uid)
    }

    pub fn nobodys_group(&self) -> u32 {
        nobody_or(self.anon_gid)
    }
}

/// An id of all ones is none to a kernel, and owns nothing.
fn nobody_or(id: Option<u32>) -> u32 {
    id.filter(|id| *id != u32::MAX).unwrap_or(NOBODY)
}

fn is_within(ranges: &[IdRange], id: u32) -> bool {
    ranges.is_empty() || ranges.iter().any(|range| range.contains(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
        User { uid, gid, groups: groups.to_vec() }
    }

    #[test]
    fn who_is_squashed_is_nobody_and_has_no_groups() {
        let root = UserLimits { root_squash: true, ..UserLimits::default() };
        assert_eq!(root.mapped(Some(&user(0, 0, &[0, 5]))), user(NOBODY, NOBODY, &[]));
        assert_eq!(root.mapped(Some(&user(7, 0, &[0, 5]))), user(7, NOBODY, &[5]), "group 0 is squashed as well");
        assert_eq!(root.mapped(Some(&user(7, 8, &[9]))), user(7, 8, &[9]));
        assert_eq!(root.mapped(None), user(NOBODY, NOBODY, &[]), "one who is not given");
        let all = UserLimits { all_squash: true, anon_uid: Some(3), anon_gid: Some(4), ..UserLimits::default() };
        assert_eq!(all.mapped(Some(&user(7, 8, &[9]))), user(3, 4, &[]));
        let none = UserLimits { anon_uid: Some(u32::MAX), anon_gid: Some(u32::MAX), ..all };
        assert_eq!(none.mapped(Some(&user(7, 8, &[9]))), user(NOBODY, NOBODY, &[]));
    }

    #[test]
    fn who_is_outside_of_the_ranges_is_nobody_and_groups_outside_are_left_out() {
        let ranges = |ranges: &[(u32, u32)]| ranges.iter().map(|&(low, high)| IdRange { low, high }).collect();
        let uids = ranges(&[(1000, 1999), (3000, 3000)]);
        let limits = UserLimits { uids, gids: ranges(&[(100, 200)]), ..UserLimits::default() };
        for (uid, is_himself) in [(1000, true), (1999, true), (3000, true), (999, false), (2000, false), (0, false)] {
            let mapped = limits.mapped(Some(&user(uid, 100, &[99, 200, 201])));
            assert_eq!(mapped == user(uid, 100, &[200]), is_himself, "{uid}: {mapped:?}");
            assert_eq!(mapped == user(NOBODY, NOBODY, &[]), !is_himself, "{uid}: {mapped:?}");
        }
        assert_eq!(limits.mapped(Some(&user(1000, 99, &[]))), user(1000, NOBODY, &[]));
    }
}
