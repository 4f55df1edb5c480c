//! Messages on their way in: how long one may be, how many bytes a client may have begun, and how long one may take.
//!
//! A message is in memory from its first byte on, and whoever sends it may never send its last. So its length is looked
//! at before it is read, long messages of a client share some room, and one that has begun comes to an end in time.
//! While one waits for room its bytes take the window of its connection, and other calls stop there: not for long.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use cavern_security::Tenant;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::PollSemaphore;
use tonic::Status;
use tonic::body::Body;

/// Kibibytes of long messages of one client that have begun and are not complete.
pub(super) const ROOM_KIB: usize = 16 << 10;
/// A message up to this length takes no room, in bytes: calls are counted.
const SHORT: usize = 16 << 10;
/// A message waits no longer for room: the lease of a session, whose messages stop meanwhile, is a few seconds.
const ROOM_PATIENCE: Duration = Duration::from_secs(2);
/// A message that has begun is complete within this time of waiting for it, and [`PROGRESS_TIME`] more for each
/// [`PROGRESS_BYTES`] that have come meanwhile. Where a call has a time of its own (`limits`), it ends with that.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
const PROGRESS_BYTES: u32 = 16 << 10;
const PROGRESS_TIME: Duration = Duration::from_secs(1);
/// Whoever looks so late was busy with something else: what came meanwhile may not have been read.
const LATE: Duration = Duration::from_secs(1);
/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The body of a call, with its messages bounded.
#[derive(Default)]
pub(super) struct Messages {
    body: Body,
    /// Bytes of the longest message that is taken.
    most: usize,
    room: Option<PollSemaphore>,
    prefix: [u8; PREFIX],
    /// Bytes of it that are there.
    prefix_length: usize,
    /// Bytes of the message that has begun; 0 for none.
    length: usize,
    /// Of these, those that are still to come.
    left: usize,
    /// What the message has of the room.
    held: Option<OwnedSemaphorePermit>,
    /// It goes on when there is room for the message that begins in it.
    waiting: Option<Bytes>,
    /// How long it waits for that.
    room_patience: Option<Pin<Box<Sleep>>>,
    /// How long the rest of a message is waited for.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Messages {
    /// `most`: bytes of the longest message. `tenant`: the client that sends them.
    pub(super) fn new(body: Body, most: usize, tenant: Option<&Arc<Tenant>>) -> Self {
        Self { body, most, room: tenant.map(|tenant| PollSemaphore::new(tenant.messages.clone())), ..Self::default() }
    }

    /// Follows where messages begin and end. Gives the bytes up to the end of the last that is complete; 0 for none.
    ///
    /// # Errors
    /// One is too long.
    fn follow(&mut self, mut data: &[u8]) -> Result<usize, Status> {
        let (all, mut complete) = (data.len(), 0);
        while !data.is_empty() {
            if self.left > 0 {
                let here = self.left.min(data.len());
                data = &data[here..];
                self.left -= here;
                if self.left == 0 {
                    self.end_message();
                    complete = all - data.len();
                } else if let Some(patience) = &mut self.patience {
                    // No message is longer than 4 GiB.
                    let more = PROGRESS_TIME * here as u32 / PROGRESS_BYTES;
                    let until = patience.deadline() + more;
                    patience.as_mut().reset(until);
                }
                continue;
            }
            let here = (PREFIX - self.prefix_length).min(data.len());
            let (prefix, rest) = data.split_at(here);
            self.prefix[self.prefix_length..][..here].copy_from_slice(prefix);
            self.prefix_length += here;
            data = rest;
            if self.prefix_length < PREFIX {
                continue;
            }
            self.prefix_length = 0;
            let [_, length @ ..] = self.prefix;
            let length = u32::from_be_bytes(length) as usize;
            if length > self.most {
                let most = self.most;
                return Err(Status::out_of_range(format!("a message of {length} bytes: send {most} at most")));
            }
            (self.length, self.left) = (length, length);
            if length == 0 {
                self.end_message();
                complete = all - data.len();
            }
        }
        Ok(complete)
    }

    fn end_message(&mut self) {
        self.length = 0;
        (self.held, self.patience) = (None, None);
    }

    /// Whether there is room for the message that has begun.
    ///
    /// # Errors
    /// There was none in time.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let is_long = self.length > SHORT && self.held.is_none();
        let Some(room) = self.room.as_mut().filter(|_| is_long) else { return Poll::Ready(Ok(())) };
        let kib = self.length.div_ceil(1 << 10).min(ROOM_KIB) as u32;
        if let Poll::Ready(held) = room.poll_acquire_many(cx, kib) {
            // It is never closed.
            self.held = held;
            self.room_patience = None;
            return Poll::Ready(Ok(()));
        }
        let patience = self.room_patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(ROOM_PATIENCE)));
        // Clients send again after a pause what was not to be had now.
        patience.as_mut().poll(cx).map(|()| {
            let mib = ROOM_KIB >> 10;
            let reason = format!("{mib} MiB of this client's messages have begun and are not complete: send it again");
            Err(Status::unavailable(reason))
        })
    }

    /// Whether the rest of a message has been waited for too long.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        if self.length == 0 && self.prefix_length == 0 {
            return Poll::Pending;
        }
        let patience = self.patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(MESSAGE_TIMEOUT)));
        if patience.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        if patience.deadline().elapsed() > LATE {
            patience.as_mut().reset(Instant::now() + MESSAGE_TIMEOUT);
            if patience.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        Poll::Ready(Status::deadline_exceeded("a message was begun, and its rest was not sent in time: send it again"))
    }
}

