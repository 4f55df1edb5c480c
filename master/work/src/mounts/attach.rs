//! Attaching buckets to the namespace.

use cavern_proto::master::{
    AccessMode, AttributePolicy, ClientRule, Consistency, Existing, Mount, Names, UserLimits, WriteType,
};
use cavern_proto::record::{AttachMount, RequestRecord};
use cavern_proto::{CHUNK_BYTES, REPLICAS_MAX, StoreUri};
use cavern_state::outcome::{Attachment, Repeatable};
use cavern_ufs::{Contents, Ufs, UfsError};

use super::changes::{MountChanges, MountPolicy};
use super::claim::Claimed;
use crate::error::WorkError;
use crate::namespace::components;
use crate::request::Request;

const BLOCK_SIZE_DEFAULT: u64 = 64 << 20;
const BLOCK_SIZE_MIN: u64 = 1 << 20;
const BLOCK_SIZE_MAX: u64 = 1 << 30;
const METADATA_TTL_DEFAULT_MS: u64 = 60_000;
/// A year.
const METADATA_TTL_MAX_MS: u64 = 365 * 86_400_000;
/// Options of a mount, and bytes of each.
const OPTIONS_MAX: usize = 64;
const OPTION_BYTES_MAX: usize = 8192;
/// Rules about clients, and bytes of the name in one.
const CLIENT_RULES_MAX: usize = 64;
const CLIENT_NAME_MAX: usize = 64;
/// Ranges of users in a rule, and of groups.
const RANGES_MAX: usize = 16;

impl MountChanges {
    /// Verifies a mount request and its bucket, and records it, once. What is not given gets its default. Also says
    /// what is under the prefix, unless the mount was there before.
    pub async fn mount_once(
        &self,
        request: &Request,
        wanted: Mount,
        policy: MountPolicy,
    ) -> Result<(Mount, Option<Contents>), WorkError> {
        if let Some(answer) = request.answer(&self.lookups.reader).await? {
            return Ok((self.mounted_before(answer)?, None));
        }
        let (mounts, wanted_existing) = (&self.lookups.mounts, wanted.existing());
        let mut mount = complete(wanted)?;
        let ufs = mounts.open_ufs(&mount)?;
        let mounts_epoch = mounts.compare_with_others(&mount).await?;
        let contents = ufs.check().await?.contents;
        if mount.write_type() != WriteType::FsMode || contents != Contents::Objects {
            mount.existing = Existing::None as i32;
        }
        let _vendor = mounts.check_vending(&mount).await?;
        let claimed = match policy {
            MountPolicy::Check(take_over) => {
                self.claims.check(&ufs, &mount, take_over).await?;
                return Ok((mount, Some(contents)));
            }
            MountPolicy::Record(take_over) => self.claims.claim(&ufs, &mount, take_over).await?,
        };
        mounts.will_be(&mount);
        mount.created_ns = self.lookups.reader.clock().now_ns();
        let (changes, request) = (self.clone(), request.clone());
        let recorded = self.tasks.to_the_end(async move {
            changes.record(&request, (mount, wanted_existing), mounts_epoch, (&ufs, claimed)).await
        });
        let (mount, is_new) = recorded.await?;
        Ok((mount, is_new.then_some(contents)))
    }

