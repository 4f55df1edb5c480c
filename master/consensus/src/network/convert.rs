//! Between the consensus library's types and what crosses the network.

use cavern_proto::raft::{self, AppendRequest, Ballot, LogPosition, Target};
use openraft::raft::{AppendEntriesRequest, VoteRequest, VoteResponse};

use crate::error::{ConsensusError, Result};
use crate::types::{self, LogId, Types, Vote, entry_of_record, record_of_entry};

/// More entries than a log ever has.
const INDEX_MAX: u64 = u64::MAX >> 1;

pub fn position(id: &LogId) -> LogPosition {
    LogPosition { term: id.leader_id.term, node_id: id.leader_id.node_id, index: id.index }
}

/// Positions that no log comes to are refused: the library counts on from them.
pub fn log_id(position: &LogPosition) -> Result<LogId> {
    let LogPosition { term, node_id, index } = *position;
    if index > INDEX_MAX {
        return Err(ConsensusError::Invalid(format!("entry {index} in a message of another master")));
    }
    Ok(types::log_id(term, node_id, index))
}

fn maybe_log_id(position: Option<&LogPosition>) -> Result<Option<LogId>> {
    position.map(log_id).transpose()
}

pub fn ballot(vote: &Vote) -> Ballot {
    Ballot { term: vote.leader_id.term, node_id: vote.leader_id.node_id, committed: vote.committed }
}

pub fn vote(ballot: &Ballot) -> Vote {
    let Ballot { term, node_id, committed } = *ballot;
    if committed { Vote::new_committed(term, node_id) } else { Vote::new(term, node_id) }
}

/// What a message must have.
pub fn required<T>(field: Option<T>, what: &str) -> Result<T> {
    field.ok_or_else(|| ConsensusError::Invalid(format!("{what} is missing in a message of another master")))
}

pub fn append_request(target: Option<Target>, request: AppendEntriesRequest<Types>) -> Result<AppendRequest> {
    let AppendEntriesRequest { vote, prev_log_id, entries, leader_commit } = request;
    Ok(AppendRequest {
        target,
        ballot: Some(ballot(&vote)),
        previous: prev_log_id.as_ref().map(position),
        entries: entries.into_iter().map(record_of_entry).collect::<Result<_, _>>()?,
        committed: leader_commit.as_ref().map(position),
    })
}

/// The reverse. Entries that do not follow each other are refused: the library takes it for granted that they do.
pub fn append_entries(request: AppendRequest) -> Result<AppendEntriesRequest<Types>> {
    let AppendRequest { target: _, ballot, previous, entries, committed } = request;
    let entries = entries.into_iter().map(entry_of_record).collect::<Result<Vec<_>, _>>()?;
    let previous = maybe_log_id(previous.as_ref())?;
    let begin = previous.map_or(0, |previous| previous.index + 1);
    if !entries.iter().zip(begin..).all(|(entry, index)| entry.log_id.index == index) {
        return Err(ConsensusError::Invalid("entries of another master that do not follow each other".into()));
    }
    Ok(AppendEntriesRequest {
        vote: vote(&required(ballot, "the ballot")?),
        prev_log_id: previous,
        entries,
        leader_commit: maybe_log_id(committed.as_ref())?,
    })
}

pub fn vote_request(target: Option<Target>, request: &VoteRequest<Types>) -> raft::VoteRequest {
    raft::VoteRequest {
        target,
        ballot: Some(ballot(&request.vote)),
        last: request.last_log_id.as_ref().map(position),
        hand_over: request.leadership_transfer,
    }
}

pub fn vote_of_request(request: &raft::VoteRequest) -> Result<VoteRequest<Types>> {
    let mut asked =
        VoteRequest::new(vote(&required(request.ballot, "the ballot")?), maybe_log_id(request.last.as_ref())?);
    asked.leadership_transfer = request.hand_over;
    Ok(asked)
}

pub fn vote_reply(response: &VoteResponse<Types>) -> raft::VoteReply {
    raft::VoteReply {
        ballot: Some(ballot(&response.vote)),
        granted: response.vote_granted,
        last: response.last_log_id.as_ref().map(position),
    }
}

pub fn vote_response(reply: raft::VoteReply) -> Result<VoteResponse<Types>> {
    let vote = vote(&required(reply.ballot, "the ballot")?);
    Ok(VoteResponse::new(vote, maybe_log_id(reply.last.as_ref())?, reply.granted))
}

#[cfg(test)]
mod tests {
    use cavern_proto::record::LogRecord;
    use cavern_proto::record::log_record::Payload;

    use super::*;

    #[test]
    fn entries_that_make_no_sense_are_refused() {
        let record = |index| LogRecord { term: 1, node_id: 1, index, payload: Some(Payload::Blank(true)) };
        let request = |previous: Option<u64>, entries: &[u64]| AppendRequest {
            ballot: Some(Ballot { term: 1, node_id: 1, committed: true }),
            previous: previous.map(|index| LogPosition { term: 1, node_id: 1, index }),
            entries: entries.iter().copied().map(record).collect(),
            ..AppendRequest::default()
        };
        let read = |previous, entries: &[u64]| append_entries(request(previous, entries));
        assert_eq!(read(Some(4), &[5, 6]).unwrap().entries.len(), 2);
        assert!(read(None, &[0, 1]).is_ok() && read(Some(4), &[]).is_ok());
        for (previous, entries) in
            [(Some(4), &[6][..]), (Some(4), &[5, 7]), (None, &[1]), (Some(u64::MAX), &[]), (Some(u64::MAX), &[0])]
        {
            assert!(read(previous, entries).is_err(), "{previous:?} {entries:?}");
        }
        assert!(append_entries(AppendRequest { ballot: None, ..request(None, &[]) }).is_err());
    }
}
