//! The plumbing of a process: what `cv master`, `cv worker` and `cv fuse` do alike around their own work.
//!
//! A process starts by [`create_privately`], [`init_logging`] and [`raise_descriptor_limit`], binds its ports
//! ([`bind_tcp`]), checks its directories ([`ensure_dir`]), prints one [`ready`] line on stdout and serves until the
//! token of [`shutdown_on_signals`] is cancelled. All that a start can fail of is in [`ProcessError`], whose text names
//! the thing, the cause and the configuration key to change.

mod ending;
mod error;
mod exposition;
mod limits;
mod log_limit;
mod logging;
mod metrics;
mod places;
mod signals;

use std::io::Write;

pub use ending::skip_destructors_at_exit;
pub use error::ProcessError;
pub use exposition::MetricsFormat;
pub use limits::raise_descriptor_limit;
pub use log_limit::LogLimit;
pub use logging::init_logging;
pub(crate) use logging::parse_level;
pub use metrics::Metrics;
pub use places::{
    MissingDir, bind_open_tcp, bind_tcp, create_privately, ensure_dir, serve_connections, warn_if_others_reach,
};
pub use signals::shutdown_on_signals;

/// Declares structs of metrics, each metric with the method of [`Metrics`] that registers it, and with its name and the
/// sentence that says what it is.
#[macro_export]
macro_rules! metrics {
    ($($(#[$group_doc:meta])* $group:ident {
        $(
            $(#[$doc:meta])*
            $visible:vis $field:ident: $type:ty = $register:ident($name:literal, $help:literal $(, $metric:expr)?);
        )+
    })+) => {$(
        $(#[$group_doc])*
        #[derive(Clone, Debug)]
        pub struct $group {
            $($(#[$doc])* $visible $field: $type,)+
        }

        impl $group {
            /// Registers all of them.
            pub fn register(metrics: &$crate::process::Metrics) -> Self {
                Self { $($field: metrics.$register($name, $help $(, $metric)?),)+ }
            }
        }
    )+};
}

/// Prints the line that reports to a supervisor that the process serves, with its true addresses (ports that were given
/// as 0 are filled in): `cv master ready grpc=127.0.0.1:7700 http=127.0.0.1:7701`.
///
/// Exactly one line goes to stdout; a closed stdout is no reason to stop, and is ignored.
pub fn ready(role: &str, endpoints: &[(&str, String)]) {
    let line = ready_line(role, endpoints);
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(line.as_bytes()).and_then(|()| out.flush());
}

fn ready_line(role: &str, endpoints: &[(&str, String)]) -> String {
    let mut line = format!("cv {role} ready");
    for (name, address) in endpoints {
        line.push_str(&format!(" {name}={address}"));
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use super::ready_line;

    #[test]
    fn the_ready_line_is_one_line() {
        let line = ready_line("worker", &[("data", "127.0.0.1:1".into()), ("socket", "/run/w.sock".into())]);
        assert_eq!(line, "cv worker ready data=127.0.0.1:1 socket=/run/w.sock\n");
        assert_eq!(ready_line("master", &[]), "cv master ready\n");
    }
}
