//! The processors for all clients: one that makes many calls at once keeps nobody waiting who makes few.
//!
//! The runtime works on what is ready in the order in which it came to be so. A client with hundreds of calls under way
//! would have all of them before the only one of another. So while there are others, few calls of such a client are in
//! that order at a time, behind what came before them, and the rest waits for those.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};

use cavern_security::Tenant;
use tokio_util::sync::PollSemaphore;

/// Calls of one client under way that nobody else notices.
const FEW: usize = 8;

/// Makes a call of a client that has a turn for it, at its time.
pub(super) async fn step_by_step<T>(tenant: &Arc<Tenant>, answer: impl Future<Output = T>) -> T {
    let mut answer = pin!(answer);
    let mut steps = PollSemaphore::new(tenant.steps.clone());
    let (mut next, mut waits) = (None, false);
    poll_fn(|cx| {
        let others = tenant.shares_calls();
        // Whoever waits for a step gets one, and must pass it on, though nobody else be there any more.
        if next.is_none() && (waits || others && under_way(tenant) > FEW) {
            waits = true;
            next = ready!(steps.poll_acquire(cx));
            waits = false;
            // Behind all that is ready by now.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let _step = next.take();
        answer.as_mut().poll(cx)
    })
    .await
}

fn under_way(tenant: &Tenant) -> usize {
    tenant.limits().turns.saturating_sub(tenant.turns.available_permits())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use cavern_conf::schema;
    use cavern_security::{Identity, Role, TenantConnection};

    use super::*;
    use crate::service::tenants;

    const MANY: usize = 200;

    fn two() -> (TenantConnection, TenantConnection) {
        let tenants = tenants(&schema::Master::default());
        let tenant = |name| tenants.admit(&Identity::new("c", Role::Client, name).unwrap()).unwrap().unwrap();
        (tenant("flood"), tenant("quiet"))
    }

    /// A call that is woken once in its middle, and is worked on twice.
    async fn call(tenant: Arc<Tenant>, worked: Arc<AtomicUsize>) {
        let _turn = tenant.turns.acquire().await.unwrap();
        let work = async {
            worked.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            worked.fetch_add(1, Ordering::Relaxed);
        };
        step_by_step(&tenant, work).await;
    }

    #[tokio::test]
    async fn a_call_of_one_does_not_wait_for_hundreds_of_another() {
        let (flood, quiet) = two();
        let done = Arc::new(AtomicUsize::new(0));
        call(quiet.clone(), Arc::default()).await;
        let flooding: Vec<_> = (0..MANY).map(|_| tokio::spawn(call(flood.clone(), done.clone()))).collect();
        // It comes behind all of them.
        let (own, before) = (quiet.clone(), done.clone());
        let quiet = tokio::spawn(async move {
            call(own, Arc::default()).await;
            before.load(Ordering::Relaxed)
        });
        let before = quiet.await.unwrap();
        assert!(before <= 8 * flood.limits().steps + 2 * FEW, "it waited for {before} pieces of work of another");
        for call in flooding {
            call.await.unwrap();
        }
        assert_eq!(done.load(Ordering::Relaxed), 2 * MANY, "each is done, each once");
        assert_eq!(flood.steps.available_permits(), flood.limits().steps);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_step_passes_it_on_though_the_others_have_gone() {
        let (flood, quiet) = two();
        call(quiet.clone(), Arc::default()).await;
        let held = flood.steps.clone().acquire_many_owned(flood.limits().steps as u32).await.unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let flooding: Vec<_> = (0..MANY).map(|_| tokio::spawn(call(flood.clone(), done.clone()))).collect();
        tokio::task::yield_now().await;
        // By now nobody else is known, and nobody would have to wait who comes now.
        tokio::time::sleep(std::time::Duration::from_secs(10)).await;
        let given_up = flooding.len() / 2;
        flooding[..given_up].iter().for_each(tokio::task::JoinHandle::abort);
        drop(held);
        for call in flooding.into_iter().skip(given_up) {
            call.await.unwrap();
        }
        assert_eq!(
            flood.steps.available_permits(),
            flood.limits().steps,
            "nothing is lost of those that were given up"
        );
    }
}
