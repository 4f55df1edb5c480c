//! Changes of fs-mode mounts: a stream for each client, applied and answered in the order in which they were sent.

use std::io;
use std::sync::Arc;

use cavern_consensus::ProposalPermit;
use cavern_proto::bounded::MAX_CHANGES;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    AcquireDelegation, AcquireStep, Mount, MutateReply, MutateRequest, Mutation, MutationResult, RemoveName,
    RenameName, SetQuota, SetTtl, TtlAction, WriteType,
};
use cavern_proto::record::Mutate;
use cavern_security::{Identity, Tenant};
use cavern_state::outcome::Mutated;
use cavern_work::WorkError;
use cavern_work::namespace::Lookups;
use futures::StreamExt;
use futures::future::{Either, ready};
use futures::stream::FuturesOrdered;
use rustix::io::Errno;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::call::check_count;
use super::guard::AuditedCall;
use super::limits::{self, Waiting};
use crate::error::MasterError;
use crate::services::Services;

/// Calls of a stream under way at a time, and answers that wait for a slow reader.
pub(super) const CALLS_AHEAD: usize = 16;
/// Wishes of one call to hold directories that are judged: each is a look at what all sessions know.
const WISHES_MAX: usize = 16;

impl Services {
    /// Takes calls until the asker is gone, or one is refused: what is under way is answered before that is said.
    pub(super) async fn serve_changes(
        &self,
        mut calls: Streaming<MutateRequest>,
        (asker, tenant): (Option<&Identity>, Option<&Arc<Tenant>>),
        audited: Option<&AuditedCall>,
        answers: &mpsc::Sender<Result<MutateReply, Status>>,
    ) {
        let mut under_way = FuturesOrdered::new();
        let mut waiting: Option<Waiting> = None;
        let refusal: Option<Status> = loop {
            let (call, room) = tokio::select! {
                call = calls.next(), if waiting.is_none() && under_way.len() < CALLS_AHEAD => match (call, tenant) {
                    (Some(Ok(call)), None) => (call, None),
                    (Some(Ok(call)), Some(tenant)) => {
                        let lookups = Lookups { client: self.client(asker), ..self.lookups.clone() };
                        waiting = Some(limits::changes(tenant.clone(), lookups, call));
                        continue;
                    }
                    // Who has gone has what was sent before made nevertheless.
                    (Some(Err(status)), _) => break Some(status),
                    (None, _) => break None,
                },
                admitted = limits::admitted(&mut waiting) => admitted,
                Some(answer) = under_way.next(), if !under_way.is_empty() => {
                    let answer: Result<MutateReply, MasterError> = answer;
                    let is_over = answer.is_err();
                    if answers.send(answer.map_err(Status::from)).await.is_err() || is_over {
                        return;
                    }
                    continue;
                }
            };
            if let Err(error) = self.watch.check_owner(call.session, asker) {
                if let Some(audited) = audited
                    && let Some(suppressed) = audited.admit("Mutate", false)
                {
                    audited.record_as("Mutate", "", Err(&error.to_string()), suppressed);
                }
                break Some(MasterError::from(error).into());
            }
            let audited = audited.map(|audited| (audited.clone(), audited_changes(&call, audited.has_deletes())));
            let audited = audited.filter(|(_, changes)| !changes.is_empty());
            match self.begin_changes(call, (self.client(asker), asker), room).await {
                Ok(answer) => under_way.push_back(and_audit(answer, audited)),
                Err(error) => break Some(error.into()),
            }
        };
        while let Some(answer) = under_way.next().await {
            let is_over = answer.is_err();
            if answers.send(answer.map_err(Status::from)).await.is_err() || is_over {
                return;
            }
        }
        if let Some(refusal) = refusal {
            let _gone = answers.send(Err(refusal)).await;
        }
    }