    /// Records a mount, and begins with it. Gives what is there then, and whether that was made now.
    async fn record(
        &self,
        request: &Request,
        (mount, wanted_existing): (Mount, Existing),
        mut mounts_epoch: u64,
        (ufs, claimed): (&Ufs, Claimed),
    ) -> Result<(Mount, bool), WorkError> {
        let mounts = &self.lookups.mounts;
        let recorded = loop {
            let sealed = mounts.seal(mount.clone())?;
            let attach = AttachMount { mount: Some(sealed), mounts_epoch };
            match self.proposer.propose(request.command(attach)).await? {
                // Each time, another mount has come, gone or changed.
                Repeatable::First(Attachment::OutOfDate) => mounts_epoch = mounts.compare_with_others(&mount).await?,
                Repeatable::First(Attachment::Mount(recorded)) => break recorded,
                Repeatable::First(Attachment::Exists(existing)) => {
                    let existing = mounts.unseal(*existing)?;
                    if claimed == Claimed::Now && existing.uri != mount.uri {
                        self.give_up_claim(ufs, &mount).await;
                    }
                    return Ok((if_same(existing, mount, wanted_existing)?, false));
                }
                Repeatable::First(Attachment::Refused(reason)) => {
                    if claimed == Claimed::Now {
                        self.give_up_claim(ufs, &mount).await;
                    }
                    return Err(WorkError::Refused(reason));
                }
                Repeatable::Repeated(answer) => return Ok((self.mounted_before(*answer)?, false)),
            }
        };
        let open = mounts.get(recorded.id)?;
        tracing::info!(mount = recorded.path, uri = recorded.uri, "a bucket is mounted");
        let recorded = open.mount.clone();
        let is_to_be_listed = recorded.existing() != Existing::None;
        open.set_index(is_to_be_listed, 0, 0, u64::from(is_to_be_listed));
        match open.is_fs_mode() {
            true => self.lookups.listings.start_existing(open),
            false => self.lookups.listings.start_index(open),
        }
        Ok((recorded, true))
    }

    /// The answer to a request that has made a mount.
    fn mounted_before(&self, answer: RequestRecord) -> Result<Mount, WorkError> {
        let made = answer.mount.ok_or_else(|| WorkError::Invalid("this request's id is that of another one".into()))?;
        // It may have been detached since.
        let open = WorkError::if_found(self.lookups.mounts.get(made.id))?;
        Ok(open.map_or(made, |open| open.mount.clone()))
    }
}

/// What is mounted already, if it is what was wanted.
fn if_same(existing: Mount, wanted: Mount, wanted_existing: Existing) -> Result<Mount, WorkError> {
    if wanted_existing == Existing::Recovered && existing.existing() == Existing::Indexed {
        return Err(WorkError::AlreadyExists(format!(
            "{} is mounted already, and was not recovered: unmount it first, or leave --recover out",
            existing.path
        )));
    }
    let same = Mount {
        id: existing.id,
        root_inode: existing.root_inode,
        created_ns: existing.created_ns,
        existing: existing.existing,
        frozen_below: existing.frozen_below,
        frozen_inodes: existing.frozen_inodes,
        settled_below: existing.settled_below,
        probed_xattrs: existing.probed_xattrs,
        ..wanted
    };
    if same == existing {
        return Ok(existing);
    }
    let Mount { path, uri, .. } = &existing;
    Err(WorkError::AlreadyExists(match *uri == same.uri {
        true => format!(
            "{path} already carries {uri} with other options: change them with `cv mount update {path}`, or choose \
             another path"
        ),
        false => format!("{path} already carries {uri}: unmount it first, or choose another path"),
    }))
}

/// The path of a mount, in its only spelling.
pub(super) fn normalized(path: &str) -> Result<String, WorkError> {
    let names = components(path)?;
    if names.is_empty() {
        return Err(WorkError::Invalid("the root of the namespace is no mount: give a path such as /data".into()));
    }
    Ok(format!("/{}", names.join("/")))
}

/// Nothing is mounted at a path.
pub(super) fn not_mounted(path: &str) -> WorkError {
    WorkError::NotFound(format!("{path} is not a mount: cv mount lists the mounts"))
}

fn invalid<T>(reason: impl Into<String>) -> Result<T, WorkError> {
    Err(WorkError::Invalid(reason.into()))
}

/// Refuses a request if this is so.
fn refuse(is_so: bool, reason: impl Into<String>) -> Result<(), WorkError> {
    if is_so { invalid(reason) } else { Ok(()) }
}

