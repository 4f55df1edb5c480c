//! Where this process's log goes, and what never gets into it.
//!
//! Libraries that handle credentials, and those that send them, describe what they do at the finer levels, and nothing
//! binds them to leave a secret out. So below `warn` they are silent, whatever the configuration asks for. Types of
//! ours that hold secrets have a `Debug` that hides them.

use std::io::IsTerminal;

use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::ProcessError;
use crate::schema::{Log, LogFormat};

/// The library that keeps the master's log; its messages are of this target.
const CONSENSUS: &str = "openraft";
/// What it warns of and is no news: that whoever proposed something has gone before the answer, as when a lead ends;
/// that a write was on disk after the vote had changed, or after the end was asked for. Of a master that does not
/// answer ours says so once, and the library with each of its many attempts.
const CONSENSUS_WARNS: [&str; 6] = [
    "openraft=warn",
    "openraft::raft=error",
    "openraft::core::raft_core=error",
    "openraft::core::heartbeat=error",
    "openraft::engine::handler::replication_handler=error",
    "openraft::replication=error",
];

/// Beginnings of the names of crates that see credentials, as settings, in signatures or in headers.
const DISCREET: [&str; 6] = ["reqsign", "opendal", "hyper", "h2", "rustls", "s3s"];

/// Sends this process's log to stderr, in the configured level and format; once per process. Of crates that see
/// credentials there are warnings and errors only.
///
/// # Errors
/// [`ProcessError::LogLevel`] for directives that do not parse, [`ProcessError::LoggingTwice`] the second time.
pub fn init_logging(log: &Log) -> Result<(), ProcessError> {
    let filter = parse_level(&log.level)?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(log.format == LogFormat::Text && std::io::stderr().is_terminal());
    let discreet = filter_fn(is_discreet);
    let set = match log.format {
        LogFormat::Text => lines.finish().with(discreet).try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().with(discreet).try_init(),
    };
    set.map_err(|_| ProcessError::LoggingTwice)
}

fn is_discreet(metadata: &Metadata<'_>) -> bool {
    let sees_credentials = |name: &str| DISCREET.iter().any(|begins| name.starts_with(begins));
    *metadata.level() <= Level::WARN || !sees_credentials(metadata.target())
}

/// Levels of `log.level` that are no directives are refused: the library would take a mistyped level for the name
/// of a module, and the log would be silent.
pub(crate) fn parse_level(level: &str) -> Result<EnvFilter, ProcessError> {
    let refuse = |reason: String| ProcessError::LogLevel { level: level.to_owned(), reason };
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let known = |text: &str| LEVELS.iter().any(|name| name.eq_ignore_ascii_case(text));
    let mut directives: Vec<&str> = level.split(',').map(str::trim).collect();
    for directive in &directives {
        match directive.rsplit_once('=') {
            _ if directive.is_empty() => return Err(refuse("a directive is empty".to_owned())),
            Some((_, last)) if !known(last.trim()) => {
                return Err(refuse(format!("\"{last}\" is none of {}", LEVELS.join(", "))));
            }
            None if !known(directive) => {
                return Err(refuse(format!("\"{directive}\" is none of {}", LEVELS.join(", "))));
            }
            _ => {}
        }
    }
    // At this level the library of the log prints its whole state at every start, which is of no use to an operator.
    let is_info = directives.iter().any(|directive| directive.eq_ignore_ascii_case("info"));
    if is_info && !directives.iter().any(|directive| directive.starts_with(CONSENSUS)) {
        directives.extend(CONSENSUS_WARNS);
    }
    EnvFilter::try_new(directives.join(",")).map_err(|error| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    /// What was written to a log.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn crates_that_see_credentials_warn_and_say_nothing_else() {
        let written = Written::default();
        let writer = written.clone();
        let lines = tracing_subscriber::fmt()
            .with_env_filter(parse_level("trace,reqsign_core=trace").unwrap())
            .with_writer(move || writer.clone());
        tracing::subscriber::with_default(lines.finish().with(filter_fn(is_discreet)), || {
            tracing::debug!(target: "reqsign_core::api", "hush");
            tracing::info!(target: "opendal::services", "hush");
            tracing::trace!(target: "hyper_util::client", "hush");
            tracing::trace!(target: "h2::codec", "hush");
            tracing::warn!(target: "reqsign_core::api", "a warning");
            tracing::trace!(target: "cavern_ufs::s3", "a trace");
        });
        let text = String::from_utf8(written.0.lock().clone()).unwrap();
        assert!(!text.contains("hush") && text.contains("a warning") && text.contains("a trace"), "{text}");
    }

    #[test]
    fn the_library_of_the_log_is_heard_when_it_warns_or_is_asked_for() {
        let shown = |level: &str| parse_level(level).unwrap().to_string();
        for level in ["info", "INFO", "info,cavern_worker=debug"] {
            let all = CONSENSUS_WARNS.iter().all(|directive| shown(level).contains(directive));
            assert!(all, "{level}: {}", shown(level));
        }
        for level in ["debug", "off", "error", "info,openraft=debug"] {
            assert!(!shown(level).contains("openraft=warn"), "{level}: {}", shown(level));
        }
    }

    #[test]
    fn levels_and_directives_are_told_from_nonsense() {
        for good in ["info", "WARN", "info,cavern_worker=debug", "off", "warn, cavern_master::group=trace"] {
            assert!(parse_level(good).is_ok(), "{good}");
        }
        for bad in ["", "verbose", "info,,debug", "info,cavern_worker=loud", "cavern_worker", "a[=info"] {
            let error = parse_level(bad).unwrap_err().to_string();
            assert!(error.contains("log.level") && error.contains("\"info\""), "{bad}: {error}");
        }
    }
}
