//! Where the figures are from.

use std::fs;
use std::path::Path;
use std::thread;

use cavern_conf::host::wall_ns;
use jiff::Timestamp;
use rustix::system::{sysinfo, uname};
use serde::Serialize;

use crate::local::mounted::kind_of;

/// Facts about this host and this program.
#[derive(Serialize)]
pub struct Machine {
    /// When the report was made, in UTC.
    at: String,
    version: &'static str,
    kernel: String,
    /// Processors that this process may use.
    cpus: usize,
    /// What the first of them calls itself.
    cpu_model: Option<String>,
    memory_bytes: u64,
}

impl Machine {
    pub fn this() -> Self {
        let memory = sysinfo();
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu_info.lines().find(|line| line.starts_with("model name"));
        let now = Timestamp::from_nanosecond(i128::from(wall_ns())).unwrap_or_default();
        Self {
            at: format!("{now:.0}"),
            version: env!("CARGO_PKG_VERSION"),
            kernel: uname().release().to_string_lossy().into_owned(),
            cpus: thread::available_parallelism().map_or(1, |cpus| cpus.get()),
            cpu_model: model.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned())),
            memory_bytes: memory.totalram.saturating_mul(memory.mem_unit.into()),
        }
    }

    /// In one line.
    pub fn summary(&self) -> String {
        let memory = self.memory_bytes as f64 / (1u64 << 30) as f64;
        format!(
            "cv {}, kernel {}, {} CPUs, {memory:.1} GiB of memory, {}",
            self.version, self.kernel, self.cpus, self.at
        )
    }
}

/// A directory with the type of the file system that it is in: `fuse.cv` is a mount of Cavern.
#[derive(Serialize)]
pub struct Place {
    pub path: String,
    pub file_system: Option<String>,
}

impl Place {
    pub fn of(path: &Path) -> Self {
        let whole = path.canonicalize().ok();
        Self { path: path.display().to_string(), file_system: whole.and_then(|whole| kind_of(&whole)) }
    }

    pub fn summary(&self) -> String {
        match &self.file_system {
            Some(kind) => format!("{} ({kind})", self.path),
            None => self.path.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_plausible() {
        let machine = Machine::this();
        assert!(machine.cpus >= 1 && machine.memory_bytes > 64 << 20, "{}", machine.summary());
        assert!(machine.kernel.contains('.') && machine.at.starts_with("20") && machine.at.ends_with('Z'));
        assert_eq!(Place::of(Path::new("/proc/self")).summary(), "/proc/self (proc)");
        assert_eq!(Place::of(Path::new("/none/at/all")).summary(), "/none/at/all");
    }
}