/// Refuses limits of users that nobody could keep to, or that limit none: an id of all ones is none in the kernel, and
/// root may do everything.
fn check_limits(name: &str, users: &UserLimits) -> Result<(), WorkError> {
    let ranges = || users.uids.iter().chain(&users.gids);
    let are_many = users.uids.len() > RANGES_MAX || users.gids.len() > RANGES_MAX;
    refuse(are_many, format!("the rule of {name} has more than {RANGES_MAX} ranges of users, or of groups"))?;
    if let Some(range) = ranges().find(|range| range.low > range.high) {
        return invalid(format!("the rule of {name} has a range from {} to {}, which is empty", range.low, range.high));
    }
    let (none, last) = (u32::MAX, u32::MAX - 1);
    let has_none = ranges().any(|range| range.high == none) || [users.anon_uid, users.anon_gid].contains(&Some(none));
    refuse(has_none, format!("the rule of {name} has {none} for an id, which is none: give {last} or less"))?;
    let is_root = [users.nobody(), users.nobodys_group()].contains(&0);
    refuse(is_root, format!("by the rule of {name} nobody is root: give anonuid and anongid of 1 or more"))
}

fn check_rules(rules: &[ClientRule]) -> Result<(), WorkError> {
    let are_many = rules.len() > CLIENT_RULES_MAX;
    refuse(are_many, format!("{} rules about clients: a mount has at most {CLIENT_RULES_MAX}", rules.len()))?;
    let is_known = |character: char| character.is_ascii_alphanumeric() || "-_.*".contains(character);
    for rule in rules {
        let ClientRule { name, users, read_only, .. } = rule;
        if name.is_empty() || name.len() > CLIENT_NAME_MAX || !name.chars().all(is_known) {
            let shown: String = name.chars().take(CLIENT_NAME_MAX).collect();
            return invalid(format!(
                "{shown:?} is no name of a client: 1 to {CLIENT_NAME_MAX} letters, digits, -, _ or ., as certificates \
                 have them, and * for any characters"
            ));
        }
        let is_torn = *read_only && rule.grants_settings();
        refuse(
            is_torn,
            format!("by its rule {name} only reads, and sets quotas or times to live: leave ro out, or quotas and ttl"),
        )?;
        if let Some(users) = users {
            check_limits(name, users)?;
        }
    }
    Ok(())
}

