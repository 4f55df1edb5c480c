use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit status of a process that an impatient second interrupt ended: 128 + SIGINT, as shells count it.
const INTERRUPTED: i32 = 130;

/// A token that is cancelled by SIGTERM or SIGINT. Call it once, inside the runtime, before the process serves.
///
/// The first signal of either kind asks for an orderly end: the process drains and exits with 0. A second SIGINT ends
/// it at once with status 130, for the person at the terminal who has waited long enough. The task that listens belongs
/// to the runtime and lives as long as it.
pub fn shutdown_on_signals() -> CancellationToken {
    let stop = CancellationToken::new();
    // Handlers are in place when this returns, so that no signal after it can kill the process undrained.
    let (mut terminate, mut interrupt) = match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
        (Err(error), _) | (_, Err(error)) => {
            // Without handlers the signals keep their default effect: they end the process, only without draining.
            tracing::warn!(%error, "cannot handle SIGTERM and SIGINT: the process will end without draining");
            return stop;
        }
    };
    let cancelled = stop.clone();
    crate::host::spawn(async move {
        loop {
            let (name, urgent) = tokio::select! {
                Some(()) = terminate.recv() => ("SIGTERM", false),
                Some(()) = interrupt.recv() => ("SIGINT", cancelled.is_cancelled()),
                else => return,
            };
            if urgent {
                tracing::warn!("second SIGINT: ending without draining");
                std::process::exit(INTERRUPTED);
            }
            if !cancelled.is_cancelled() {
                tracing::info!(signal = name, "draining");
                cancelled.cancel();
            }
        }
    });
    stop
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    #[tokio::test]
    async fn sigterm_cancels_once_and_again_does_no_harm() {
        let stop = shutdown_on_signals();
        assert!(!stop.is_cancelled());
        kill_process(getpid(), Signal::TERM).unwrap();
        tokio::time::timeout(Duration::from_secs(10), stop.cancelled()).await.unwrap();
        kill_process(getpid(), Signal::TERM).unwrap();
        // The process still being here is the assertion; give the handler a turn.
        tokio::task::yield_now().await;
        assert!(stop.is_cancelled());
    }
}
