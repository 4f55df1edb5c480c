//! `cv fsck`.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};

use cavern_conf::{Interval, counted};
use cavern_net::master::Stubs;
use cavern_proto::master::{Finding, FsckProgress, FsckRequest};
use clap::Args;
use serde_json::Value;

use super::connect::{LINE_PERIOD, ResultArgs, word};
use super::host_path::in_namespace;
use crate::console::{self, Progress};
use crate::error::CliError;

/// Exit codes: something was found; nothing was, and not everything could be looked at.
const FOUND: u8 = 1;
const INCOMPLETE: u8 = 2;

#[derive(Args)]
pub struct FsckArgs {
    /// Namespace path: what lies at and below it is told of.
    #[arg(default_value = "/")]
    path: String,
    /// Read blocks, too: compare replicas with each other and with their objects, and cached blocks with checksums.
    #[arg(long)]
    deep: bool,
    /// Mend what can be mended without deleting what is nowhere else.
    #[arg(long)]
    repair: bool,
    /// Tell of blocks that no file has when nobody has written to them for so long, as 2h; else when a worker has not
    /// freed them after three times worker.orphan_block_grace.
    #[arg(long, value_name = "DURATION")]
    orphan_block_grace: Option<Interval>,
    #[command(flatten)]
    result: ResultArgs,
}

/// What has been told so far; after a change of masters it is begun anew, and told once. Of findings, which may be
/// millions, the hashes are kept.
#[derive(Default)]
struct Told {
    hasher: RandomState,
    findings: HashSet<u64>,
    missed: HashSet<String>,
    repaired: u64,
}

/// The word for a kind of finding, and the finding in JSON.
fn kind(finding: &Finding) -> String {
    word(finding.kind().as_str_name(), "FINDING_KIND_")
}

fn view(finding: &Finding) -> Value {
    console::fields! { finding;
        path, inode, key, worker, detail, cause, repaired;
        "kind": kind(finding),
        "mount": finding.mount_id,
        "name": String::from_utf8_lossy(&finding.name),
        "block": finding.index,
    }
}

fn line(finding: &Finding) -> String {
    let Finding { path, detail, cause, repaired, .. } = finding;
    let (cause, repaired) = (console::prefixed(": ", cause), console::prefixed("; repaired: ", repaired));
    format!("{:18}  {path}: {detail}{cause}{repaired}", kind(finding))
}

impl Told {
    fn tell(&mut self, message: FsckProgress, as_json: bool) -> Result<(), CliError> {
        for finding in message.findings {
            if self.findings.insert(self.hasher.hash_one(&finding)) {
                self.repaired += u64::from(!finding.repaired.is_empty());
                console::say(as_json, &view(&finding), || line(&finding))?;
            }
        }
        for missed in message.missed {
            if self.missed.insert(missed.clone()) {
                console::remark(format_args!("cv fsck: {missed}"));
            }
        }
        Ok(())
    }

    /// What the exit code reports.
    fn outcome(&self, path: &str, looked_at: u64) -> Result<(), CliError> {
        let (found, missed) = (self.findings.len() as u64, self.missed.len() as u64);
        let looked_at = counted(looked_at, "record");
        let (text, code) = match (found, missed) {
            (0, 0) => {
                console::remark(format_args!("{path}: {looked_at} looked at, nothing found"));
                return Ok(());
            }
            (0, _) => {
                let reasons = counted(missed, "reason");
                let what = format!("nothing is wrong of the {looked_at} looked at");
                (format!("{path}: {what}, but not everything was: {reasons} above"), INCOMPLETE)
            }
            (_, _) => {
                let (found, repaired) = (counted(found, "finding"), self.repaired);
                let todo = "what to do about each is in docs/operations.md";
                (format!("{path}: {found} in {looked_at}, {repaired} repaired; {todo}"), FOUND)
            }
        };
        Err(CliError::Found { text, code })
    }
}

