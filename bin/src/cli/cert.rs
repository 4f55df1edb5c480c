//! `cv cert`: a certificate authority for a cluster that has none, what it signs, and what certificates say.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::{Config, counted};
use cavern_security::{Authority, CertificateInfo, Identity, RevocationList, Role, SecurityError};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::console::{self, or_dash};
use crate::error::{CliError, Context as _};

pub const DAY_SECS: u64 = 86_400;

#[derive(Subcommand)]
pub enum CertCommand {
    /// Make the certificate authority of a cluster.
    Init(CommonArgs),
    /// Make a key and a certificate for one process, or for the command line of somebody.
    Issue(IssueArgs),
    /// Put certificates that somebody else may have on the list of those that nobody takes any more.
    Revoke(RevokeArgs),
    /// Say whose certificates these are, until when they hold, and what lists of revoked ones have.
    Show(ShowArgs),
}

#[derive(Args)]
pub struct IssueArgs {
    /// master, worker, client, viewer, operator or admin.
    role: Role,
    /// Name of the process, as that of its host: 1 to 64 letters, digits, "-", "_" or ".".
    name: String,
    /// Directory for the two files [default: that of the authority].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// For how many days the certificate holds.
    #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Args)]
pub struct RevokeArgs {
    /// Certificates that the authority has signed (PEM): the first one of each file.
    #[arg(value_name = "CERT")]
    certificates: Vec<PathBuf>,
    /// A copy of the list.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Args)]
pub struct ShowArgs {
    /// Files with certificates, or with lists of revoked ones (PEM).
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Directory of an authority: says which of the certificates it has revoked.
    #[arg(long, value_name = "DIR", conflicts_with = "revoked")]
    dir: Option<PathBuf>,
    /// A list of revoked certificates (PEM): says which of these are on it.
    #[arg(long, value_name = "FILE")]
    revoked: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct CommonArgs {
    /// Directory of the authority; `cv cert init` makes it.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Configuration file of the cluster, which has its name (cluster.name); else CV_CONF, else
    /// /etc/cavern/cluster.toml, else the defaults.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
}

impl CertCommand {
    pub fn run(self) -> Result<(), CliError> {
        match self {
            Self::Init(args) => args.init(),
            Self::Issue(args) => args.run(),
            Self::Revoke(args) => args.run(),
            Self::Show(args) => args.run(),
        }
    }
}

impl CommonArgs {
    fn cluster_name(&self) -> Result<String, CliError> {
        Ok(Config::load(self.conf.as_deref())?.cluster.name)
    }

