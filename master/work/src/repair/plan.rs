//! What a block lacks, and who is to get it.

use cavern_proto::ContentId;
use cavern_proto::master::Extent;
use cavern_proto::record::{ExtentRecord, Stray};
use cavern_state::{FileBlock, Tables, clean_object};

use super::availability::{Availability, AvailabilityMap};
use crate::error::WorkError;

/// What is to be done about a block.
#[derive(Debug)]
pub(super) enum Step {
    Copy(Box<Copy>),
    /// A copy that an earlier master began.
    GiveUp {
        inode: u64,
        extent: Extent,
    },
    /// Enough others have the block, and this worker is being emptied.
    Shed {
        inode: u64,
        index: u32,
        worker: u64,
        others: Vec<u64>,
    },
    /// The block is gone for good, and the bucket has the file.
    FromBucket {
        inode: u64,
        index: u32,
    },
}

/// A copy to be made.
#[derive(Debug)]
pub(super) struct Copy {
    pub inode: u64,
    pub mount_id: u32,
    pub block_size: u64,
    /// As it is; `joining` is who is to get the copy.
    pub extent: Extent,
    /// Workers that are there and have it.
    pub sources: Vec<u64>,
    /// Its workers that stay so.
    pub keep: Vec<u64>,
}

impl Step {
    pub(super) fn at(&self) -> FileBlock {
        match self {
            Self::Copy(copy) => (copy.inode, copy.extent.index),
            Self::GiveUp { inode, extent } => (*inode, extent.index),
            Self::Shed { inode, index, .. } | Self::FromBucket { inode, index } => (*inode, *index),
        }
    }

    pub(super) fn target(&self) -> Option<u64> {
        match self {
            Self::Copy(copy) => Some(copy.extent.joining),
            Self::GiveUp { .. } | Self::Shed { .. } | Self::FromBucket { .. } => None,
        }
    }
}

/// The next step for a block that nobody works on; `None` when it lacks nothing, or nobody can give it to it. Workers
/// that have been `tried` in vain come last.
pub(super) fn plan(
    tables: Tables<'_>,
    availability: &AvailabilityMap,
    cluster_id: &str,
    (inode, index): FileBlock,
    tried: &[u64],
) -> Result<Option<Step>, WorkError> {
    let Some(record) = tables.extent(inode, index)? else { return Ok(None) };
    let ExtentRecord { generation, workers, joined, joining, .. } = record;
    let extent = Extent { index, generation, workers, joined, joining, ..Extent::default() };
    if joining != 0 {
        return Ok(Some(Step::GiveUp { inode, extent }));
    }
    let Some(mount_id) = tables.inode(inode)?.map(|record| record.mount_id) else { return Ok(None) };
    let Some(mount) = tables.mount(mount_id)? else { return Ok(None) };
    let of = |standing: Availability| {
        extent.workers.iter().copied().filter(move |worker| availability.of(*worker) == standing)
    };
    let (stay, leaving): (Vec<u64>, Vec<u64>) =
        (of(Availability::Live).collect(), of(Availability::Draining).collect());
    let mut keep: Vec<u64> = stay.iter().copied().chain(of(Availability::Offline)).collect();
    let sources: Vec<u64> = stay.iter().chain(&leaving).copied().collect();
    if sources.is_empty() && keep.is_empty() && clean_object(tables, inode)?.is_some() {
        return Ok(Some(Step::FromBucket { inode, index }));
    }
    let wanted = mount.replicas.max(1) as usize;
    if keep.len() >= wanted {
        let shed = leaving.first().filter(|_| !stay.is_empty());
        return Ok(shed.map(|worker| Step::Shed { inode, index, worker: *worker, others: stay.clone() }));
    }
    if sources.is_empty() {
        return Ok(None);
    }
    // Beside the copy: one that leaves goes when there are enough without it.
    keep.extend(leaving.iter().take(wanted - 1 - keep.len()));
    let stray = Stray { inode, generation, index };
    // Live ones that take blocks, the best for this one first.
    let mut targets =
        availability.placement.ranked(ContentId::of_inode(cluster_id, mount_id, inode, generation), index);
    targets.retain(|worker| !extent.workers.contains(worker));
    targets.sort_by_key(|worker| tried.iter().filter(|failed| *failed == worker).count());
    for target in targets {
        if !tables.is_stray(target, &stray)? {
            let extent = Extent { joining: target, ..extent };
            let copy = Copy { inode, mount_id, block_size: mount.block_size, extent, sources, keep };
            return Ok(Some(Step::Copy(Box::new(copy))));
        }
    }
    Ok(None)
}
