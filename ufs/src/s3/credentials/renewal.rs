//! Credentials that end are renewed before they do: by one task for all who use them, while those of before are in use.
//!
//! A renewal is not part of the request that finds it due. It has a time limit of its own, and goes on when that
//! request has given up. One that fails is tried again after a pause that doubles; as long as the credentials of before
//! are good, that is a warning in the log and nothing else.
//!
//! `Signer` of reqsign-core 3.3 fetches in the request that finds credentials about to end, without a time limit and
//! while all others wait, and that request fails if this does, though those of before are still good. It never fetches
//! others in place of credentials whose end is not told, as those of files that change, and has none to hand on.
//! `Granter`, which takes on a role, keeps nothing of what it gets.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use cavern_conf::backoff::{CREDENTIALS, CREDENTIALS_EARLY};
use cavern_conf::host;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use reqsign_aws_v4::Credential;
use reqsign_core::time::Timestamp;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::s3::keys::{KeyError, VendedKeys};
use crate::s3::listing::nanoseconds;

/// Longest time that fetching may take, all its requests together.
const FETCH: Duration = Duration::from_secs(10);

/// Credentials are renewed so long before their end, or in the middle of a shorter life.
const EARLY: Duration = Duration::from_secs(300);

/// Those whose end is not known may have been replaced where they come from: files are read again after this.
const REREAD: Duration = Duration::from_secs(300);

/// Credentials that a store calls expired before their time are given up, if they are older than this: others would be
/// no better.
const FRESH: Duration = Duration::from_secs(5);

/// Requests that were signed with some that were given up come back for so long.
const UNDER_WAY: Duration = Duration::from_secs(2);

/// A request that is signed now has to arrive before the end. Of a short life it is a twentieth.
const MARGIN: Duration = Duration::from_secs(10);

/// When credentials are renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// [`EARLY`].
    Late,
    /// In the middle of their life: whoever gets them has to renew them in turn.
    HalfLife,
}

pub(crate) type Fetch = Arc<dyn Fn() -> BoxFuture<'static, Result<Credential, KeyError>> + Send + Sync + 'static>;

/// Credentials that are fetched, kept and renewed. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Renewing(Arc<Inner>);

struct Inner {
    /// Where they come from, as messages name it.
    giver: String,
    fetch: Fetch,
    due: Due,
    /// Longest wait of one request for credentials to be there.
    patience: Duration,
    state: Mutex<State>,
    /// How many attempts there have been.
    rounds: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    held: Option<CachedCredential>,
    running: Option<Running>,
    /// Attempts that failed in a row, what the last one said, and when there may be the next one.
    failures: u32,
    /// When credentials were given up before their time.
    given_up: Option<Instant>,
    error: Option<KeyError>,
    next_attempt: Option<Instant>,
}

struct CachedCredential {
    credential: Credential,
    fetched_at: Instant,
    renew_at: Instant,
    /// No request is signed with them any more then; `None` if their end is not known.
    usable_until: Option<Instant>,
}

/// A renewal; it ends with those who would use what it fetches.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl fmt::Debug for Renewing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewing").field("giver", &self.0.giver).finish_non_exhaustive()
    }
}

impl CachedCredential {
    fn new(credential: Credential, due: Due, now: Instant) -> Option<Self> {
        let Some(end) = credential.expires_in else {
            return Some(Self { credential, fetched_at: now, renew_at: now + REREAD, usable_until: None });
        };
        let left = end.as_system_time().duration_since(Timestamp::now().as_system_time()).ok()?;
        let early = match due {
            Due::Late => EARLY.min(left / 2).mul_f64(host::jitter(0.8..1.0)),
            Due::HalfLife => left / 2,
        };
        let usable_until = Some(now + left.saturating_sub(MARGIN.min(left / 20)));
        Some(Self { credential, fetched_at: now, renew_at: now + left.saturating_sub(early), usable_until })
    }

    fn is_usable(&self, now: Instant) -> bool {
        self.usable_until.is_none_or(|until| now < until)
    }

    /// By the clock of the wall.
    fn has_ended(&self) -> bool {
        let now = Timestamp::now().as_system_time();
        self.credential.expires_in.is_some_and(|end| end.as_system_time() <= now)
    }

    /// As another process gets them; `None` for those without an end.
    fn keys(&self) -> Option<VendedKeys> {
        let Credential { access_key_id, secret_access_key, session_token, expires_in } = self.credential.clone();
        let expires_ns = nanoseconds(expires_in?);
        let session_token = session_token.unwrap_or_default();
        Some(VendedKeys { access: access_key_id, secret: secret_access_key, session_token, expires_ns })
    }
}

