//! What one client may have of the worker, and what those get who have too much.

use std::io;
use std::time::Duration;

use cavern_conf::schema;
use cavern_net::Socket;
use cavern_proto::data::Status;
use cavern_security::{Limit, OverLimit, TenantLimits, Tenants};
use tokio::io::Interest;

use super::outgoing::{Outgoing, Segment};
use crate::memory::{kib_for_requests, part_of_tenant};
use crate::request_error::Refusal;

/// Blocks that a tenant waits for at a time, for each GET that may be in flight: some wait for the same one, and few
/// for none.
const TURNS_PER_FILL: usize = 2;
/// The part of the threads of one core that sync blocks for a tenant at a time, and that of those that wait for disks
/// otherwise: together half of them, and enough to keep a disk busy.
const DISK_TURNS_PART: usize = 4;
/// Whoever is turned away gets so long to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Read at a time of what it says meanwhile.
const SCRAP_BYTES: usize = 4096;

/// The clients of a worker, with this much memory for answers and payloads, and so many threads of each core for disks.
pub fn tenants(conf: &schema::Worker, memory_kib: u32, blocking_threads: usize) -> Tenants {
    // Requests are bounded for each connection.
    let calls = Limit { most: usize::MAX, setting: "" };
    let per_second = usize::try_from(conf.client_bytes_per_second.bytes()).unwrap_or(usize::MAX);
    Tenants::new(TenantLimits {
        connections: Limit { most: conf.client_connections, setting: "worker.client_connections" },
        calls,
        per_second: Limit { most: per_second, setting: "worker.client_bytes_per_second" },
        turns: conf.fill_concurrency * TURNS_PER_FILL,
        room: part_of_tenant(memory_kib),
        requests: part_of_tenant(kib_for_requests(memory_kib)),
        disk_turns: (blocking_threads / DISK_TURNS_PART).max(1),
        // Each thread takes the requests of its connections in turn, and an answer is one piece.
        writers: 0,
        streams: 0,
        parts: 0,
        walks: 0,
        messages: 0,
    })
}

/// Says why, in place of a hello, to a client that has too many connections; and ends this one when that is read.
pub(super) async fn turn_away(socket: &Socket, mut outgoing: Outgoing, reason: &OverLimit) {
    outgoing.push(Segment::failure(0, Refusal::new(Status::Overloaded, reason.to_string())));
    let farewell = async {
        let mut scrap = Vec::with_capacity(SCRAP_BYTES);
        loop {
            outgoing.flush(socket)?;
            let interest =
                if outgoing.is_empty() { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
            socket.ready(interest).await?;
            scrap.clear();
            match socket.try_read(&mut scrap) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    // Who has gone needs no farewell.
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use cavern_security::{Identity, Role};
    use tokio::time::Instant;

    use super::*;
    use crate::request_error::on_disk;

    const DISK_TURNS: usize = 3;

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_keeps_its_turn_until_it_is_done() {
        let tenants = tenants(&schema::Worker::default(), 1024, DISK_TURNS * DISK_TURNS_PART);
        let identity = Identity::new("c", Role::Client, "n").unwrap();
        let connection = tenants.admit(&identity).unwrap().unwrap();
        let (end, ends) = mpsc::channel::<()>();
        let (begin, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let ends = std::sync::Arc::new(parking_lot::Mutex::new(ends));
        let waiting: Vec<_> = (0..=DISK_TURNS)
            .map(|_| {
                let (tenant, begin, ends) = ((*connection).clone(), begin.clone(), ends.clone());
                let work = move || {
                    let _ = begin.send(());
                    let _ = ends.lock().recv();
                };
                let until = Instant::now() + Duration::from_secs(60);
                tokio::spawn(async move { on_disk(Some(&tenant.disk_turns), until, work).await })
            })
            .collect();
        for _ in 0..DISK_TURNS {
            begun.recv().await.unwrap();
        }
        for task in waiting {
            task.abort();
            let _ended = task.await;
        }
        assert_eq!(connection.disk_turns.available_permits(), 0, "the work goes on");
        assert!(begun.try_recv().is_err(), "one has waited, and was given up");
        drop(end);
        let all = connection.disk_turns.clone().acquire_many_owned(DISK_TURNS as u32);
        let _all = tokio::time::timeout(Duration::from_secs(10), all).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn whoever_has_no_turn_in_time_is_told_so_and_syncs_have_turns_of_their_own() {
        let tenants = tenants(&schema::Worker::default(), 1024, DISK_TURNS * DISK_TURNS_PART);
        let identity = Identity::new("c", Role::Client, "n").unwrap();
        let connection = tenants.admit(&identity).unwrap().unwrap();
        let (turns, now) = (&connection.disk_turns, Instant::now());
        let all = turns.clone().acquire_many_owned(DISK_TURNS as u32).await.unwrap();
        let refused = on_disk(Some(turns), now, || 1).await.unwrap_err();
        assert_eq!(refused.status, Status::Overloaded, "{refused}");
        assert_eq!(on_disk(Some(&connection.sync_turns), now, || 2).await, Ok(2));
        assert_eq!(on_disk(None, now, || 3).await, Ok(3));
        drop(all);
        assert_eq!(on_disk(Some(turns), now, || 4).await, Ok(4));
    }
}
