//! `cv load`: what only the bucket has comes into the workers' cache. A path is loaded by a job of the masters, which
//! goes on without the command. A list of paths is gone through while the command runs, some of them at a time, and so
//! is what is only looked at: whoever begins anew finds what is cached by then.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::{counted, process};
use cavern_net::master::Stubs;
use cavern_proto::master::{Job, JobKind, JobState, LoadFilesRequest, SubmitLoadRequest};
use clap::Args;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;
use tokio::time::Instant;
use tonic::{Response, Status};

use super::connect::{LINE_PERIOD, POLL_PERIOD, Poller, ResultArgs, new_request_id, rpc, word};
use super::fs::{blocks, with_client};
use super::job::{RATE_SECONDS, begin};
use crate::console::{self, Progress};
use crate::error::{CliError, Context as _};

/// Paths of one request, and their bytes: a master takes a thousand, and a mebibyte.
const BATCH_PATHS: usize = 1000;
const BATCH_BYTES: usize = 512 << 10;
/// Requests under way at a time: while the last files of one are loaded the next one has begun.
const BATCHES: usize = 2;
/// Bytes of the longest path that masters take.
const PATH_MAX: usize = 4096;
/// The name of stdin.
const STDIN: &str = "-";

#[derive(Args)]
pub struct LoadArgs {
    /// File or directory of the namespace.
    #[arg(required_unless_present = "files_from")]
    path: Option<String>,
    /// Files and directories of the namespace, a path a line; - for stdin.
    #[arg(long, value_name = "LIST", conflicts_with = "path")]
    files_from: Option<PathBuf>,
    /// Only what the bucket lists: names, sizes and versions, and no content.
    #[arg(long)]
    metadata_only: bool,
    /// Load nothing, and say how much is cached. Exit code 1 unless all of it is.
    #[arg(long, conflicts_with_all = ["metadata_only", "evict", "watch"])]
    check: bool,
    /// Drop what is cached, as `cv fs free` does.
    #[arg(long, conflicts_with_all = ["metadata_only", "watch"])]
    evict: bool,
    /// Show progress until the job ends. A list is always followed to its end.
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    result: ResultArgs,
}

impl LoadArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let Self { path, files_from, metadata_only, check, evict, watch, result } = self;
        let kind = match (check, metadata_only) {
            (true, _) => JobKind::Check,
            (_, true) => JobKind::LoadMetadata,
            _ => JobKind::Load,
        };
        let (name, paths) = match (path, files_from) {
            (Some(path), _) if !check && !evict => {
                let request = SubmitLoadRequest { path, request_id: new_request_id(), metadata_only };
                return begin(&result, watch, rpc!(cluster.submit_load(request))).await;
            }
            (Some(path), _) => (path.clone(), vec![path]),
            (None, Some(list)) => {
                let name = if list == Path::new(STDIN) { "stdin".to_owned() } else { list.display().to_string() };
                let paths = listed(&name, &read(&list)?)?;
                (name, paths)
            }
            (None, None) => return Err(CliError::Usage("name a path, or a list of paths with --files-from".into())),
        };
        if evict {
            return with_client(&result.cluster, async |client| blocks::free(client, &paths, &result).await).await;
        }
        load_list(ListProgress::new(kind, name, paths.len() as u64), batches(paths), &result).await
    }
}

fn read(list: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    let read = match list == Path::new(STDIN) {
        true => std::io::copy(&mut std::io::stdin().lock(), &mut bytes).map(drop),
        false => std::fs::read(list).map(|read| bytes = read),
    };
    read.context(format_args!("cannot read the list {}", list.display()))?;
    Ok(bytes)
}

/// The paths of a list. All of it is looked at before anything is begun.
fn listed(name: &str, list: &[u8]) -> Result<Vec<String>, CliError> {
    let mut paths = Vec::new();
    for (line, number) in list.split(|byte| *byte == b'\n').zip(1_u64..) {
        let refused = |why: &str| Err(CliError::Usage(format!("{name}, line {number}: {why}")));
        match std::str::from_utf8(line) {
            Ok("") => {}
            Ok(path) if path.len() > PATH_MAX => return refused("the path is longer than 4096 bytes"),
            Ok(path) if path.starts_with('/') => paths.push(path.to_owned()),
            Ok(path) => return refused(&format!("{path:?} is no absolute path of the namespace: begin it with /")),
            Err(_) => return refused("the path is no UTF-8"),
        }
    }
    if paths.is_empty() { Err(CliError::Usage(format!("{name} has no paths: write one a line"))) } else { Ok(paths) }
}