impl Renewing {
    pub(crate) fn new(giver: String, patience: Duration, due: Due, fetch: Fetch) -> Self {
        let (state, rounds) = (Mutex::default(), watch::Sender::new(0));
        Self(Arc::new(Inner { giver, fetch, due, patience, state, rounds }))
    }

    pub(super) fn downgrade(&self) -> WeakRenewing {
        WeakRenewing(Arc::downgrade(&self.0))
    }

    /// Where they come from, as messages name it.
    pub(crate) fn giver(&self) -> &str {
        &self.0.giver
    }

    /// The store says that they have expired: others are fetched. Whether these are others than those that it meant, or
    /// may be soon.
    pub(crate) fn give_up(&self) -> bool {
        let mut state = self.0.state.lock();
        let now = Instant::now();
        match &state.held {
            None => true,
            Some(held) if now - held.fetched_at < FRESH => state.given_up.is_some_and(|at| now - at < UNDER_WAY),
            Some(_) => {
                let giver = &self.0.giver;
                tracing::warn!("the store says that the credentials of {giver} have expired: others are fetched");
                (state.held, state.given_up) = (None, Some(now));
                self.begin(&mut state);
                true
            }
        }
    }

    /// What a request is signed with now; it says nothing of its end, which is looked at here.
    pub(crate) async fn credential(&self) -> Result<Credential, KeyError> {
        self.get(|held| Credential { expires_in: None, ..held.credential.clone() }).await
    }

    /// Those that there are, to be handed on. A renewal that is due is waited for; where it fails, or takes long, those
    /// of before do as long as they are good.
    pub(in crate::s3) async fn lasting(&self) -> Result<VendedKeys, KeyError> {
        let renewing = {
            let mut state = self.0.state.lock();
            let now = Instant::now();
            // This host may have slept, or its clock have been set: nobody else tells of it.
            if state.held.as_ref().is_some_and(CachedCredential::has_ended) {
                state.held = None;
            }
            let is_due = state.held.as_ref().is_some_and(|held| held.renew_at <= now);
            if is_due && state.next_attempt.is_none_or(|next| next <= now) {
                self.begin(&mut state);
            }
            (is_due && state.is_running()).then(|| self.0.rounds.subscribe())
        };
        if let Some(mut rounds) = renewing {
            let _late = timeout(self.0.patience, rounds.changed()).await;
        }
        let endless = || KeyError::Refused(format!("the credentials of {} have no end", self.0.giver));
        self.get(CachedCredential::keys).await?.ok_or_else(endless)
    }

    /// Until when those last that there are, in nanoseconds since the Unix epoch, and why there are no newer ones.
    pub(in crate::s3) fn status(&self) -> (Option<i64>, Option<String>) {
        let state = self.0.state.lock();
        let keys = state.held.as_ref().and_then(CachedCredential::keys);
        (keys.map(|keys| keys.expires_ns), state.error.as_ref().map(ToString::to_string))
    }

    async fn get<T>(&self, take: impl Fn(&CachedCredential) -> T) -> Result<T, KeyError> {
        let (mut rounds, has_ended) = {
            let mut state = self.0.state.lock();
            let now = Instant::now();
            let may_begin = state.next_attempt.is_none_or(|next| next <= now);
            if let Some(held) = state.held.as_ref().filter(|held| held.is_usable(now)) {
                let (taken, is_due) = (take(held), held.renew_at <= now);
                if is_due && may_begin {
                    self.begin(&mut state);
                }
                return Ok(taken);
            }
            if !state.is_running() {
                match &state.error {
                    Some(error) if !may_begin => return Err(state.named(error.clone())),
                    _ => self.begin(&mut state),
                }
            }
            (self.0.rounds.subscribe(), state.held.is_some())
        };
        let late = || {
            let (giver, patience) = (&self.0.giver, self.0.patience);
            let error = KeyError::Unavailable(format!("{giver} has not answered for {patience:?}"));
            if has_ended { error.after_the_end() } else { error }
        };
        timeout(self.0.patience, rounds.changed()).await.ok().and_then(Result::ok).ok_or_else(late)?;
        let state = self.0.state.lock();
        let now = Instant::now();
        match (state.held.as_ref().filter(|held| held.is_usable(now)), &state.error) {
            (Some(held), _) => Ok(take(held)),
            (None, Some(error)) => Err(state.named(error.clone())),
            (None, None) => Err(late()),
        }
    }

