//! Files whose time to live is over: the leader goes through all inodes now and then, and finds out which rule holds
//! for each.
//!
//! A rule belongs to a directory and holds for the files in and below it, up to directories with rules of their own.
//! What counts is the time of the last change (ctime), which no program can set; so a file that was copied here with an
//! old mtime lives as long as any other. Reading does not count. There is no index that could be wrong: a rule that
//! changes holds for everything from the next round on, and a round is a scan in the order of the inodes.

use std::collections::HashMap;
use std::time::Duration;

use cavern_proto::master::{FreeFate, TtlAction};
use cavern_proto::record::command::Command;
use cavern_proto::record::{Expire, InodeRecord, TtlRecord};
use tokio_util::sync::CancellationToken;

use crate::MasterError;
use crate::clock::Clock;
use crate::metrics::ExpiryMetrics;
use crate::service::Services;
use crate::state::records::is_directory;
use crate::state::{Outcome, Tables, is_clean};

/// Inodes looked at with one read.
const PAGE: usize = 1000;
/// Between two looks at the rules.
const TICK: Duration = Duration::from_secs(1);
/// A round begins when a tenth of the shortest time is over, but not more rarely than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// Directories of which the rule is remembered at a time.
const REMEMBERED: usize = 100_000;

/// Rules by directory.
type Rules = HashMap<u64, TtlRecord>;

/// What is to be done about a file.
enum ExpiryAction {
    Free(u64),
    Remove(Expire),
}

/// Goes on until `stop`.
pub async fn keep_expiring(services: Services, metrics: ExpiryMetrics, stop: CancellationToken) {
    let work = async {
        let (mut last, mut since) = (Rules::new(), TICK);
        loop {
            tokio::time::sleep(TICK).await;
            since += TICK;
            let rules = match rules(&services).await {
                Ok(rules) => rules,
                Err(error) => {
                    tracing::warn!("which files are to expire is not known: {error}");
                    continue;
                }
            };
            let shortest = rules.values().map(|rule| Duration::from_secs(rule.seconds)).min();
            let Some(shortest) = shortest else { continue };
            if rules == last && since < (shortest / 10).clamp(TICK, LONGEST_PAUSE) {
                continue;
            }
            if let Err(error) = sweep(&services, &rules, &metrics).await {
                tracing::warn!("files whose time is over are not expired: {error}");
            }
            (last, since) = (rules, Duration::ZERO);
        }
    };
    tokio::select! {
        () = work => {}
        () = stop.cancelled() => {}
    }
}

async fn rules(services: &Services) -> Result<Rules, MasterError> {
    let all = services.lookups.reader.read(|tables| tables.ttls(0)).await?;
    Ok(all.ttls.into_iter().map(|ttl| (ttl.inode, TtlRecord { seconds: ttl.seconds, action: ttl.action })).collect())
}

async fn sweep(services: &Services, rules: &Rules, metrics: &ExpiryMetrics) -> Result<(), MasterError> {
    let mut after = 0;
    let mut governing: HashMap<u64, Option<TtlRecord>> = HashMap::new();
    loop {
        let (reader, rules, mut known) = (services.lookups.reader.clone(), rules.clone(), governing);
        let look = services.lookups.reader.read(move |tables| {
            let (mut last, mut due) = (None, Vec::new());
            for (inode, record) in tables.inodes_after(after, PAGE)? {
                last = Some(inode);
                due.extend(classify_inode(tables, inode, &record, &rules, &mut known, reader.clock())?);
            }
            Ok((last, due, known))
        });
        let (last, due, known) = look.await?;
        governing = known;
        if governing.len() > REMEMBERED {
            governing.clear();
        }
        for due in due {
            let (command, done) = match due {
                ExpiryAction::Free(inode) => (Command::FreeContent(inode), &metrics.freed),
                ExpiryAction::Remove(expire) => (Command::Expire(expire), &metrics.removed),
            };
            let is_done = match services.proposer.propose(command).await? {
                Outcome::Freed(freed) => freed.fate() == FreeFate::Freed,
                outcome => matches!(outcome, Outcome::Done),
            };
            // Otherwise it has changed meanwhile.
            if is_done {
                done.inc();
            }
        }
        match last {
            Some(last) => after = last,
            None => return Ok(()),
        }
    }
}

fn classify_inode(
    tables: Tables<'_>,
    inode: u64,
    record: &InodeRecord,
    rules: &Rules,
    known: &mut HashMap<u64, Option<TtlRecord>>,
    clock: &Clock,
) -> Result<Option<ExpiryAction>, MasterError> {
    if record.mount_id == 0 || record.unlinked || is_directory(record) {
        return Ok(None);
    }
    let Some(rule) = governing(tables, record.parent, rules, known)? else { return Ok(None) };
    let age = Duration::from_nanos(u64::try_from(clock.age_ns(record.ctime_ns)).unwrap_or(0));
    if age < Duration::from_secs(rule.seconds) {
        return Ok(None);
    }
    Ok(match rule.action() {
        TtlAction::None => None,
        TtlAction::Free => {
            let has_blocks = tables.extents_of(inode, 0)?.next().transpose()?.is_some();
            (has_blocks && is_clean(tables, inode)?).then_some(ExpiryAction::Free(inode))
        }
        TtlAction::Delete => {
            Some(ExpiryAction::Remove(Expire { inode, ctime_ns: record.ctime_ns, now_ns: clock.now_ns() }))
        }
    })
}

/// The rule that holds in a directory.
fn governing(
    tables: Tables<'_>,
    directory: u64,
    rules: &Rules,
    known: &mut HashMap<u64, Option<TtlRecord>>,
) -> Result<Option<TtlRecord>, MasterError> {
    let (mut passed, mut at) = (Vec::new(), directory);
    let found = loop {
        if let Some(known) = known.get(&at) {
            break *known;
        }
        if let Some(rule) = rules.get(&at) {
            passed.push(at);
            break Some(*rule);
        }
        match tables.inode(at)? {
            Some(record) if record.mount_id != 0 && !passed.contains(&at) => {
                passed.push(at);
                at = record.parent;
            }
            _ => break None,
        }
    };
    known.extend(passed.into_iter().map(|directory| (directory, found)));
    Ok(found)
}
