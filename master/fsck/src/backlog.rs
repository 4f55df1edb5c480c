//! What is to be written to buckets or deleted there, has failed, and waits for longer than it may take.

use cavern_proto::master::{Finding, FindingKind};
use cavern_proto::record::IntentRecord;
use cavern_state::{PendingDeletion, Tables};
use cavern_work::WorkError;
use cavern_work::persist::Persistence;

use super::{PAGE, Run, of_inode};

fn judge_intents(
    tables: Tables<'_>,
    persistence: &Persistence,
    intents: &[(u64, IntentRecord)],
) -> Result<Vec<Finding>, WorkError> {
    let mut found = Vec::new();
    for (inode, intent) in intents {
        if let Some(cause) = persistence.stuck_intent(*inode, intent) {
            let detail = format!("the bucket lacks it since change {}, and cannot be given it", intent.first_change);
            let finding = of_inode(tables, FindingKind::StuckIntent, *inode, detail)?;
            found.push(Finding { mount_id: intent.mount_id, cause, ..finding });
        }
    }
    Ok(found)
}

fn judge_deletions(persistence: &Persistence, deletions: Vec<PendingDeletion>) -> Vec<Finding> {
    let stuck = |PendingDeletion { mount_id, key, record }: PendingDeletion| {
        let cause = persistence.stuck_deletion(mount_id, &key, &record)?;
        let detail = format!("it is to be deleted since change {}, and cannot be", record.first_change);
        let (kind, path) = (FindingKind::StuckDeletion as i32, format!("object \"{key}\""));
        Some(Finding { kind, path, mount_id, key, detail, cause, ..Finding::default() })
    };
    deletions.into_iter().filter_map(stuck).collect()
}

impl Run<'_> {
    pub(super) async fn check_backlog(&mut self) -> Result<(), WorkError> {
        self.step("what buckets lack");
        let persistence = self.fsck.persistence.clone();
        self.look_at_pages(move |tables, after: Option<u64>| {
            let page = tables.intents(after.unwrap_or(0), PAGE)?;
            Ok((page.last().map(|(inode, _)| *inode), page.len(), judge_intents(tables, &persistence, &page)?))
        })
        .await?;
        let (persistence, mount_id) = (self.fsck.persistence.clone(), self.scope.mount_id);
        self.look_at_pages(move |tables, after: Option<(u32, String)>| {
            let after = after.as_ref().map(|(mount_id, key)| (*mount_id, key.as_str()));
            let page = tables.deletions(after, PAGE)?;
            let (last, count) = (page.last().map(|last| (last.mount_id, last.key.clone())), page.len());
            let mut found = judge_deletions(&persistence, page);
            // Of others than those of this mount.
            found.retain(|finding| mount_id == 0 || mount_id == finding.mount_id);
            Ok((last, count, found))
        })
        .await
    }

    pub(super) async fn intents_again(&self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let inodes: Vec<u64> = before.iter().map(|finding| finding.inode).collect();
        let persistence = self.fsck.persistence.clone();
        self.read(move |tables| {
            let mut intents = Vec::new();
            for inode in inodes {
                intents.extend(tables.intent(inode)?.map(|intent| (inode, intent)));
            }
            judge_intents(tables, &persistence, &intents)
        })
        .await
    }

    pub(super) async fn deletions_again(&self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let keys: Vec<_> = before.iter().map(|finding| (finding.mount_id, finding.key.clone())).collect();
        let persistence = self.fsck.persistence.clone();
        self.read(move |tables| {
            let mut deletions = Vec::new();
            for (mount_id, key) in keys {
                let record = tables.deletion(mount_id, &key)?;
                deletions.extend(record.map(|record| PendingDeletion { mount_id, key, record }));
            }
            Ok(judge_deletions(&persistence, deletions))
        })
        .await
    }
}