impl HttpBody for Messages {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let own = self.get_mut();
        let mut complete = 0;
        if own.waiting.is_none() {
            let frame = match Pin::new(&mut own.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(end) => return Poll::Ready(end),
                Poll::Pending => return own.poll_late(cx).map(|late| Some(Err(late))),
            };
            match frame.into_data() {
                Ok(data) => {
                    match own.follow(&data) {
                        Ok(bytes) => complete = bytes,
                        Err(refusal) => return Poll::Ready(Some(Err(refusal))),
                    }
                    own.waiting = Some(data);
                }
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        match own.poll_room(cx) {
            Poll::Pending => match own.waiting.as_mut().filter(|_| complete > 0) {
                // What is complete does not wait, nor is lost, with what begins behind it.
                Some(data) => Poll::Ready(Some(Ok(Frame::data(data.split_to(complete))))),
                None => Poll::Pending,
            },
            Poll::Ready(Err(refusal)) => Poll::Ready(Some(Err(refusal))),
            Poll::Ready(Ok(())) => Poll::Ready(own.waiting.take().map(|data| Ok(Frame::data(data)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use cavern_conf::schema;
    use cavern_security::{Identity, Role};
    use futures::{FutureExt as _, StreamExt as _, stream};
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    const MOST: usize = 1 << 20;

    /// A message that begins: its prefix, and so many of its bytes.
    fn begun(length: usize, sent: usize) -> Bytes {
        let prefix = [&[0][..], &u32::try_from(length).unwrap().to_be_bytes()[..]].concat();
        [prefix, vec![7; sent]].concat().into()
    }

    /// These parts, and then nothing more.
    fn sent(parts: Vec<Bytes>, tenant: Option<&Arc<Tenant>>) -> Messages {
        let frames = stream::iter(parts).map(|part| Ok::<_, Infallible>(Frame::data(part)));
        Messages::new(Body::new(StreamBody::new(frames.chain(stream::pending()))), MOST, tenant)
    }

    async fn taken(messages: &mut Messages) -> Result<usize, Status> {
        messages.frame().await.unwrap().map(|frame| frame.into_data().unwrap().len())
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_too_long_is_refused_by_its_prefix() {
        let fits = begun(MOST, 10);
        let mut messages = sent(vec![fits.clone()], None);
        assert_eq!(taken(&mut messages).await.unwrap(), fits.len());
        // The prefix comes in two parts, behind another message.
        let whole = begun(3, 3);
        let too_long = begun(MOST + 1, 0);
        let first = Bytes::from([&whole[..], &too_long[..2]].concat());
        let mut messages = sent(vec![first, too_long.slice(2..)], None);
        assert_eq!(taken(&mut messages).await.unwrap(), whole.len() + 2);
        assert_eq!(taken(&mut messages).await.unwrap_err().code(), tonic::Code::OutOfRange);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_has_begun_is_waited_for_and_a_stream_that_is_silent_is_left_alone() {
        for part in [begun(100, 10), begun(100, 0).slice(..3)] {
            let mut messages = sent(vec![part.clone()], None);
            assert_eq!(taken(&mut messages).await.unwrap(), part.len());
            let begun = Instant::now();
            assert_eq!(taken(&mut messages).await.unwrap_err().code(), tonic::Code::DeadlineExceeded);
            assert!(begun.elapsed() >= MESSAGE_TIMEOUT && begun.elapsed() < MESSAGE_TIMEOUT * 2);
        }
        let mut messages = sent(vec![begun(4, 4)], None);
        taken(&mut messages).await.unwrap();
        assert!(tokio::time::timeout(MESSAGE_TIMEOUT * 10, messages.frame()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_comes_slowly_is_waited_for_and_one_that_hardly_comes_is_not() {
        for (pause, comes) in [(PROGRESS_TIME, true), (PROGRESS_TIME * 4, false)] {
            let part = Bytes::from(vec![7; PROGRESS_BYTES as usize]);
            let rest = std::iter::repeat_n(part, MOST / PROGRESS_BYTES as usize);
            let parts = stream::iter(std::iter::once(begun(MOST, 0)).chain(rest)).then(move |part| async move {
                tokio::time::sleep(pause).await;
                Ok::<_, Infallible>(Frame::data(part))
            });
            let mut messages = Messages::new(Body::new(StreamBody::new(parts)), MOST, None);
            let begun = Instant::now();
            let all = async {
                while let Some(frame) = messages.frame().await {
                    frame?;
                }
                Ok::<_, Status>(())
            };
            assert_eq!(
                all.await.map_err(|status| status.code()),
                comes.then_some(()).ok_or(tonic::Code::DeadlineExceeded)
            );
            assert!(begun.elapsed() > MESSAGE_TIMEOUT, "{:?}", begun.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_was_busy_meanwhile_waits_once_more() {
        let mut messages = sent(vec![begun(100, 10)], None);
        taken(&mut messages).await.unwrap();
        assert!(messages.frame().now_or_never().is_none());
        tokio::time::advance(MESSAGE_TIMEOUT * 2).await;
        let again = Instant::now();
        assert_eq!(taken(&mut messages).await.unwrap_err().code(), tonic::Code::DeadlineExceeded);
        assert!(again.elapsed() >= MESSAGE_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn long_ones_of_a_client_share_some_room_and_short_ones_need_none() {
        let tenants = crate::service::tenants(&schema::Master::default());
        let connection = tenants.admit(&Identity::new("c", Role::Client, "n").unwrap()).unwrap().unwrap();
        let tenant: Arc<Tenant> = (*connection).clone();
        let mut long: Vec<Messages> =
            (0..(ROOM_KIB << 10) / MOST).map(|_| sent(vec![begun(MOST, 10)], Some(&tenant))).collect();
        for messages in &mut long {
            taken(messages).await.unwrap();
        }
        let rest = Bytes::from(vec![7; MOST - 10]);
        let mut one_more = sent(vec![begun(MOST, 10), rest], Some(&tenant));
        assert!(one_more.frame().now_or_never().is_none());
        taken(&mut sent(vec![begun(SHORT, 10)], Some(&tenant))).await.unwrap();
        let mut refused = sent(vec![begun(MOST, 10)], Some(&tenant));
        let begun_at = Instant::now();
        assert_eq!(taken(&mut refused).await.unwrap_err().code(), tonic::Code::Unavailable);
        assert!(begun_at.elapsed() >= ROOM_PATIENCE && begun_at.elapsed() < ROOM_PATIENCE * 2);
        drop(refused);
        // One of them ends.
        long.pop();
        taken(&mut one_more).await.unwrap();
        assert_eq!(tenant.messages.available_permits(), 0);
        taken(&mut one_more).await.unwrap();
        assert_eq!(tenant.messages.available_permits(), MOST >> 10, "it is complete");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_complete_does_not_wait_with_the_one_that_begins_behind_it() {
        let tenants = crate::service::tenants(&schema::Master::default());
        let connection = tenants.admit(&Identity::new("c", Role::Client, "n").unwrap()).unwrap().unwrap();
        let tenant: Arc<Tenant> = (*connection).clone();
        // A long message has taken some room, and comes to its end with a frame in which others follow.
        let (long, rest) = (begun(MOST, 10), vec![7u8; MOST - 10]);
        let end = [&rest[..], &begun(3, 3)[..], &begun(0, 0)[..]].concat();
        let next = begun(MOST, 20);
        let both = Bytes::from([&end[..], &next[..]].concat());
        let mut messages = sent(vec![long.clone(), both.clone()], Some(&tenant));
        assert_eq!(taken(&mut messages).await.unwrap(), long.len());
        let others = tenant.messages.clone().acquire_many_owned(tenant.messages.available_permits() as u32);
        let others = others.await.unwrap();
        // What it gives back is not enough, for somebody else takes that.
        let mut another = sent(vec![begun(MOST, 10)], Some(&tenant));
        assert!(another.frame().now_or_never().is_none());
        assert_eq!(taken(&mut messages).await.unwrap(), end.len());
        assert!(messages.frame().now_or_never().is_none());
        assert!(!messages.is_end_stream());
        drop(others);
        assert_eq!(taken(&mut messages).await.unwrap(), next.len());

        // Where there is no room, the one that begins is refused alone.
        let room = tenant.messages.clone().acquire_many_owned(tenant.messages.available_permits() as u32);
        let _room = room.await.unwrap();
        let whole = begun(3, 3);
        let frame = Bytes::from([&whole[..], &begun(MOST, 20)[..]].concat());
        let mut refused = sent(vec![frame], Some(&tenant));
        assert_eq!(taken(&mut refused).await.unwrap(), whole.len());
        assert_eq!(taken(&mut refused).await.unwrap_err().code(), tonic::Code::Unavailable);
        // And where there is room, nothing is cut.
        let mut uncut = sent(vec![both.slice(rest.len()..)], None);
        assert_eq!(taken(&mut uncut).await.unwrap(), both.len() - rest.len());
    }
}
