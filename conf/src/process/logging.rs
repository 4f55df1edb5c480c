use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt;

use super::ProcessError;
use crate::schema::{Log, LogFormat};

/// The library that keeps the master's log; its messages are of this target.
const CONSENSUS: &str = "openraft";
const CONSENSUS_WARNS: &str = "openraft=warn";

/// Sends this process's log to stderr, in the configured level and format; once per process.
///
/// # Errors
/// [`ProcessError::LogLevel`] for directives that do not parse, [`ProcessError::LoggingTwice`] the second time.
pub fn init_logging(log: &Log) -> Result<(), ProcessError> {
    let filter = parse_level(&log.level)?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(log.format == LogFormat::Text && std::io::stderr().is_terminal());
    let set = match log.format {
        LogFormat::Text => lines.finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init(),
    };
    set.map_err(|_| ProcessError::LoggingTwice)
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
    // At this level the library of the log prints its whole state at every start, which tells an operator nothing.
    let is_info = directives.iter().any(|directive| directive.eq_ignore_ascii_case("info"));
    if is_info && !directives.iter().any(|directive| directive.starts_with(CONSENSUS)) {
        directives.push(CONSENSUS_WARNS);
    }
    EnvFilter::try_new(directives.join(",")).map_err(|error| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_of_the_log_is_heard_when_it_warns_or_is_asked_for() {
        let shown = |level: &str| parse_level(level).unwrap().to_string();
        for level in ["info", "INFO", "info,cavern_worker=debug"] {
            assert!(shown(level).contains("openraft=warn"), "{level}: {}", shown(level));
        }
        for level in ["debug", "off", "error", "info,openraft=debug"] {
            assert!(!shown(level).contains("openraft=warn"), "{level}: {}", shown(level));
        }
    }

    #[test]
    fn levels_and_directives_are_told_from_nonsense() {
        for good in ["info", "WARN", "info,cavern_worker=debug", "off", "warn, cavern_master::raft=trace"] {
            assert!(parse_level(good).is_ok(), "{good}");
        }
        for bad in ["", "verbose", "info,,debug", "info,cavern_worker=loud", "cavern_worker", "a[=info"] {
            let error = parse_level(bad).unwrap_err().to_string();
            assert!(error.contains("log.level") && error.contains("\"info\""), "{bad}: {error}");
        }
    }
}
