//! What a command did, and which commands have which outcomes.

use bytes::Bytes;
use cavern_proto::master::{FreedContent, Job, Mount, MutationResult, RefreshFate, View};
pub use cavern_proto::record::FreeContent;
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{
    AdoptListing, ApplyListing, AttachMount, BeginObjects, BeginView, Command, CountUsage, DrainWorker, DropBlocks,
    DropLost, EndSessionStep, FinishView, FreezeView, GiveUpReplicas, ImportExternalChange, JoinReplica, Mend, Mutate,
    Once, PutWorker, ReapOrphans, ReleaseKept, RemoveMount, RemoveView, RemoveWorker, RequestRecord, SealSecrets,
    SettleReplica, UpdateMount,
};

use crate::error::{Result, StateError};

/// Instead of the number of a change: the answer was made before, and waits for all changes of strict mounts that are
/// waited for.
pub const ALL_BEFORE: u64 = u64::MAX;

/// What an [`ApplyListing`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListingCounts {
    pub added: u64,
    pub changed: u64,
    pub removed: u64,
    /// Keys that cannot be names; known to the listing, not to the log.
    pub hidden: u64,
}

impl std::ops::AddAssign for ListingCounts {
    fn add_assign(&mut self, other: Self) {
        self.added += other.added;
        self.changed += other.changed;
        self.removed += other.removed;
        self.hidden += other.hidden;
    }
}

/// What a step did of something that takes several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepProgress {
    pub inodes: u64,
    /// Whether anything is left.
    pub more: bool,
    /// Of directories: the one that it was about, where to look for the next. Of a session: the part with which to go
    /// on.
    pub next: u64,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It did what it says, or there was nothing to be done.
    Done,
    /// The mount as it is recorded now, or as it was before it was removed.
    Mount(Box<Mount>),
    /// Another mount has the path.
    MountExists(Box<Mount>),
    /// There is no such mount.
    NoSuchMount,
    /// Something has been changed since the proposer looked, who looks again.
    OutOfDate,
    /// What a listing has changed.
    Listed(ListingCounts),
    /// The worker has this id; the table of workers has this epoch.
    Worker { id: u64, epoch: u64 },
    /// The job has this id.
    Job(u64),
    /// The master has this id.
    MasterId(u64),
    /// How far a step has come.
    StepProgress(StepProgress),
    /// Whether any inodes are left to be counted.
    Counted { more: bool },
    /// The result, and the number of the change that its answer waits for, or [`ALL_BEFORE`], or 0. Whoever notifies
    /// clients of the change sets its number.
    Mutated(Box<MutationResult>, u64),
    /// Whether the inode still has a name: what has none is not written to the bucket.
    Began { is_named: bool },
    /// Blocks of a file that are given up, or why none are.
    Freed(FreedContent),
    /// Lost blocks of a file are given up. The file went back to what its bucket has; otherwise they are zeros.
    LostDropped { reverted: bool },
    /// What others changed, taken in or not.
    Imported(RefreshFate),
    /// The view as it is recorded now, or as it was before it was removed.
    View(Box<View>),
    /// It was done before, when it was asked for under the same id.
    Repeated(Box<RequestRecord>),
    /// A session holds the delegation of this directory, which must be recalled first.
    Delegated(u64),
    /// The state does not allow it; a sentence for the one who asked.
    Refused(String),
    /// It is not for the one who asked.
    Denied(String),
}

impl Outcome {
    /// Why the state does not allow it.
    pub(crate) fn refused(reason: impl Into<String>) -> Result<Self> {
        Ok(Self::Refused(reason.into()))
    }
}

/// A command, with the outcomes that it has.
pub trait TypedCommand: Send {
    type Outcome: Send;

    /// The command as the log has it.
    fn into_kind(self) -> Kind;

    /// What it did.
    ///
    /// # Errors
    /// [`StateError::UnexpectedOutcome`] for the outcome of another command.
    fn outcome(outcome: Outcome) -> Result<Self::Outcome>;
}

/// Any command, for those who know its outcomes.
impl TypedCommand for Kind {
    type Outcome = Outcome;

    fn into_kind(self) -> Kind {
        self
    }

    fn outcome(outcome: Outcome) -> Result<Outcome> {
        Ok(outcome)
    }
}

/// Done, or why not; a sentence for the one who asked.
pub type Verdict<T = ()> = Result<T, String>;

/// What became of a worker that registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registration {
    /// The worker has this id; the table of workers has another epoch.
    Registered { id: u64, epoch: u64 },
    /// The state does not allow it; a sentence for the worker.
    Refused(String),
    /// It is the worker of somebody else; a sentence for the worker.
    Denied(String),
}