    /// Gives the changes of a call their places behind those of earlier calls, and returns what waits for their
    /// results.
    pub(crate) async fn begin_changes(
        &self,
        call: MutateRequest,
        (client, asker): (Option<Arc<str>>, Option<&Identity>),
        room: Option<ProposalPermit>,
    ) -> Result<impl Future<Output = Result<MutateReply, MasterError>> + Send + use<>, MasterError> {
        let MutateRequest { session, mut mutations, answered } = call;
        // Of a call that comes over the network it is known.
        check_count(mutations.len(), "changes", MAX_CHANGES)?;
        if !self.watch.is_live(session) {
            let reason = format!("session {session} has lapsed: open another, and forget what was cached");
            return Err(WorkError::Refused(reason).into());
        }
        if self.has_nothing_to_change(client.as_deref(), session).await? {
            let errno = Errno::STALE.raw_os_error();
            let reason = "no fs-mode mount is there for this client".to_owned();
            let refused = MutationResult { errno, reason, ..MutationResult::default() };
            let results = vec![refused; mutations.len()];
            let event_seq = self.watch.last_queued_seq(session);
            return Ok(Either::Left(ready(Ok::<_, MasterError>(MutateReply { results, event_seq }))));
        }
        self.persistence.clients_changed(mutations.len());
        let now_ns = self.lookups.reader.clock().now_ns();
        let name = asker.and_then(Identity::client_name);
        let allow_delegations = self.lookups.recalls.allow_delegations(name);
        self.judge_wishes(&mut mutations, (session, client.as_ref()), allow_delegations).await;
        let claimed: Vec<u64> = mutations.iter().filter_map(claim_of).collect();
        // The first one records it.
        let mut owner = self.watch.owner_of(session).map(|owner| owner.to_string()).unwrap_or_default();
        let commands = mutations
            .into_iter()
            .map(|mutation| if allow_delegations { mutation } else { without_delegation(mutation) })
            .map(|mutation| {
                // Who may set what holds for others is asked also where all mounts are there for all clients.
                let is_setting = matches!(mutation.change, Some(Change::SetQuota(_) | Change::SetTtl(_)));
                let client = name.filter(|_| is_setting).or(client.as_deref()).map(str::to_owned);
                let owner = std::mem::take(&mut owner);
                Mutate { session, answered, now_ns, mutation: Some(mutation), client, owner }
            });
        let watch = self.watch.clone();
        let made = self.proposer.begin_all(commands.collect(), room).await.inspect_err(|_| {
            // The leadership is over, and the state decides on nothing more of it.
            let delegations = self.lookups.recalls.delegations();
            claimed.iter().for_each(|directory| delegations.give_up(*directory, session));
        })?;
        Ok(Either::Right(async move {
            let mut waits_for = Vec::new();
            let results = made.await?.into_iter().map(|Mutated { result, waits_for: change }| {
                waits_for.extend((change != 0).then_some(change));
                result
            });
            let results = results.collect();
            watch.wait_invalidated(&waits_for).await;
            Ok::<_, MasterError>(MutateReply { results, event_seq: watch.last_queued_seq(session) })
        }))
    }

    /// Says in each wish of a session to hold a directory what becomes of it.
    async fn judge_wishes(
        &self,
        mutations: &mut [Mutation],
        (session, client): (u64, Option<&Arc<str>>),
        allow_delegations: bool,
    ) {
        let mut judged = 0;
        for mutation in mutations {
            let Some(Change::AcquireDelegation(wish)) = &mut mutation.change else { continue };
            let inode = wish.inode;
            *wish = AcquireDelegation { inode, step: AcquireStep::Later.into() };
            if !allow_delegations || judged == WISHES_MAX {
                continue;
            }
            judged += 1;
            let lookups = Lookups { client: client.cloned(), ..self.lookups.clone() };
            let judging = async {
                // Nobody waits for whoever may hold nothing there.
                lookups.check_wish(inode).await?;
                lookups.recalls.judge_wish(&lookups.reader, inode, session).await
            };
            match judging.await {
                Ok(step) => wish.step = step.into(),
                // What was judged before is to be proposed in any case.
                Err(error) => tracing::debug!("directory inode {inode} is not delegated: {error}"),
            }
        }
    }

    /// Whether a session has changed nothing yet, and there is no fs-mode mount for its client in which it could: the
    /// log has nothing of what it asks for, and no result is kept.
    async fn has_nothing_to_change(&self, client: Option<&str>, session: u64) -> Result<bool, WorkError> {
        let Some(client) = client else { return Ok(false) };
        if self.lookups.reader.look(move |tables| Ok(tables.session(session)?.is_some())).await? {
            return Ok(false);
        }
        let is_there = |mount: &Mount| mount.write_type() == WriteType::FsMode && mount.access_of(client).can_see();
        Ok(!self.mounts.all_recorded()?.iter().any(is_there))
    }
}

