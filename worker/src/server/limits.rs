//! What one client may have of the worker, and what those get who have too much.

use std::io;
use std::time::Duration;

use cavern_conf::schema;
use cavern_proto::data::{Failure, Status};
use cavern_proto::frame::FrameKind;
use cavern_security::{Limit, OverLimit, TenantLimits, Tenants};
use tokio::io::Interest;

use super::memory::part_of_tenant;
use super::outgoing::{Outgoing, Segment};
use super::socket::Socket;

/// Requests of a tenant that wait for disks and buckets at a time, for each GET that may be in flight: some wait for
/// the same one, and few for none.
const TURNS_PER_FILL: usize = 2;
/// Whoever is turned away gets so long to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Read at a time of what it says meanwhile.
const SCRAP_BYTES: usize = 4096;

/// The clients of a worker, with this much memory for answers and payloads.
pub fn tenants(conf: &schema::Worker, memory_kib: u32) -> Tenants {
    // Requests are bounded for each connection.
    let calls = Limit { most: usize::MAX, setting: "" };
    let per_second = usize::try_from(conf.client_bytes_per_second.bytes()).unwrap_or(usize::MAX);
    Tenants::new(TenantLimits {
        connections: Limit { most: conf.client_connections, setting: "worker.client_connections" },
        calls,
        per_second: Limit { most: per_second, setting: "worker.client_bytes_per_second" },
        turns: conf.fill_concurrency * TURNS_PER_FILL,
        room: part_of_tenant(memory_kib),
        // Each thread takes the requests of its connections in turn, and an answer is one piece.
        writers: 0,
        streams: 0,
        parts: 0,
        messages: 0,
    })
}

/// Says why, in place of a hello, to a client that has too many connections; and ends this one when that is read.
pub(super) async fn turn_away(socket: &Socket, mut outgoing: Outgoing, reason: &OverLimit) {
    let failure = Failure { status: Status::Overloaded.into(), message: reason.to_string() };
    outgoing.push(Segment::of(FrameKind::Failure, 0, &failure));
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