/// What became of a mount that is to be made.
#[derive(Clone, Debug, PartialEq)]
pub enum Attachment {
    /// The mount as it is recorded now.
    Mount(Box<Mount>),
    /// Another mount has the path.
    Exists(Box<Mount>),
    /// The table of mounts has been changed since the proposer looked, who looks again.
    OutOfDate,
    /// The state does not allow it; a sentence for the one who asked.
    Refused(String),
}

/// What became of a mount that is to be changed or removed.
#[derive(Clone, Debug, PartialEq)]
pub enum MountChange {
    /// The mount as it is recorded now, or as it was before it was removed.
    Mount(Box<Mount>),
    /// Something has been changed since the proposer looked, who looks again.
    OutOfDate,
    NoSuchMount,
}

/// What became of objects that are to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// What has no name is not written to the bucket.
    Began { is_named: bool },
    /// One of them has become the origin of its inode since the proposer looked, who looks again.
    OutOfDate,
}

/// What became of lost blocks that are to be given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LostDrop {
    /// The file went back to what its bucket has; otherwise the blocks are zeros.
    Dropped { reverted: bool },
    /// A session holds the delegation of this directory, which must be recalled first.
    Delegated(u64),
    /// The state does not allow it; a sentence for the one who asked.
    Refused(String),
}

/// What a change did.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutated {
    pub result: MutationResult,
    /// The number of the change that the answer waits for, or [`ALL_BEFORE`], or 0.
    pub waits_for: u64,
}

/// Records a job, or what became of it. Its outcome is the id of the job.
#[derive(Clone, Debug)]
pub struct PutJob(pub Job);

/// Gives out the id of a master, greater than this one and than all that were given out before.
#[derive(Clone, Copy, Debug)]
pub struct ReserveMasterId(pub u64);

/// Deletes an inode without a name that nobody has open, in steps.
#[derive(Clone, Copy, Debug)]
pub struct ReapUnlinked(pub u64);

/// A command that is done once, however often it comes under its id.
#[derive(Clone, Debug)]
pub struct Requested<C> {
    /// Empty for one that is done each time.
    pub id: Bytes,
    /// What is kept for those who ask again.
    pub reply: Bytes,
    pub command: C,
}

/// What a [`Requested`] command did.
#[derive(Clone, Debug, PartialEq)]
pub enum Repeatable<T> {
    /// It came for the first time.
    First(T),
    /// It was done before, under the same id.
    Repeated(Box<RequestRecord>),
}

impl<C: TypedCommand> TypedCommand for Requested<C> {
    type Outcome = Repeatable<C::Outcome>;

    fn into_kind(self) -> Kind {
        let Self { id: request, reply, command } = self;
        let kind = command.into_kind();
        if request.is_empty() {
            return kind;
        }
        Kind::Once(Box::new(Once { request, reply, command: Some(Box::new(Command { command: Some(kind) })) }))
    }

    fn outcome(outcome: Outcome) -> Result<Self::Outcome> {
        Ok(match outcome {
            Outcome::Repeated(record) => Repeatable::Repeated(record),
            first => Repeatable::First(C::outcome(first)?),
        })
    }
}

/// What an outcome of a command says.
macro_rules! answer {
    ($command:ident, $found:ident, { $($outcome:pat => $value:expr,)+ }) => {
        match $found {
            $($outcome => Ok($value),)+
            other => Err(StateError::UnexpectedOutcome {
                command: stringify!($command),
                outcome: format!("{other:?}"),
            }),
        }
    };
}

/// Which outcomes commands have, those of one kind of answer together.
macro_rules! answered {
    ($($($command:ident($this:ident) = $kind:expr),+ => $answer:ty: $arms:tt)+) => {$($(
        impl TypedCommand for $command {
            type Outcome = $answer;

            fn into_kind(self) -> Kind {
                let $this = self;
                $kind
            }

            fn outcome(outcome: Outcome) -> Result<$answer> {
                answer!($command, outcome, $arms)
            }
        }
    )+)+};
}