impl FsckArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let mut told = Told::default();
        match self.look(&mut told).await {
            Ok((path, looked_at)) => told.outcome(&path, looked_at),
            Err(CliError::Failed(cause)) if told.findings.is_empty() => {
                let text = format!("{}: cannot look at everything: {cause}", self.path);
                Err(CliError::Found { text, code: INCOMPLETE })
            }
            Err(error) if told.findings.is_empty() || matches!(error, CliError::OutputClosed) => Err(error),
            Err(error) => {
                let found = counted(told.findings.len() as u64, "finding");
                let text = format!("{found}, and then not everything could be looked at: {error}");
                Err(CliError::Found { text, code: FOUND })
            }
        }
    }

    async fn look(&self, told: &mut Told) -> Result<(String, u64), CliError> {
        let shown = self.result.cluster.config()?.fuse.path;
        let path = in_namespace(&self.path, &shown);
        let orphan_grace_ms = self.orphan_block_grace.map_or(0, Interval::as_millis);
        let request = FsckRequest { path: path.clone(), deep: self.deep, repair: self.repair, orphan_grace_ms };
        let masters = self.result.cluster.masters().await?;
        let (mut progress, mut unsaid) = (None, None);
        let last = masters
            .ask(async |mut master: Stubs| {
                let mut messages = master.cluster.fsck(request.clone()).await?.into_inner();
                let mut last = FsckProgress::default();
                while let Some(message) = messages.message().await? {
                    (last.looked_at, last.done) = (message.looked_at, message.done);
                    // That nobody reads what is told is no error of the master.
                    if let Err(error) = self.show(told, &mut progress, message) {
                        unsaid = Some(error);
                        break;
                    }
                }
                Ok(last)
            })
            .await?;
        match (unsaid, last.done) {
            (Some(error), _) => Err(error),
            (None, true) => Ok((path, last.looked_at)),
            (None, false) => Err(CliError::Failed("the master gave up: see its log".to_owned())),
        }
    }

    /// Tells what is new, and shows how far it is where nothing is told.
    fn show(&self, told: &mut Told, progress: &mut Option<Progress>, message: FsckProgress) -> Result<(), CliError> {
        if !message.findings.is_empty() || !message.missed.is_empty() {
            *progress = None;
            return told.tell(message, self.result.json);
        }
        let progress = progress.get_or_insert_with(|| Progress::new(self.result.json));
        let text = text(&message);
        progress.show_or_say(None, text.clone(), LINE_PERIOD, || {
            console::remark(&text);
            Ok(())
        })
    }
}

/// How far it is.
fn text(message: &FsckProgress) -> String {
    let suspects = match message.suspects {
        0 => String::new(),
        suspects => format!(", {suspects} to be looked at once more"),
    };
    format!("{}: {} looked at{suspects}", message.step, counted(message.looked_at, "record"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_told_once_and_the_exit_code_says_what_was_found_and_what_was_not_looked_at() {
        let mut told = Told::default();
        assert!(told.outcome("/", 7).is_ok());
        let finding = Finding { kind: 7, path: "/fs/a".into(), repaired: "done".into(), ..Finding::default() };
        assert_eq!((kind(&finding), view(&finding)["path"].as_str()), ("missing_block".to_owned(), Some("/fs/a")));
        assert!(
            line(&finding).starts_with("missing_block       /fs/a: ") && line(&finding).ends_with("repaired: done")
        );
        let missed = FsckProgress { missed: vec!["worker 1 is not there".into()], ..FsckProgress::default() };
        told.tell(missed.clone(), true).unwrap();
        let Err(CliError::Found { text, code: INCOMPLETE }) = told.outcome("/", 7) else {
            panic!("it was not looked at")
        };
        assert!(text.ends_with("1 reason above"), "{text}");
        let found = FsckProgress { findings: vec![finding], ..missed };
        told.tell(found.clone(), true).unwrap();
        told.tell(found, true).unwrap();
        let Err(CliError::Found { text, code: FOUND }) = told.outcome("/", 7) else { panic!("it was found") };
        assert!(text.contains("1 finding in 7 records, 1 repaired"), "{text}");
    }

    #[test]
    fn progress_says_what_is_looked_at_and_what_waits() {
        let message = FsckProgress { step: "blocks".into(), looked_at: 5, suspects: 2, ..FsckProgress::default() };
        assert_eq!(text(&message), "blocks: 5 records looked at, 2 to be looked at once more");
    }
}