    fn begin(&self, state: &mut State) {
        if state.is_running() {
            return;
        }
        let (fetch, inner) = (self.0.fetch.clone(), Arc::downgrade(&self.0));
        let giver = self.0.giver.clone();
        state.running = Some(Running(host::spawn(async move {
            let fetched = timeout(FETCH, fetch())
                .await
                .unwrap_or_else(|_| Err(KeyError::Unavailable(format!("{giver} has not answered for {FETCH:?}"))));
            if let Some(inner) = inner.upgrade() {
                inner.finish(fetched);
            }
        })));
    }
}

impl State {
    fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.0.is_finished())
    }

    /// An error of a request that finds none that are good.
    fn named(&self, error: KeyError) -> KeyError {
        if self.held.is_some() { error.after_the_end() } else { error }
    }
}

impl Inner {
    fn finish(&self, fetched: Result<Credential, KeyError>) {
        let now = Instant::now();
        let ended = || KeyError::Refused(format!("the credentials of {} have ended already", self.giver));
        let fetched = fetched.and_then(|credential| CachedCredential::new(credential, self.due, now).ok_or_else(ended));
        let mut state = self.state.lock();
        match fetched {
            Ok(held) => *state = State { held: Some(held), given_up: state.given_up, ..State::default() },
            Err(error) => {
                let good = state.held.as_ref().filter(|held| held.is_usable(now));
                let pause = match good {
                    None => CREDENTIALS.pause(state.failures),
                    Some(CachedCredential { usable_until: Some(until), .. }) => {
                        let left = until.saturating_duration_since(now);
                        CREDENTIALS_EARLY.pause(state.failures).min(left.max(CREDENTIALS_EARLY.first))
                    }
                    Some(_) => REREAD,
                };
                if good.is_some() {
                    tracing::warn!("credentials cannot be renewed, those of before are in use: {error}");
                }
                state.failures += 1;
                state.error = Some(error);
                state.next_attempt = Some(now + pause);
                state.running = None;
            }
        }
        drop(state);
        self.rounds.send_modify(|rounds| *rounds += 1);
    }
}

/// Does not keep them.
pub(in crate::s3) struct WeakRenewing(Weak<Inner>);