    fn init(self) -> Result<(), CliError> {
        let cluster = self.cluster_name()?;
        let authority = Authority::create(&self.dir, &cluster)?;
        let certificate = absolute(authority.certificate())?;
        let not_after = timestamp(authority.info().not_after);
        if self.json {
            let path = certificate.to_string_lossy();
            return console::json(&json!({"cluster": cluster, "certificate": path, "not_after": not_after}));
        }
        console::line(format_args!("the cluster \"{cluster}\" has an authority, until {}", or_dash(not_after)))?;
        console::line(format_args!("certificate  {}  (every host needs it)", certificate.display()))?;
        console::line("its key is beside it, and stays there: whoever has it can be any process of the cluster")?;
        console::line(format_args!("next: cv cert issue ROLE NAME --dir {}", self.dir.display()))
    }
}

impl IssueArgs {
    fn run(self) -> Result<(), CliError> {
        let cluster = self.common.cluster_name()?;
        let authority = Authority::open_of(&self.common.dir, &cluster)?;
        let identity = Identity::new(&cluster, self.role, &self.name)?;
        let holds = Duration::from_secs(self.days * DAY_SECS);
        let out = self.out.as_deref().unwrap_or(&self.common.dir);
        let issued = authority.issue(&identity, holds, out, &identity.file_name())?;
        let ca = absolute(authority.certificate())?;
        let (certificate, key) = (absolute(&issued.certificate)?, absolute(&issued.key)?);
        let not_after = timestamp(CertificateInfo::read(&issued.certificate)?.not_after);
        if self.common.json {
            return console::json(&json!({
                "identity": identity.to_string(),
                "ca": ca.to_string_lossy(),
                "certificate": certificate.to_string_lossy(),
                "key": key.to_string_lossy(),
                "not_after": not_after,
            }));
        }
        console::line(format_args!("{identity} has a certificate until {}:", or_dash(not_after)))?;
        print_settings(&[("ca", ca.as_path()), ("certificate", certificate.as_path()), ("key", key.as_path())])
    }
}

impl RevokeArgs {
    fn run(self) -> Result<(), CliError> {
        let authority = Authority::open_of(&self.common.dir, &self.common.cluster_name()?)?;
        let revoked = authority.revoke(&self.certificates, self.out.as_deref()).map_err(of_files)?;
        let (list, all, added) = (absolute(&revoked.path)?, revoked.list.revoked.len(), revoked.added);
        if self.common.json {
            let (path, number) = (list.to_string_lossy(), revoked.list.number);
            return console::json(&json!({"list": path, "number": number, "revoked": all, "added": added}));
        }
        let all = counted(all as u64, "certificate");
        console::line(format_args!("the list has {all}, {added} of them new: put it on all hosts, by a rename"))?;
        print_settings(&[("revoked", list.as_path())])
    }
}

/// Files as the configuration names them.
fn print_settings(files: &[(&str, &Path)]) -> Result<(), CliError> {
    console::line("[security]")?;
    files.iter().try_for_each(|(key, path)| {
        console::line(format_args!("{key} = {}", toml::Value::from(path.to_string_lossy().into_owned())))
    })
}

/// What is wrong with files that need not be those of a configuration, whose keys are not named then.
fn of_files(error: SecurityError) -> CliError {
    match error {
        SecurityError::Unreadable { path, source, .. } => {
            let text = format!("cannot read {}: {source}", path.display());
            if source.kind() == io::ErrorKind::NotFound { CliError::NotFound(text) } else { CliError::Failed(text) }
        }
        SecurityError::Unusable { path, reason, .. } => CliError::Failed(format!("{}: {reason}", path.display())),
        error => error.into(),
    }
}

/// What a file has, as JSON and as rows of a table.
struct Shown {
    view: Value,
    rows: Vec<[String; 6]>,
}

impl ShowArgs {
    fn run(self) -> Result<(), CliError> {
        let (mut shown, mut refused) = (Vec::new(), Vec::new());
        let named = self.dir.as_deref().map(Authority::list_in).or(self.revoked);
        let lists = named.map(|file| RevocationList::read_all(&file)).transpose();
        let lists = lists.unwrap_or_else(|error| {
            refused.push(of_files(error));
            None
        });
        for file in self.files {
            match read(&file, lists.as_deref()) {
                Ok(read) => shown.extend(read),
                Err(error) => refused.push(of_files(error)),
            }
        }
        // What can be shown is, whatever is wrong with the rest.
        if self.json {
            console::json(&shown.iter().map(|shown| &shown.view).collect::<Vec<_>>())?;
        } else if !shown.is_empty() {
            let heading = ["FILE", "WHOSE", "FROM", "UNTIL", "LEFT", "REVOKED"];
            console::table(heading, shown.into_iter().flat_map(|shown| shown.rows))?;
        }
        if refused.is_empty() {
            return Ok(());
        }
        let text = refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        let all_missing = refused.iter().all(|error| matches!(error, CliError::NotFound(_)));
        Err(if all_missing { CliError::NotFound(text) } else { CliError::Failed(text) })
    }
}

/// The certificates of a file, or else its lists of revoked ones.
fn read(file: &Path, lists: Option<&[RevocationList]>) -> Result<Vec<Shown>, SecurityError> {
    let error = match CertificateInfo::read_all(file) {
        Ok(infos) => return Ok(infos.iter().map(|info| certificate(file, info, lists)).collect()),
        Err(error) => error,
    };
    let found = RevocationList::read_all(file).map_err(|_| error)?;
    Ok(found.iter().map(|found| list(file, found)).collect())
}

fn certificate(file: &Path, info: &CertificateInfo, lists: Option<&[RevocationList]>) -> Shown {
    let entry = lists.and_then(|lists| lists.iter().find_map(|list| list.find(info)));
    let revoked_since = entry.and_then(|entry| timestamp(entry.since));
    let (from, until) = (timestamp(info.not_before), timestamp(info.not_after));
    // Whole days; negative where it has ended.
    let days_left = info.remaining_secs().div_euclid(DAY_SECS as i64);
    let view = json!({
        "file": file.to_string_lossy(),
        // `null` where it names no process of a cluster.
        "identity": info.identity.as_ref().map(ToString::to_string),
        "authority": info.is_authority,
        "common_name": info.common_name,
        // Bytes in hexadecimal, with colons.
        "serial": info.serial,
        "not_before": from,
        "not_after": until,
        "days_left": days_left,
        // `null` where no list was named.
        "revoked": lists.map(|_| entry.is_some()),
        "revoked_since": revoked_since,
    });
    let whose = match &info.identity {
        Some(identity) if !info.is_authority => identity.to_string(),
        _ if info.is_authority => format!("authority: {}", info.common_name.as_deref().unwrap_or("without a name")),
        _ => "no process of a cluster".to_owned(),
    };
    let left = u64::try_from(days_left).map_or_else(|_| "expired".to_owned(), |days| counted(days, "day"));
    let revoked = match (lists, entry) {
        (Some(_), None) => "no".to_owned(),
        _ => or_dash(revoked_since),
    };
    let row = [file.display().to_string(), whose, or_dash(from), or_dash(until), left, revoked];
    Shown { view, rows: vec![row] }
}

/// A row of the list, and one of each certificate on it.
fn list(file: &Path, list: &RevocationList) -> Shown {
    let (from, until) = (timestamp(list.this_update), list.next_update.and_then(timestamp));
    let entries = || list.revoked.iter().map(|entry| (&entry.serial, timestamp(entry.since)));
    let view = json!({
        "file": file.to_string_lossy(),
        // Of its authority.
        "common_name": list.common_name,
        "number": list.number,
        "this_update": from,
        "next_update": until,
        "revokes": entries().map(|(serial, since)| json!({"serial": serial, "since": since})).collect::<Vec<_>>(),
    });
    let (name, dash) = (file.display().to_string(), || or_dash(None::<&str>));
    let number = console::prefixed(" ", list.number.as_deref().unwrap_or_default());
    let whose = format!("list{number} of authority: {}", list.common_name.as_deref().unwrap_or("without a name"));
    let count = counted(list.revoked.len() as u64, "certificate");
    let mut rows = vec![[name.clone(), whose, or_dash(from), or_dash(until), dash(), count]];
    rows.extend(
        entries()
            .map(|(serial, since)| [name.clone(), format!("serial {serial}"), dash(), dash(), dash(), or_dash(since)]),
    );
    Shown { view, rows }
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    path.canonicalize().context(format_args!("cannot find {}", path.display()))
}

/// In UTC; `None` for what is beyond the years that a calendar has.
pub fn timestamp(seconds: i64) -> Option<String> {
    Timestamp::from_second(seconds).ok().map(|time| time.to_string())
}