fn batches(paths: Vec<String>) -> Vec<Vec<String>> {
    let mut batches: Vec<Vec<String>> = Vec::new();
    let mut bytes = 0;
    for path in paths {
        bytes += path.len();
        match batches.last_mut() {
            Some(batch) if batch.len() < BATCH_PATHS && bytes <= BATCH_BYTES => batch.push(path),
            _ => {
                bytes = path.len();
                batches.push(vec![path]);
            }
        }
    }
    batches
}

/// Goes through a list, also over the restart of a master. An interrupt ends that.
///
/// # Errors
/// Some path could not be loaded, or is not cached where that is the question; the command was interrupted, or no
/// master answered for long.
async fn load_list(progress: ListProgress, batches: Vec<Vec<String>>, result: &ResultArgs) -> Result<(), CliError> {
    let stop = process::shutdown_on_signals();
    let follower = Poller::new(result.cluster.masters().await?, "the load");
    let progress = RefCell::new(progress);
    let work = stream::iter(batches.into_iter().enumerate())
        .map(|(number, paths)| load_batch(&follower, &progress, number, paths))
        .buffer_unordered(BATCHES)
        .try_collect::<()>();
    tokio::select! {
        ended = work => ended?,
        failed = show(&progress, result.json) => return failed,
        () = stop.cancelled() => {
            let done = progress.borrow().line();
            return Err(CliError::Failed(format!(
                "interrupted: {done}; the same command goes on from here, since what is cached is not fetched again"
            )));
        }
    }
    let progress = progress.into_inner();
    progress.say(result.json)?;
    progress.outcome()
}

async fn load_batch(
    follower: &Poller,
    progress: &RefCell<ListProgress>,
    number: usize,
    paths: Vec<String>,
) -> Result<(), CliError> {
    let (count, kind) = (paths.len() as u64, progress.borrow().kind);
    let request = LoadFilesRequest { paths, kind: kind.into() };
    // Begun anew, the master counts all of the batch once more.
    let ask = async |mut master: Stubs| {
        let mut reports = master.cluster.load_files(request.clone()).await?.into_inner();
        let mut last = Job::default();
        while let Some(job) = reports.message().await? {
            follower.is_answered();
            progress.borrow_mut().is_at(number, count, &job);
            last = job;
        }
        match last.state() {
            JobState::Done | JobState::Failed => Ok(Response::new(last)),
            _ => Err(Status::aborted("the master gave up loading: see its log")),
        }
    };
    let goes_on = "goes on when the same command is given: what is cached is not fetched again";
    let ended = follower.ask(Duration::MAX, goes_on, ask).await?;
    progress.borrow_mut().ended(number, count, &ended);
    Ok(())
}

/// Draws or says how far it is, for as long as it is asked.
async fn show(progress: &RefCell<ListProgress>, json: bool) -> Result<(), CliError> {
    let mut bar = Progress::new(json);
    loop {
        tokio::time::sleep(POLL_PERIOD).await;
        let now = progress.borrow();
        bar.show_or_say(now.part(), now.line(), LINE_PERIOD, || now.say(json))?;
    }
}

/// How far a list is.
struct ListProgress {
    kind: JobKind,
    /// What is loaded: a list, or a path.
    name: String,
    paths: u64,
    began: Instant,
    /// Paths that were gone through, and sums of what became of them.
    paths_done: u64,
    done: Job,
    /// Paths and sums of each batch that has not ended.
    under_way: BTreeMap<usize, (u64, Job)>,
}

impl ListProgress {
    fn new(kind: JobKind, name: String, paths: u64) -> Self {
        let (done, under_way) = (Job::default(), BTreeMap::new());
        Self { kind, name, paths, began: Instant::now(), paths_done: 0, done, under_way }
    }

