//! `cv cert`: a certificate authority for a cluster that has none, what it signs, and what certificates say.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::{Config, counted};
use cavern_security::{Authority, CertificateInfo, Identity, RevocationList, Role, SecurityError};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::Serialize;

use crate::console::{self, or_dash};
use crate::error::{CliError, Context as _};

const DAY_SECS: u64 = 86_400;

#[derive(Subcommand)]
pub enum CertCommand {
    /// Make the certificate authority of a cluster.
    #[command(after_help = "Examples:
  cv cert init --dir /root/authority

The directory gets ca.pem, the certificate, which every host needs as security.ca, and ca-key.pem, the key. Whoever \
has the key can be any process of the cluster: keep the directory where no process of the cluster runs, if you can. \
The authority holds for twenty years.

Where there is an authority already, this is not needed: certificates that it signs are to have one URI among their \
alternative names, cavern://CLUSTER/ROLE/NAME.")]
    Init(InitArgs),
    /// Make a key and a certificate for one process, or for the command line of somebody.
    #[command(after_help = "Examples:
  cv cert issue master node1 --dir /root/authority --out /root/node1
  cv cert issue worker node1 --dir /root/authority --out /root/node1
  cv cert issue client node1 --dir /root/authority --days 90
  cv cert issue admin alice --dir /root/authority
  cv cert issue viewer bob --dir /root/authority

The roles: master and worker are `cv master` and `cv worker`; client is `cv fuse` and whatever else reads and writes. \
The others are command lines of people: viewer looks (reports, lists, status, metrics), operator also changes mounts, \
jobs and workers, and admin may do everything, also with masters, their keys, and files. The files are called \
ROLE-NAME.pem and ROLE-NAME-key.pem. Processes read files that are replaced for their next connection, without a \
restart.")]
    Issue(IssueArgs),
    /// Put certificates that somebody else may have on the list of those that nobody takes any more.
    #[command(after_help = "Examples:
  cv cert revoke --dir /root/authority
  cv cert revoke node1/client-node1.pem --dir /root/authority --out crl.pem

The list is crl.pem in the directory of the authority, and keeps what was revoked before; without a certificate it is \
made where there is none, so that all hosts have one from the start. Each host gets it as the file that \
security.revoked names, by a rename: a second later nobody with one of these certificates is let in, and connections \
that are open with one are closed. Whoever is to go on needs another certificate before: `cv cert issue`.")]
    Revoke(RevokeArgs),
    /// Say whose certificates these are, until when they hold, and what lists of revoked ones have.
    #[command(after_help = "Examples:
  cv cert show /etc/cavern/certificates/*.pem
  cv cert show client-node1.pem --revoked /etc/cavern/certificates/crl.pem
  cv cert show /root/authority/crl.pem
  cv cert show worker-node1.pem --json | jq '.[0].days_left'")]
    Show(ShowArgs),
}

#[derive(Args)]
pub struct InitArgs {
    /// Directory of the authority; made where it is missing.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    #[command(flatten)]
    common: CommonArgs,
}

#[derive(Args)]
pub struct IssueArgs {
    /// master, worker, client, viewer, operator or admin.
    role: Role,
    /// Name of the process, as that of its host: 1 to 64 letters, digits, "-", "_" or ".".
    name: String,
    /// Directory of the authority.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
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
    /// Directory of the authority.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
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
struct CommonArgs {
    /// Configuration file of the cluster, which has its name (cluster.name); else CV_CONF, else
    /// /etc/cavern/cluster.toml, else the defaults.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
}

/// `cv cert init --json`.
#[derive(Serialize)]
struct AuthorityView {
    cluster: String,
    certificate: PathBuf,
    not_after: Option<String>,
}

/// `cv cert issue --json`.
#[derive(Serialize)]
struct IssuedView {
    identity: String,
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    not_after: Option<String>,
}

/// `cv cert revoke --json`.
#[derive(Serialize)]
struct RevocationsView {
    list: PathBuf,
    number: Option<String>,
    /// Certificates that are on the list, and those that were not before.
    revoked: usize,
    added: usize,
}

/// One entry of `cv cert show --json`.
#[derive(Serialize)]
#[serde(untagged)]
enum View {
    Certificate(CertificateView),
    List(ListView),
}

/// A certificate.
#[derive(Serialize)]
struct CertificateView {
    file: PathBuf,
    /// `null` where it names no process of a cluster.
    identity: Option<String>,
    authority: bool,
    common_name: Option<String>,
    /// Bytes in hexadecimal, with colons.
    serial: String,
    not_before: Option<String>,
    not_after: Option<String>,
    /// Whole days; negative where it has ended.
    days_left: i64,
    /// Whether it is revoked, where a list was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked: Option<bool>,
    /// Since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked_since: Option<String>,
}

/// A list of revoked certificates.
#[derive(Serialize)]
struct ListView {
    file: PathBuf,
    /// Of its authority.
    common_name: Option<String>,
    number: Option<String>,
    this_update: Option<String>,
    next_update: Option<String>,
    revokes: Vec<EntryView>,
}

#[derive(Serialize)]
struct EntryView {
    serial: String,
    since: Option<String>,
}

impl CertCommand {
    pub fn run(self) -> Result<(), CliError> {
        match self {
            Self::Init(args) => args.run(),
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
}

impl InitArgs {
    fn run(self) -> Result<(), CliError> {
        let cluster = self.common.cluster_name()?;
        let authority = Authority::create(&self.dir, &cluster)?;
        let certificate = absolute(authority.certificate())?;
        let not_after = timestamp(authority.info().not_after);
        if self.common.json {
            return console::json(&AuthorityView { cluster, certificate, not_after });
        }
        console::line(format_args!(
            "the cluster \"{cluster}\" has an authority, until {}",
            or_dash(not_after.as_ref())
        ))?;
        console::line(format_args!("certificate  {}  (every host needs it)", certificate.display()))?;
        console::line("its key is beside it, and stays there: whoever has it can be any process of the cluster")?;
        console::line(format_args!("next: cv cert issue ROLE NAME --dir {}", self.dir.display()))
    }
}

impl IssueArgs {
    fn run(self) -> Result<(), CliError> {
        let cluster = self.common.cluster_name()?;
        let authority = Authority::open_of(&self.dir, &cluster)?;
        let identity = Identity::new(&cluster, self.role, &self.name)?;
        let holds = Duration::from_secs(self.days * DAY_SECS);
        let out = self.out.as_deref().unwrap_or(&self.dir);
        let issued = authority.issue(&identity, holds, out, &identity.file_name())?;
        let view = IssuedView {
            identity: identity.to_string(),
            ca: absolute(authority.certificate())?,
            certificate: absolute(&issued.certificate)?,
            key: absolute(&issued.key)?,
            not_after: timestamp(CertificateInfo::read(&issued.certificate)?.not_after),
        };
        if self.common.json {
            return console::json(&view);
        }
        console::line(format_args!("{identity} has a certificate until {}:", or_dash(view.not_after.as_ref())))?;
        console::line("[security]")?;
        for (key, path) in [("ca", view.ca), ("certificate", view.certificate), ("key", view.key)] {
            console::line(format_args!("{key} = {}", toml::Value::from(path.to_string_lossy().into_owned())))?;
        }
        Ok(())
    }
}

impl RevokeArgs {
    fn run(self) -> Result<(), CliError> {
        let authority = Authority::open_of(&self.dir, &self.common.cluster_name()?)?;
        let revoked = authority.revoke(&self.certificates, self.out.as_deref()).map_err(unrevoked)?;
        let view = RevocationsView {
            list: absolute(&revoked.path)?,
            number: revoked.list.number,
            revoked: revoked.list.revoked.len(),
            added: revoked.added,
        };
        if self.common.json {
            return console::json(&view);
        }
        let (all, added) = (counted(view.revoked as u64, "certificate"), view.added);
        console::line(format_args!("the list has {all}, {added} of them new: put it on all hosts, by a rename"))?;
        let path = toml::Value::from(view.list.to_string_lossy().into_owned());
        console::line("[security]")?;
        console::line(format_args!("revoked = {path}"))
    }
}

/// The files need not be those of a configuration, as those of a list.
fn unrevoked(error: SecurityError) -> CliError {
    let is_of_file = matches!(error, SecurityError::Unreadable { .. } | SecurityError::Unusable { .. });
    match (is_missing(&error), is_of_file) {
        (true, _) => CliError::NotFound(unshown(error)),
        (false, true) => CliError::Failed(unshown(error)),
        (false, false) => error.into(),
    }
}

impl ShowArgs {
    fn run(self) -> Result<(), CliError> {
        let (mut views, mut refused) = (Vec::new(), Vec::new());
        let named = self.dir.as_deref().map(Authority::list_in).or(self.revoked);
        let lists = named.map(|file| RevocationList::read_all(&file)).transpose();
        let lists = lists.unwrap_or_else(|error| {
            refused.push(error);
            None
        });
        for file in self.files {
            match read(&file, lists.as_deref()) {
                Ok(read) => views.extend(read),
                Err(error) => refused.push(error),
            }
        }
        // What can be shown is, whatever is wrong with the rest.
        if self.json {
            console::json(&views)?;
        } else if !views.is_empty() {
            let heading = ["FILE", "WHOSE", "FROM", "UNTIL", "LEFT", "REVOKED"];
            console::table(heading, views.iter().flat_map(View::rows))?;
        }
        if refused.is_empty() {
            return Ok(());
        }
        let all_missing = refused.iter().all(is_missing);
        let text = refused.into_iter().map(unshown).collect::<Vec<_>>().join("\n");
        Err(if all_missing { CliError::NotFound(text) } else { CliError::Failed(text) })
    }
}

/// The certificates of a file, or else its lists of revoked ones.
fn read(file: &Path, lists: Option<&[RevocationList]>) -> Result<Vec<View>, SecurityError> {
    let error = match CertificateInfo::read_all(file) {
        Ok(infos) => {
            let views = infos.into_iter().map(|info| CertificateView::new(file, info, lists));
            return Ok(views.map(View::Certificate).collect());
        }
        Err(error) => error,
    };
    match RevocationList::read_all(file) {
        Ok(found) => Ok(found.into_iter().map(|list| View::List(ListView::new(file, list))).collect()),
        Err(_) => Err(error),
    }
}

fn is_missing(error: &SecurityError) -> bool {
    match error {
        SecurityError::Unreadable { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Why a file cannot be shown. It may be none of a configuration, whose keys are not named then.
fn unshown(error: SecurityError) -> String {
    match error {
        SecurityError::Unreadable { path, source, .. } => format!("cannot read {}: {source}", path.display()),
        SecurityError::Unusable { path, reason, .. } => format!("{}: {reason}", path.display()),
        error => error.to_string(),
    }
}

impl View {
    fn rows(&self) -> Vec<[String; 6]> {
        match self {
            Self::Certificate(view) => vec![view.row()],
            Self::List(view) => view.rows(),
        }
    }
}

impl CertificateView {
    fn new(file: &Path, info: CertificateInfo, lists: Option<&[RevocationList]>) -> Self {
        let entry = lists.and_then(|lists| lists.iter().find_map(|list| list.find(&info)));
        Self {
            file: file.to_owned(),
            identity: info.identity.as_ref().map(ToString::to_string),
            authority: info.is_authority,
            not_before: timestamp(info.not_before),
            not_after: timestamp(info.not_after),
            days_left: info.remaining_secs().div_euclid(DAY_SECS as i64),
            revoked: lists.map(|_| entry.is_some()),
            revoked_since: entry.and_then(|entry| timestamp(entry.since)),
            common_name: info.common_name,
            serial: info.serial,
        }
    }

    fn row(&self) -> [String; 6] {
        let whose = match (&self.identity, self.authority) {
            (Some(identity), false) => identity.clone(),
            (_, true) => format!("authority: {}", self.common_name.as_deref().unwrap_or("without a name")),
            (None, false) => "no process of a cluster".to_owned(),
        };
        let left = match u64::try_from(self.days_left) {
            Ok(days) => counted(days, "day"),
            Err(_) => "expired".to_owned(),
        };
        let revoked = match self.revoked {
            Some(true) => or_dash(self.revoked_since.as_ref()),
            Some(false) => "no".to_owned(),
            None => or_dash(None::<&str>),
        };
        let (from, until) = (or_dash(self.not_before.as_ref()), or_dash(self.not_after.as_ref()));
        [self.file.display().to_string(), whose, from, until, left, revoked]
    }
}

impl ListView {
    fn new(file: &Path, list: RevocationList) -> Self {
        let entries = list.revoked.into_iter();
        Self {
            file: file.to_owned(),
            common_name: list.common_name,
            number: list.number,
            this_update: timestamp(list.this_update),
            next_update: list.next_update.and_then(timestamp),
            revokes: entries.map(|entry| EntryView { serial: entry.serial, since: timestamp(entry.since) }).collect(),
        }
    }

    /// One of the list, and one of each certificate on it.
    fn rows(&self) -> Vec<[String; 6]> {
        let file = self.file.display().to_string();
        let name = self.common_name.as_deref().unwrap_or("without a name");
        let number = self.number.as_ref().map_or_else(String::new, |number| format!(" {number}"));
        let whose = format!("list{number} of authority: {name}");
        let (from, until) = (or_dash(self.this_update.as_ref()), or_dash(self.next_update.as_ref()));
        let count = counted(self.revokes.len() as u64, "certificate");
        let entry = |entry: &EntryView| {
            let serial = format!("serial {}", entry.serial);
            let [from, until, left] = [(); 3].map(|()| or_dash(None::<&str>));
            [file.clone(), serial, from, until, left, or_dash(entry.since.as_ref())]
        };
        let entries: Vec<_> = self.revokes.iter().map(entry).collect();
        [vec![[file.clone(), whose, from, until, or_dash(None::<&str>), count]], entries].concat()
    }
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    path.canonicalize().context(format_args!("cannot find {}", path.display()))
}

/// In UTC; `None` for what is beyond the years that a calendar has.
pub fn timestamp(seconds: i64) -> Option<String> {
    Timestamp::from_second(seconds).ok().map(|time| time.to_string())
}