answered! {
    PutWorker(this) = Kind::PutWorker(this) => Registration: {
        Outcome::Worker { id, epoch } => Registration::Registered { id, epoch },
        Outcome::Refused(reason) => Registration::Refused(reason),
        Outcome::Denied(reason) => Registration::Denied(reason),
    }
    DrainWorker(this) = Kind::DrainWorker(this),
    RemoveWorker(this) = Kind::RemoveWorker(this),
    JoinReplica(this) = Kind::JoinReplica(this),
    SettleReplica(this) = Kind::SettleReplica(this),
    GiveUpReplicas(this) = Kind::GiveUpReplicas(this) => Verdict: {
        Outcome::Done => Ok(()),
        Outcome::Refused(reason) => Err(reason),
    }
    ReserveMasterId(this) = Kind::ReserveMasterId(this.0) => Verdict<u64>: {
        Outcome::MasterId(id) => Ok(id),
        Outcome::Refused(reason) => Err(reason),
    }
    PutJob(this) = Kind::PutJob(this.0) => u64: {
        Outcome::Job(id) => id,
    }
    AttachMount(this) = Kind::AttachMount(this) => Attachment: {
        Outcome::Mount(mount) => Attachment::Mount(mount),
        Outcome::MountExists(mount) => Attachment::Exists(mount),
        Outcome::OutOfDate => Attachment::OutOfDate,
        Outcome::Refused(reason) => Attachment::Refused(reason),
    }
    UpdateMount(this) = Kind::UpdateMount(this),
    RemoveMount(this) = Kind::RemoveMount(this) => MountChange: {
        Outcome::Mount(mount) => MountChange::Mount(mount),
        Outcome::OutOfDate => MountChange::OutOfDate,
        Outcome::NoSuchMount => MountChange::NoSuchMount,
    }
    // Whether things were still as the proposer had seen them.
    SealSecrets(this) = Kind::SealSecrets(this),
    Mend(this) = Kind::Mend(this) => bool: {
        Outcome::Done => true,
        Outcome::OutOfDate => false,
    }
    ApplyListing(this) = Kind::Listing(this),
    AdoptListing(this) = Kind::AdoptListing(this) => ListingCounts: {
        Outcome::Listed(counts) => counts,
    }
    ImportExternalChange(this) = Kind::ImportExternalChange(this) => RefreshFate: {
        Outcome::Imported(fate) => fate,
    }
    Mutate(this) = Kind::Mutate(this) => Mutated: {
        Outcome::Mutated(result, waits_for) => Mutated { result: *result, waits_for },
    }
    EndSessionStep(this) = Kind::EndSessionStep(this),
    ReapOrphans(this) = Kind::ReapOrphans(this),
    ReapUnlinked(this) = Kind::ReapUnlinked(this.0),
    DropBlocks(this) = Kind::DropBlocks(this) => StepProgress: {
        Outcome::StepProgress(progress) => progress,
    }
    // Whether any inodes are left to be counted.
    CountUsage(this) = Kind::CountUsage(this) => bool: {
        Outcome::Counted { more } => more,
    }
    BeginObjects(this) = Kind::BeginObjects(this) => Beginning: {
        Outcome::Began { is_named } => Beginning::Began { is_named },
        Outcome::OutOfDate => Beginning::OutOfDate,
    }
    FreeContent(this) = Kind::FreeContent(this) => FreedContent: {
        Outcome::Freed(freed) => freed,
    }
    DropLost(this) = Kind::DropLost(this) => LostDrop: {
        Outcome::LostDropped { reverted } => LostDrop::Dropped { reverted },
        Outcome::Delegated(directory) => LostDrop::Delegated(directory),
        Outcome::Refused(reason) => LostDrop::Refused(reason),
    }
    BeginView(this) = Kind::BeginView(this),
    FreezeView(this) = Kind::FreezeView(this),
    FinishView(this) = Kind::FinishView(this),
    RemoveView(this) = Kind::RemoveView(this) => Verdict<Box<View>>: {
        Outcome::View(view) => Ok(view),
        Outcome::Refused(reason) => Err(reason),
    }
    ReleaseKept(this) = Kind::ReleaseKept(this) => (): {
        Outcome::Done => (),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_own_outcomes_only() {
        assert_eq!(PutJob::outcome(Outcome::Job(7)).unwrap(), 7);
        assert_eq!(
            ReserveMasterId::outcome(Outcome::Refused("none left".into())).unwrap(),
            Err("none left".to_owned())
        );
        let unexpected = PutJob::outcome(Outcome::MasterId(7)).unwrap_err().to_string();
        assert!(unexpected.contains("PutJob was answered by MasterId(7)"), "{unexpected}");
    }

    #[test]
    fn a_request_has_the_outcomes_of_its_command_and_that_it_was_done_before() {
        let asked =
            |id: &'static [u8]| Requested { id: id.into(), reply: Bytes::new(), command: PutJob(Job::default()) };
        assert_eq!(asked(b"").into_kind(), Kind::PutJob(Job::default()), "without an id it is done each time");
        let Kind::Once(once) = asked(b"id").into_kind() else { panic!("it would be done twice") };
        let command = once.command.and_then(|command| command.command);
        assert_eq!((&once.request[..], command), (&b"id"[..], Some(Kind::PutJob(Job::default()))));
        assert_eq!(Requested::<PutJob>::outcome(Outcome::Job(7)).unwrap(), Repeatable::First(7));
        let record = Box::new(RequestRecord { job: 7, ..RequestRecord::default() });
        let repeated = Requested::<PutJob>::outcome(Outcome::Repeated(record.clone())).unwrap();
        assert_eq!(repeated, Repeatable::Repeated(record));
        assert!(Requested::<PutJob>::outcome(Outcome::Done).is_err());
    }
}