    fn is_at(&mut self, batch: usize, paths: u64, job: &Job) {
        // A path is a file as a rule.
        let paths = job.files_done.saturating_add(job.errors).min(paths);
        self.under_way.insert(batch, (paths, job.clone()));
    }

    fn ended(&mut self, batch: usize, paths: u64, job: &Job) {
        self.under_way.remove(&batch);
        self.paths_done += paths;
        add(&mut self.done, job);
    }

    /// Paths that were gone through, and sums of all that is known.
    fn sums(&self) -> (u64, Job) {
        let (mut paths, mut sum) = (self.paths_done, self.done.clone());
        for (done, job) in self.under_way.values() {
            paths += done;
            add(&mut sum, job);
        }
        (paths, sum)
    }

    /// How many of how many paths; a directory alone has no share before its end.
    fn part(&self) -> Option<(u64, u64)> {
        (self.paths > 1).then(|| (self.sums().0, self.paths))
    }

    fn rate(&self, amount: u64) -> f64 {
        amount as f64 / self.began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE)
    }

    fn eta_seconds(&self, done: u64) -> Option<f64> {
        let (seconds, left) = (self.began.elapsed().as_secs_f64(), self.paths.saturating_sub(done));
        (seconds >= RATE_SECONDS && done > 0 && left > 0).then(|| seconds * left as f64 / done as f64)
    }

    fn view(&self) -> Value {
        let (paths_done, sum) = self.sums();
        // Of a check, those files are done that are cached.
        console::fields! { sum;
            files_total, files_done, bytes_total, bytes_done, bytes_fetched, errors, last_error;
            "kind": word(self.kind.as_str_name(), "JOB_KIND_"),
            "from": self.name,
            "paths": self.paths,
            "paths_done": paths_done,
            "seconds": self.began.elapsed().as_secs_f64(),
            "files_per_second": self.rate(sum.files_done),
            "bytes_per_second": self.rate(sum.bytes_done),
            "eta_seconds": self.eta_seconds(paths_done),
        }
    }

    fn line(&self) -> String {
        let (paths_done, sum) = self.sums();
        let bytes = format!("{} of {}", console::size(sum.bytes_done), console::size(sum.bytes_total));
        let errors = match sum.errors {
            0 => String::new(),
            errors => format!(", {}{}", counted(errors, "error"), console::prefixed(", the last: ", &sum.last_error)),
        };
        if self.kind == JobKind::Check {
            let share = console::share(sum.bytes_done, sum.bytes_total);
            let files = format!("{} of {} as a whole", sum.files_done, counted(sum.files_total, "file"));
            return format!("{}: {share} cached, {bytes}, {files}{errors}", self.name);
        }
        let left = console::left(self.eta_seconds(paths_done));
        let content = match self.kind {
            JobKind::LoadMetadata => String::new(),
            _ => format!(
                ", {bytes}{} ({} fetched), {}/s",
                if paths_done < self.paths { " so far" } else { "" },
                console::size(sum.bytes_fetched),
                console::size(self.rate(sum.bytes_done) as u64)
            ),
        };
        format!(
            "{}: {paths_done}/{}, {}{content}, {:.0} files/s{left}{errors}",
            self.name,
            counted(self.paths, "path"),
            counted(sum.files_done, "file"),
            self.rate(sum.files_done)
        )
    }

    fn say(&self, json: bool) -> Result<(), CliError> {
        console::say(json, &self.view(), || self.line())
    }

    /// What the exit code reports.
    fn outcome(&self) -> Result<(), CliError> {
        let (_, Job { errors, last_error, files_total, files_done, .. }) = self.sums();
        if errors > 0 {
            let errors = counted(errors, "error");
            return Err(CliError::Failed(format!(
                "{}: {errors}, the last: {last_error}; the same command tries these once more",
                self.name
            )));
        }
        if self.kind == JobKind::Check && files_done < files_total {
            let missing = counted(files_total - files_done, "file");
            return Err(CliError::Failed(format!(
                "{}: {missing} not cached, or not as a whole: without --check they are loaded",
                self.name
            )));
        }
        Ok(())
    }
}