/// A mount request with its defaults, checked.
pub(super) fn complete(mut mount: Mount) -> Result<Mount, WorkError> {
    mount.path = normalized(&mount.path)?;
    mount.uri = StoreUri::parse(&mount.uri).map_err(UfsError::from)?.to_string();
    let store = mount.capabilities();
    (mount.id, mount.root_inode, mount.users) = (0, 0, None);
    match mount.write_type() {
        WriteType::CacheMode if mount.access_mode() == AccessMode::ReadWrite && !store.writes => {
            return invalid("a directory tree cannot be written to by way of a mount: give it an s3:// bucket");
        }
        WriteType::CacheMode => {}
        WriteType::FsMode if mount.access_mode() == AccessMode::ReadOnly => {
            return invalid("an fs-mode mount is there to be written to: mount the prefix in cache-mode to read it");
        }
        WriteType::FsMode if !store.writes => {
            return invalid("a directory tree cannot keep what an fs-mode mount writes: give it an s3:// bucket");
        }
        WriteType::FsMode if mount.consistency() == Consistency::Strict => {}
        // What is there is what the namespace says, whatever the bucket has.
        WriteType::FsMode => mount.consistency = Consistency::Never as i32,
        WriteType::Unspecified => return invalid("the write type is neither cache-mode nor fs-mode"),
    }
    // What the write type has it to be anyway is not recorded.
    match (AccessMode::try_from(mount.access_mode), mount.write_type()) {
        (Ok(AccessMode::ReadWrite), WriteType::CacheMode) | (Ok(AccessMode::Unspecified), _) => {}
        (Ok(_), _) => mount.access_mode = AccessMode::Unspecified as i32,
        (Err(_), _) => return invalid("the access mode is neither read-only nor read-write"),
    }
    match (AttributePolicy::try_from(mount.attributes), mount.write_type()) {
        (Ok(AttributePolicy::Refuse), _) => {}
        (Ok(AttributePolicy::Keep), WriteType::FsMode) => {
            return invalid("fs-mode keeps all attributes anyway: leave --attributes out");
        }
        (Ok(AttributePolicy::Keep), _) if !store.metadata => {
            return invalid("a directory tree has nothing that keeps attributes beside the bytes of an object");
        }
        (Ok(AttributePolicy::Keep), _) => {}
        (Err(_), _) => return invalid("attributes are neither refused nor kept"),
    }
    match (mount.existing(), mount.write_type()) {
        (Existing::Recovered | Existing::Indexed, WriteType::FsMode) => {}
        (Existing::Recovered, _) => {
            return invalid("only fs-mode can be recovered: in cache-mode the bucket is the truth as it is");
        }
        (_, WriteType::FsMode) => mount.existing = Existing::Recovered as i32,
        _ => mount.existing = Existing::None as i32,
    }
    let is_fs_mode = mount.write_type() == WriteType::FsMode;
    let Ok(names) = Names::try_from(mount.names) else { return invalid("names are neither delegated nor synced") };
    let are_not_ours = names == Names::Synced && !is_fs_mode;
    refuse(are_not_ours, "only the names of an fs-mode mount can be synced: in cache-mode the bucket has them")?;
    check_rules(&mount.clients)?;
    refuse(
        mount.limits_users() && !is_fs_mode,
        "users are limited in fs-mode only: in cache-mode clients change the bucket, which knows no users. Leave \
         root_squash and its like out, or allow the client to read only (NAME=ro)",
    )?;
    refuse(
        mount.grants_settings() && !is_fs_mode,
        "only directories of fs-mode mounts have quotas and times to live: leave quotas and ttl out of the rules about \
         clients",
    )?;
    let is_long = |(name, value): (&String, &String)| name.len() + value.len() > OPTION_BYTES_MAX;
    let are_many = mount.options.len() > OPTIONS_MAX || mount.options.iter().any(is_long);
    refuse(are_many, format!("a mount has at most {OPTIONS_MAX} options of {OPTION_BYTES_MAX} bytes"))?;
    if mount.block_size == 0 {
        mount.block_size = BLOCK_SIZE_DEFAULT;
    }
    if !(BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&mount.block_size)
        || !mount.block_size.is_multiple_of(u64::from(CHUNK_BYTES))
    {
        return invalid(format!(
            "the block size {} is not a multiple of 128 KiB between 1 MiB and 1 GiB: try 64MiB",
            mount.block_size
        ));
    }
    mount.replicas = mount.replicas.max(1);
    let are_many = mount.replicas > REPLICAS_MAX;
    refuse(are_many, format!("{} replicas of a cache are too many: at most {REPLICAS_MAX}", mount.replicas))?;
    if mount.metadata_ttl_ms == 0 {
        mount.metadata_ttl_ms = METADATA_TTL_DEFAULT_MS;
    }
    let is_long = mount.metadata_ttl_ms > METADATA_TTL_MAX_MS;
    refuse(is_long, "the metadata TTL is longer than a year: use --consistency never")?;
    match Consistency::try_from(mount.consistency) {
        Ok(Consistency::Unspecified) => mount.consistency = Consistency::Ttl as i32,
        Ok(Consistency::Strict) if !is_fs_mode => {
            return invalid("only fs-mode can be strict: in cache-mode the bucket is changed by others as well");
        }
        Ok(_) => {}
        Err(_) => return invalid("the consistency is not one of ttl, always, never, strict"),
    }
    Ok(mount)
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::IdRange;

    use super::*;

    fn wanted() -> Mount {
        let write_type = WriteType::CacheMode as i32;
        Mount { path: "//a/b/".into(), uri: "memory://m/".into(), write_type, ..Mount::default() }
    }

    #[test]
    fn requests_are_completed() {
        let mount = complete(wanted()).unwrap();
        assert_eq!((mount.path.as_str(), mount.uri.as_str()), ("/a/b", "memory://m"));
        for (uri, spelling) in [("S3://b/p//", "s3://b/p"), ("file:///", "file:///")] {
            assert_eq!(complete(Mount { uri: uri.into(), ..wanted() }).unwrap().uri, spelling);
        }
        assert_eq!((mount.block_size, mount.replicas, mount.metadata_ttl_ms), (64 << 20, 1, 60_000));
        assert_eq!(mount.consistency(), Consistency::Ttl);
        let with =
            |access: AccessMode| complete(Mount { access_mode: access as i32, ..wanted() }).unwrap().access_mode();
        assert_eq!(with(AccessMode::ReadOnly), AccessMode::Unspecified);
        assert_eq!(with(AccessMode::ReadWrite), AccessMode::ReadWrite);
    }

    fn limiting(users: UserLimits) -> Vec<ClientRule> {
        vec![ClientRule { name: "a".into(), users: Some(users), ..ClientRule::default() }]
    }

    #[test]
    fn impossible_requests_are_refused() {
        let broken: [fn(&mut Mount); 30] = [
            |mount| {
                mount.clients = vec![ClientRule { name: "a".into(), sets_quotas: true, ..ClientRule::default() }];
            },
            |mount| {
                let (name, read_only, sets_ttls) = ("a".into(), true, true);
                mount.write_type = WriteType::FsMode as i32;
                mount.clients = vec![ClientRule { name, read_only, sets_ttls, ..ClientRule::default() }];
            },
            |mount| mount.clients = vec![ClientRule::default()],
            |mount| mount.clients = vec![ClientRule { name: "a/b".into(), ..ClientRule::default() }],
            |mount| mount.clients = vec![ClientRule { name: "*".into(), ..ClientRule::default() }; 65],
            |mount| mount.clients = limiting(UserLimits::default()),
            |mount| {
                let uids = vec![IdRange { low: 2, high: 1 }];
                mount.write_type = WriteType::FsMode as i32;
                mount.clients = limiting(UserLimits { uids, ..UserLimits::default() });
            },
            |mount| {
                mount.write_type = WriteType::FsMode as i32;
                mount.clients = limiting(UserLimits { anon_gid: Some(u32::MAX), ..UserLimits::default() });
            },
            |mount| {
                mount.write_type = WriteType::FsMode as i32;
                mount.clients = limiting(UserLimits { anon_uid: Some(u32::MAX), ..UserLimits::default() });
            },
            |mount| {
                let gids = vec![IdRange { low: 1, high: 2 }; 17];
                mount.write_type = WriteType::FsMode as i32;
                mount.clients = limiting(UserLimits { gids, ..UserLimits::default() });
            },
            |mount| (mount.write_type, mount.uri) = (WriteType::FsMode as i32, "file:///d".into()),
            |mount| (mount.access_mode, mount.uri) = (AccessMode::ReadWrite as i32, "file:///d".into()),
            |mount| (mount.access_mode, mount.write_type) = (AccessMode::ReadOnly as i32, WriteType::FsMode as i32),
            |mount| mount.access_mode = 7,
            |mount| mount.attributes = 7,
            |mount| (mount.attributes, mount.write_type) = (1, WriteType::FsMode as i32),
            |mount| (mount.attributes, mount.uri) = (1, "file:///d".into()),
            |mount| (mount.access_mode, mount.uri) = (AccessMode::ReadWrite as i32, "FILE:///d".into()),
            |mount| mount.existing = Existing::Recovered as i32,
            |mount| mount.path = "/".into(),
            |mount| mount.path = "a".into(),
            |mount| mount.path = "/a/../b".into(),
            |mount| mount.write_type = 0,
            |mount| mount.block_size = 1 << 19,
            |mount| mount.block_size = (1 << 20) + 1,
            |mount| mount.replicas = 9,
            |mount| mount.consistency = 77,
            |mount| mount.names = 77,
            |mount| mount.names = Names::Synced as i32,
            |mount| mount.metadata_ttl_ms = u64::MAX,
        ];
        for (number, change) in broken.into_iter().enumerate() {
            let mut mount = wanted();
            change(&mut mount);
            assert!(matches!(complete(mount), Err(WorkError::Invalid(_))), "case {number}");
        }
    }
}
