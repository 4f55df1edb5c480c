//! `cv top`: what mounts, clients and workers do, while they do it.

use std::fs;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, eventually};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
/// Objects that are read once each, one in so many milliseconds: as long as a test looks, it finds somebody reading.
const OBJECTS: usize = 1500;
const PACE: Duration = Duration::from_millis(10);

/// Somebody who reads what is not cached, and writes, until this is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    work: Option<JoinHandle<()>>,
}

impl Busy {
    fn start(cluster: &Cluster) -> Self {
        let tree = cluster.seed("bucket", "data/", OBJECTS, 2000);
        cluster.mount("s3://bucket/data", "/data", &[]);
        cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
        let read = tree.keys().map(|key| cluster.path("data").join(key.trim_start_matches("data/")));
        let (read, written): (Vec<_>, _) = (read.collect(), cluster.path("work/written"));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let work = thread::spawn(move || {
            let mut read = read.into_iter();
            while !stopped.load(Ordering::Relaxed) {
                if let Some(path) = read.next() {
                    fs::read(path).unwrap();
                }
                fs::write(&written, vec![7; 100_000]).unwrap();
                thread::sleep(PACE);
            }
        });
        Self { stop, work: Some(work) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.work.take().map(JoinHandle::join);
        assert!(thread::panicking() || ended.is_none_or(|ended| ended.is_ok()), "reading or writing failed");
    }
}

/// Gives a command a terminal, and passes on what is typed; ends with it.
struct Terminal(Child);

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended, unless the test fails.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn up() -> Cluster {
    // What kernels read by themselves is not counted; what is written stays to be persisted.
    let conf = format!("[fuse]\npassthrough = false\n[master]\npersist_delay = \"1h\"\n{COUNTED}");
    Cluster::up(Options { conf, ..Options::default() })
}

fn row<'v>(top: &'v Value, table: &str, field: &str, is_it: impl Fn(&str) -> bool) -> Option<&'v Value> {
    top[table].as_array()?.iter().find(|row| row[field].as_str().is_some_and(&is_it))
}

#[test]
fn rates_are_shown_by_mount_by_client_and_by_worker() {
    let cluster = up();
    let _busy = Busy::start(&cluster);
    let mount_point = cluster.mount_point().to_str().unwrap();
    eventually("all that is done is seen", PATIENCE, || {
        let top = cluster.cv(&["top", "--once", "--json", "--interval", "1s"]).json();
        let (data, work) = (
            row(&top, "mounts", "path", |path| path == "/data")?,
            row(&top, "mounts", "path", |path| path == "/work")?,
        );
        let client = row(&top, "clients", "client", |name| name.ends_with(mount_point))?;
        let worker = row(&top, "workers", "state", |state| state == "live")?;
        let is_some = |row: &Value, field: &str| row[field].as_f64().unwrap() > 0.0;
        let is_seen = is_some(data, "read_bytes_per_second")
            && is_some(data, "reads_per_second")
            && is_some(data, "miss_bytes_per_second")
            && is_some(work, "written_bytes_per_second")
            && is_some(client, "read_bytes_per_second")
            && is_some(client, "written_bytes_per_second")
            && is_some(&top, "written_bytes_per_second")
            && is_some(worker, "used_bytes")
            && is_some(worker, "ufs_bytes_per_second")
            && work["persist"]["files"].as_u64()? > 0;
        assert!(data["persist"].is_null(), "{top}");
        assert_eq!(data["written_bytes_per_second"], 0.0, "{top}");
        is_seen.then_some(())
    });
    // For people, and what is asked for first.
    let first_of = |sort: &str| {
        // Long enough for clients to say something within it.
        let said = cluster.cv(&["top", "--once", "--interval", "3s", "--sort", sort]).stdout;
        let lines: Vec<&str> = said.lines().collect();
        assert!(["WORKER", "CLIENT"].iter().all(|table| lines.iter().any(|line| line.starts_with(table))), "{said}");
        let mounts = lines.iter().position(|line| line.starts_with("MOUNT")).unwrap();
        lines[mounts + 1].split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!((first_of("written").as_str(), first_of("name").as_str()), ("/work", "/data"));
    let refused = cluster.try_cv(&["top", "--once", "--interval", "10ms"]);
    assert!(refused.code == 2 && refused.stderr.contains("shorter than 1s"), "{refused:?}");
}

#[test]
fn a_terminal_is_drawn_anew_and_sorted_by_keys_and_left_as_it_was() {
    let cluster = up();
    let command = cluster.command(&["top", "--interval", "1s"]);
    let words: Vec<&str> =
        [command.get_program()].into_iter().chain(command.get_args()).flat_map(|word| word.to_str()).collect();
    let shown = cluster.directory().join("top.shown");
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &words.join(" "), "/dev/null"]).env("CV_CONF", cluster.status().conf).env("TERM", "xterm");
    terminal.stdin(Stdio::piped()).stdout(fs::File::create(&shown).unwrap());
    let mut terminal = Terminal(terminal.spawn().unwrap());
    let mut keys = terminal.0.stdin.take().unwrap();
    let shows = |text: &str| {
        eventually(&format!("it shows {text:?}"), PATIENCE, || {
            String::from_utf8_lossy(&fs::read(&shown).unwrap()).contains(text).then_some(())
        });
    };
    shows("\u{1b}[?1049h");
    shows("sorted by Read");
    shows("1 worker live");
    keys.write_all(b"w").unwrap();
    shows("sorted by Written");
    keys.write_all(b"xn").unwrap();
    shows("sorted by Name");
    keys.write_all(b"q").unwrap();
    let ended = eventually("it ends", PATIENCE, || terminal.0.try_wait().unwrap());
    assert!(ended.success(), "{ended:?}");
    shows("\u{1b}[?25h\u{1b}[?1049l");
}