fn add(sum: &mut Job, job: &Job) {
    let pairs = [
        (&mut sum.files_total, job.files_total),
        (&mut sum.files_done, job.files_done),
        (&mut sum.bytes_total, job.bytes_total),
        (&mut sum.bytes_done, job.bytes_done),
        (&mut sum.bytes_fetched, job.bytes_fetched),
        (&mut sum.errors, job.errors),
    ];
    for (sum, part) in pairs {
        *sum = sum.saturating_add(part);
    }
    if !job.last_error.is_empty() {
        sum.last_error.clone_from(&job.last_error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_refused_as_a_whole_with_the_line_that_is_none() {
        assert_eq!(listed("l", b"/a\n\n/b c\n/d").unwrap(), ["/a", "/b c", "/d"]);
        for (list, why) in [
            ("/a\nb\n", "line 2: \"b\" is no absolute path"),
            ("/a\n\n/\u{ff}\n", "line 3: the path is no UTF-8"),
            ("\n\n", "no paths"),
            ("", "no paths"),
        ] {
            // One byte each: what is no ASCII is no UTF-8.
            let list: Vec<u8> = list.chars().map(|byte| byte as u8).collect();
            let CliError::Usage(text) = listed("l", &list).unwrap_err() else { panic!("{list:?}") };
            assert!(text.contains(why), "{text}");
        }
        let long = format!("/{}", "x".repeat(PATH_MAX));
        assert!(listed("l", long.as_bytes()).unwrap_err().to_string().contains("longer than 4096"));
    }

    #[test]
    fn requests_have_a_bounded_number_of_paths_and_bytes() {
        let short = batches((0..2500).map(|number| format!("/{number}")).collect());
        assert_eq!(short.iter().map(Vec::len).collect::<Vec<_>>(), [1000, 1000, 500]);
        assert_eq!((short[0][0].as_str(), short[2][499].as_str()), ("/0", "/2499"));
        let long = batches(vec![format!("/{}", "x".repeat(PATH_MAX - 1)); 300]);
        assert_eq!(long.iter().map(Vec::len).collect::<Vec<_>>(), [128, 128, 44]);
    }

    fn job(files: u64, done: u64, errors: u64) -> Job {
        let (bytes_total, bytes_done) = (files * 1024, done * 1024);
        let last_error = if errors > 0 { "no such path".to_owned() } else { String::new() };
        Job { files_total: files, files_done: done, bytes_total, bytes_done, errors, last_error, ..Job::default() }
    }

    #[test]
    fn what_is_under_way_counts_once_and_errors_make_the_command_fail() {
        let mut progress = ListProgress::new(JobKind::Load, "list".into(), 30);
        progress.is_at(0, 10, &job(10, 4, 0));
        progress.is_at(1, 20, &job(7, 1, 1));
        progress.is_at(0, 10, &job(10, 6, 0));
        assert_eq!((progress.part(), progress.sums().1.bytes_total), (Some((8, 30)), 17 * 1024));
        progress.ended(0, 10, &job(10, 10, 0));
        assert_eq!(progress.part(), Some((12, 30)));
        progress.ended(1, 20, &job(19, 19, 1));
        let line = progress.line();
        assert!(line.starts_with("list: 30/30 paths, 29 files, 29.00 KiB of 29.00 KiB (0 B fetched), "), "{line}");
        assert!(line.ends_with(" files/s, 1 error, the last: no such path"), "{line}");
        assert!(progress.outcome().unwrap_err().to_string().contains("1 error, the last: no such path"));
        assert_eq!(progress.view()["kind"], "load");
    }

    #[test]
    fn a_check_fails_unless_all_is_cached() {
        let check = |done| {
            let mut progress = ListProgress::new(JobKind::Check, "/train".into(), 1);
            progress.ended(0, 1, &job(4, done, 0));
            progress
        };
        assert_eq!(check(3).line(), "/train: 75.0 % cached, 3.00 KiB of 4.00 KiB, 3 of 4 files as a whole");
        assert!(check(3).outcome().unwrap_err().to_string().contains("1 file not cached"));
        assert!(check(4).outcome().is_ok());
        assert_eq!(check(4).part(), None);
    }
}