/// A change that the audit log has: one that sets a rule for others, a quota, say, or how long files are kept, and with
/// `master.audit_deletes` one that takes a name away.
struct AuditedChange {
    /// Among the changes of its call.
    place: usize,
    operation: &'static str,
    subject: String,
    /// What was not done changes nothing, and has no line.
    only_done: bool,
}

fn audited_changes(call: &MutateRequest, has_deletes: bool) -> Vec<AuditedChange> {
    let shown = |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
    let changes = call.mutations.iter().enumerate().filter_map(|(place, mutation)| match &mutation.change {
        Some(Change::SetQuota(SetQuota { inode, max_bytes, max_inodes })) => {
            let subject = format!("inode {inode}: bytes: {}, inodes: {}", shown(*max_bytes), shown(*max_inodes));
            Some(AuditedChange { place, operation: "SetQuota", subject, only_done: false })
        }
        Some(Change::SetTtl(set @ SetTtl { inode, seconds, .. })) => {
            let action = match set.action() {
                TtlAction::None => "nothing",
                TtlAction::Free => "free",
                TtlAction::Delete => "delete",
            };
            let subject = format!("inode {inode}: after {seconds} s: {action}");
            Some(AuditedChange { place, operation: "SetTtl", subject, only_done: false })
        }
        Some(Change::Remove(RemoveName { parent, name, directory })) if has_deletes => {
            let operation = if *directory { "Rmdir" } else { "Unlink" };
            Some(AuditedChange { place, operation, subject: named(*parent, name), only_done: true })
        }
        Some(Change::Rename(rename) | Change::RenameWhiteout(rename)) if has_deletes => {
            let RenameName { parent, name, new_parent, new_name, .. } = rename;
            let subject = format!("{} to {}", named(*parent, name), named(*new_parent, new_name));
            Some(AuditedChange { place, operation: "Rename", subject, only_done: true })
        }
        _ => None,
    });
    changes.collect()
}

/// A name in a directory, as the audit log has it.
fn named(parent: u64, name: &[u8]) -> String {
    let shown = std::str::from_utf8(name).map_or_else(|_| name.escape_ascii().to_string(), str::to_owned);
    format!("inode {parent}: {shown}")
}

/// What `answer` gives, when the audit log has what became of changes.
async fn and_audit(
    answer: impl Future<Output = Result<MutateReply, MasterError>>,
    audited: Option<(AuditedCall, Vec<AuditedChange>)>,
) -> Result<MutateReply, MasterError> {
    let answer = answer.await;
    if let Some((audited, changes)) = audited {
        let results: Vec<Result<(), String>> = (changes.iter())
            .map(|change| match &answer {
                Ok(reply) => match reply.results.get(change.place) {
                    None | Some(MutationResult { errno: 0, .. }) => Ok(()),
                    Some(MutationResult { errno, reason, .. }) if reason.is_empty() => {
                        Err(io::Error::from_raw_os_error(*errno).to_string())
                    }
                    Some(MutationResult { reason, .. }) => Err(reason.clone()),
                },
                Err(error) => Err(error.to_string()),
            })
            .collect();
        let done = changes.iter().zip(&results).filter_map(|(change, result)| {
            let suppressed = match (change.only_done, result.is_ok()) {
                // Each of them is asked for.
                (true, true) => 0,
                (true, false) => return None,
                (false, is_done) => audited.admit(change.operation, is_done)?,
            };
            let result = result.as_ref().map(|&()| ()).map_err(String::as_str);
            Some((change.operation, change.subject.as_str(), result, suppressed))
        });
        audited.record_all(done);
    }
    answer
}

/// The directory that its session is to hold by a mutation, if the state agrees.
fn claim_of(mutation: &Mutation) -> Option<u64> {
    match &mutation.change {
        Some(Change::AcquireDelegation(wish)) if wish.step() == AcquireStep::Grant => Some(wish.inode),
        _ => None,
    }
}

/// A mutation after which its session does not hold what it has made, unless it has answered that it does.
fn without_delegation(mut mutation: Mutation) -> Mutation {
    if let Some(Change::Create(create)) = &mut mutation.change {
        create.delegate &= mutation.is_write_back;
    }
    mutation
}
