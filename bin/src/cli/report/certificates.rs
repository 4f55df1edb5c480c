//! The certificates of a cluster, as its processes show them: each master and worker is connected to, and asked for
//! nothing. What one has that runs with another file than that on its disk is seen so, too.

use std::time::Duration;

use cavern_conf::counted;
use cavern_security::{CertificateInfo, Role, Tls};
use futures::{StreamExt as _, stream};
use serde::Serialize;
use tokio::net::TcpStream;

use crate::cli::cert::{DAY_SECS, timestamp};
use crate::console::{self, or_dash};
use crate::error::CliError;

/// Connections at a time.
const CONNECTIONS: usize = 64;
/// Whoever has a certificate that ends earlier is to replace it.
pub const WARNING_DAYS: i64 = 30;

/// Of one process.
#[derive(Serialize)]
pub struct CertificateView {
    pub role: &'static str,
    /// `null` for that of this command.
    pub address: Option<String>,
    /// `cavern://CLUSTER/ROLE/NAME`; this and what follows is `null` where the process shows no good one.
    identity: Option<String>,
    name: Option<String>,
    pub not_after: Option<String>,
    /// Whole days.
    days_left: Option<i64>,
    /// It ends within thirty days.
    pub ends_soon: bool,
    /// Why it is not known, or not good; `null` for a good one.
    pub error: Option<String>,
}

/// That of this command, and of each process: its role and its address.
pub async fn survey(tls: &Tls, processes: Vec<(Role, String)>, wait: Duration) -> Vec<CertificateView> {
    let own = tls.certificate();
    let role = own.identity.as_ref().map_or(Role::Admin, |identity| identity.role);
    let own = CertificateView::new(role, None, Ok(own));
    let asked = stream::iter(processes).map(async |(role, address)| {
        let shown = shown(tls, role, &address, wait).await;
        CertificateView::new(role, Some(address), shown)
    });
    let others: Vec<_> = asked.buffered(CONNECTIONS).collect().await;
    others.into_iter().chain([own]).collect()
}

async fn shown(tls: &Tls, role: Role, address: &str, wait: Duration) -> Result<CertificateInfo, String> {
    let connect = async {
        let stream = TcpStream::connect(address).await?;
        tls.connect(stream, role).await?.certificate()?.info()
    };
    match tokio::time::timeout(wait, connect).await {
        Ok(shown) => shown.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} ms", wait.as_millis())),
    }
}

impl CertificateView {
    pub fn new(role: Role, address: Option<String>, shown: Result<CertificateInfo, String>) -> Self {
        let (info, error) = match shown {
            Ok(info) => (Some(info), None),
            Err(error) => (None, Some(error)),
        };
        let identity = info.as_ref().and_then(|info| info.identity.as_ref());
        let days_left = info.as_ref().map(|info| info.remaining_secs().div_euclid(DAY_SECS as i64));
        Self {
            role: role.name(),
            address,
            identity: identity.map(ToString::to_string),
            name: identity.map(|identity| identity.name.clone()),
            not_after: info.as_ref().and_then(|info| timestamp(info.not_after)),
            days_left,
            ends_soon: days_left.is_some_and(|days| days < WARNING_DAYS),
            error,
        }
    }

    fn row(&self) -> [String; 5] {
        let left = match (self.days_left.map(u64::try_from), &self.error) {
            (_, Some(error)) => error.clone(),
            (Some(Ok(days)), _) if self.ends_soon => format!("{}: replace it", counted(days, "day")),
            (Some(Ok(days)), _) => counted(days, "day"),
            (Some(Err(_)), _) => "expired: replace it".to_owned(),
            (None, None) => or_dash(None::<&str>),
        };
        let address = self.address.as_deref().unwrap_or("this command").to_owned();
        [self.role.to_owned(), or_dash(self.name.as_ref()), address, or_dash(self.not_after.as_ref()), left]
    }
}

/// A line for whoever reads no tables, where there is something to be done.
pub fn print_warning(certificates: &[CertificateView]) -> Result<(), CliError> {
    let ending = certificates.iter().filter(|certificate| certificate.ends_soon).count() as u64;
    let end = if ending == 1 { "ends" } else { "end" };
    let text =
        format!("{} {end} within {WARNING_DAYS} days: `cv cert issue` makes others", counted(ending, "certificate"));
    if ending > 0 { console::line(format_args!("WARNING   {text}")) } else { Ok(()) }
}

pub fn print(certificates: &[CertificateView]) -> Result<(), CliError> {
    let heading = ["CERTIFICATE", "NAME", "ADDRESS", "UNTIL", "LEFT"];
    console::table(heading, certificates.iter().map(CertificateView::row))
}

/// What the certificate of a worker says that ends in so many days and an hour, so that a test may take a while.
#[cfg(test)]
pub fn of_worker(days: i64) -> CertificateInfo {
    let now = cavern_conf::host::wall_ns().div_euclid(1_000_000_000);
    CertificateInfo {
        has_purpose: true,
        identity: Some(cavern_security::Identity::new("lab", Role::Worker, "node1").unwrap()),
        common_name: None,
        issuer: Vec::new(),
        serial: String::new(),
        is_authority: false,
        not_before: 0,
        not_after: now + days * DAY_SECS as i64 + 3600,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(days: i64) -> CertificateView {
        let info = of_worker(days);
        CertificateView::new(Role::Worker, Some("node1:7710".to_owned()), Ok(info))
    }

    #[test]
    fn what_ends_within_thirty_days_is_to_be_replaced() {
        assert_eq!(view(30).row()[..3], ["worker", "node1", "node1:7710"]);
        let left = [(365, "365 days"), (30, "30 days"), (29, "29 days: replace it"), (1, "1 day: replace it")];
        for (days, expected) in left {
            assert_eq!((view(days).row()[4].as_str(), view(days).ends_soon), (expected, days < 30));
        }
        assert_eq!(view(-2).row()[4], "expired: replace it");
        let silent = CertificateView::new(Role::Master, Some("m:1".to_owned()), Err("no route".to_owned()));
        assert_eq!(silent.row(), ["master", "–", "m:1", "–", "no route"]);
        assert!(!silent.ends_soon);
    }
}