impl WeakRenewing {
    pub(super) fn upgrade(&self) -> Option<Renewing> {
        self.0.upgrade().map(Renewing)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::time::{advance, sleep};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const PATIENCE: Duration = Duration::from_secs(4);

    type Answer = (Duration, Result<Duration, KeyError>);

    /// Renews from answers that each come after a time and live for one, and counts how many were asked for.
    fn renewing(answers: Vec<Answer>) -> (Renewing, Arc<Mutex<usize>>) {
        renewing_when(Due::Late, answers)
    }

    fn renewing_when(due: Due, answers: Vec<Answer>) -> (Renewing, Arc<Mutex<usize>>) {
        let asked = Arc::new(Mutex::new(0));
        let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
        let count = asked.clone();
        let fetch: Fetch = Arc::new(move || {
            let (after, answer) = answers.lock().pop_front().expect("an attempt that is expected");
            *count.lock() += 1;
            let number = *count.lock();
            Box::pin(async move {
                sleep(after).await;
                answer.map(|life| Credential {
                    access_key_id: format!("key-{number}"),
                    secret_access_key: "hush".to_owned(),
                    session_token: None,
                    expires_in: Some(Timestamp::now() + life),
                })
            })
        });
        (Renewing::new("STS".to_owned(), PATIENCE, due, fetch), asked)
    }

    async fn key(renewing: &Renewing) -> Result<String, KeyError> {
        renewing.credential().await.map(|credential| credential.access_key_id)
    }

    fn down() -> KeyError {
        KeyError::Unavailable("STS is down".to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_wait_are_served_by_one_attempt() {
        let (renewing, asked) = renewing(vec![(Duration::from_secs(1), Ok(HOUR))]);
        let waiting = (0..100).map(|_| key(&renewing));
        for key in futures::future::join_all(waiting).await {
            assert_eq!(key.unwrap(), "key-1");
        }
        assert_eq!(*asked.lock(), 1);
        advance(HOUR - Duration::from_secs(320)).await;
        assert_eq!((key(&renewing).await.unwrap(), *asked.lock()), ("key-1".to_owned(), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn those_of_before_are_in_use_while_they_are_renewed() {
        let (renewing, asked) = renewing(vec![(Duration::ZERO, Ok(HOUR)), (Duration::from_secs(8), Ok(HOUR))]);
        assert_eq!(key(&renewing).await.unwrap(), "key-1");
        advance(HOUR - Duration::from_secs(200)).await;
        let began = Instant::now();
        for _ in 0..100 {
            assert_eq!(key(&renewing).await.unwrap(), "key-1");
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        sleep(Duration::from_secs(9)).await;
        assert_eq!((key(&renewing).await.unwrap(), *asked.lock()), ("key-2".to_owned(), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_that_fails_is_tried_again_and_the_end_is_the_end() {
        let mut answers = vec![(Duration::ZERO, Ok(HOUR))];
        answers.extend((0..20).map(|_| (Duration::ZERO, Err(down()))));
        answers.push((Duration::ZERO, Ok(HOUR)));
        let (renewing, asked) = renewing(answers);
        assert_eq!(key(&renewing).await.unwrap(), "key-1");
        advance(HOUR - Duration::from_secs(200)).await;
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(185) {
            assert_eq!(key(&renewing).await.unwrap(), "key-1");
            sleep(Duration::from_millis(50)).await;
        }
        let attempts = *asked.lock();
        assert!((5..=14).contains(&attempts), "{attempts}");
        sleep(Duration::from_secs(6)).await;
        let mut errors = 0;
        let key = loop {
            match key(&renewing).await {
                Ok(key) => break key,
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("have ended") && text.contains("STS is down"), "{text}");
                }
            }
            errors += 1;
            sleep(Duration::from_millis(50)).await;
        };
        assert!(key.starts_with("key-") && key != "key-1" && errors > 100, "{key} after {errors}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_answer_is_waited_for_by_nobody_for_long_and_may_answer_late() {
        let (renewing, asked) =
            renewing(vec![(HOUR, Ok(HOUR)), (Duration::from_secs(6), Ok(HOUR)), (Duration::ZERO, Ok(HOUR))]);
        let began = Instant::now();
        let error = key(&renewing).await.unwrap_err().to_string();
        assert!(error.contains("STS has not answered for 4s"), "{error}");
        assert_eq!(began.elapsed(), PATIENCE);
        sleep(FETCH).await;
        // The first was given up after ten seconds; the second takes longer than one request waits.
        assert!(key(&renewing).await.is_err());
        sleep(Duration::from_secs(3)).await;
        assert_eq!((key(&renewing).await.unwrap(), *asked.lock()), ("key-2".to_owned(), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_a_store_calls_expired_are_given_up_unless_they_are_new() {
        let (renewing, asked) = renewing(vec![(Duration::ZERO, Ok(HOUR)), (Duration::ZERO, Ok(HOUR))]);
        assert_eq!(key(&renewing).await.unwrap(), "key-1");
        assert!(!renewing.give_up(), "others would be no better");
        advance(FRESH).await;
        assert!(renewing.give_up());
        assert!(renewing.give_up(), "of another request that was signed before");
        assert_eq!(key(&renewing).await.unwrap(), "key-2");
        assert!(renewing.give_up(), "of one more that was signed before");
        advance(UNDER_WAY).await;
        assert!(!renewing.give_up(), "the new ones are no better");
        assert_eq!((key(&renewing).await.unwrap(), *asked.lock()), ("key-2".to_owned(), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_are_handed_on_have_half_of_their_life_before_them_or_what_there_is() {
        let answers = vec![
            (Duration::from_secs(1), Ok(HOUR)),
            (Duration::from_secs(1), Ok(HOUR)),
            (Duration::ZERO, Err(down())),
            (HOUR, Ok(HOUR)),
        ];
        let (renewing, asked) = renewing_when(Due::HalfLife, answers);
        let access = async || renewing.lasting().await.map(|keys| keys.access);
        for access in futures::future::join_all((0..10).map(|_| access())).await {
            assert_eq!(access.unwrap(), "key-1");
        }
        advance(HOUR / 2 - Duration::from_secs(5)).await;
        assert_eq!((access().await.unwrap().as_str(), *asked.lock()), ("key-1", 1));
        advance(Duration::from_secs(10)).await;
        for access in futures::future::join_all((0..10).map(|_| access())).await {
            assert_eq!(access.unwrap(), "key-2");
        }
        assert_eq!((*asked.lock(), renewing.status().1), (2, None));
        // One that fails, and one that takes long, leave those of before.
        advance(HOUR / 2).await;
        assert_eq!(access().await.unwrap(), "key-2");
        let (until, error) = renewing.status();
        assert!(until.is_some() && error.unwrap().contains("STS is down"));
        advance(CREDENTIALS.longest).await;
        let began = Instant::now();
        assert_eq!(access().await.unwrap(), "key-2");
        assert_eq!((began.elapsed(), *asked.lock()), (PATIENCE, 4));
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_ended_when_it_comes_is_an_error() {
        let (renewing, _) = renewing(vec![(Duration::ZERO, Ok(Duration::ZERO))]);
        let error = key(&renewing).await.unwrap_err().to_string();
        assert!(error.contains("ended already"), "{error}");
    }
}
