//! The files of `[security]` of this host, and the certificates that the other processes show.

use cavern_conf::{Config, Role};
use cavern_security::{CertificateInfo, Role as Shown, SecurityError, Tls, Transport, check_files};

use super::finding::{Check, Finding, Level};
use crate::cli::cert::{DAY_SECS, timestamp};
use crate::cli::report::certificates::{CertificateView, WARNING_DAYS, survey};
use crate::console::or_dash;
use crate::group::Dial;

/// A certificate of this host: the key of its file, what it says, and why others refuse it, where that is known.
struct Own {
    key: &'static str,
    info: CertificateInfo,
    refusal: Option<String>,
}

/// What is wrong with the files. `asked` are the roles that were named. *Blocking*.
pub fn look(config: &Config, asked: &[Role]) -> Vec<Finding> {
    if !config.security.is_on() {
        return vec![without(config.security.insecure)];
    }
    let problems = check_files(config);
    if !problems.is_empty() {
        let why = "no process starts with it, and no command reaches the cluster";
        let todo = "see `cv cert show FILE`; `cv cert issue` makes others";
        let finding = |error: &SecurityError| Finding::error(Check::Security, error.to_string(), why, todo);
        return problems.iter().map(finding).collect();
    }
    let mut found = vec![Finding::ok(Check::Security, "the files of [security] can be used")];
    if let Ok(Transport::Tls(tls)) = Transport::of(config) {
        let own = Own { key: "security.certificate", info: tls.certificate(), refusal: tls.certificate_refusal() };
        found.extend(own.judge());
        found.extend(judge_role(tls.identity().role, asked));
    }
    let authorities = CertificateInfo::read_all(&config.security.ca).unwrap_or_default();
    for info in authorities {
        found.extend(Own { key: "security.ca", info, refusal: None }.judge_end());
    }
    found
}

/// Of a host without certificates.
fn without(is_insecure: bool) -> Finding {
    if !is_insecure {
        return Finding::ok(Check::Security, "no [security]: processes listen for this host alone");
    }
    Finding::warning(
        Check::Security,
        "security.insecure is set, and there are no certificates",
        "whoever reaches a port may do everything: read, change and delete all files, and have the buckets' keys",
        "name the three files of [security], which `cv cert` makes, unless the network is trusted as a whole",
    )
}

impl Own {
    fn judge(&self) -> Vec<Finding> {
        let whose = self.info.identity.as_ref().map_or_else(|| self.key.to_owned(), ToString::to_string);
        let chain = match &self.refusal {
            None => Finding::ok(Check::CertificateChain, format!("others take the certificate of {whose}")),
            Some(reason) => Finding::error(
                Check::CertificateChain,
                format!("others refuse the certificate of {whose}: {reason}"),
                "each connection ends in its handshake, whatever else is right",
                "make one with `cv cert issue` that an authority of security.ca signs, or put its authority into \
                 security.ca; see that the clock of this host is right",
            ),
        };
        [chain].into_iter().chain(self.judge_end()).collect()
    }

    fn judge_end(&self) -> Option<Finding> {
        let Self { key, info, .. } = self;
        let (left, end) = (info.remaining_secs(), or_dash(timestamp(info.not_after)));
        let (level, what) = match left {
            ..=0 => (Level::Error, format!("{key} has ended: {end}")),
            _ if left < WARNING_DAYS * DAY_SECS as i64 => (Level::Warning, format!("{key} ends soon: {end}")),
            _ => return None,
        };
        let todo = "replace it by a rename, on each host: `cv cert issue`; another authority: docs/security.md";
        Some(Finding::new(level, Check::CertificateExpiry, what, "from then on nobody takes it", todo))
    }
}

/// Whether the certificate is of the role that the host runs, where it runs one. A host that runs several has a file
/// for each, which its units name.
fn judge_role(own: Shown, asked: &[Role]) -> Option<Finding> {
    let [asked] = asked else { return None };
    let taken: &[Shown] = match asked {
        Role::Master => &[Shown::Master],
        Role::Worker => &[Shown::Worker],
        Role::Fuse => &[Shown::Client, Shown::Admin],
    };
    let (role, wanted, check) = (asked.name(), taken[0], Check::CertificateRole);
    if taken.contains(&own) {
        return Some(Finding::ok(check, format!("a certificate of the role {own} is right for `cv {role}`")));
    }
    Some(Finding::error(
        check,
        format!("security.certificate is of the role {own}, and `cv {role}` takes one of the role {wanted}"),
        "the process does not start, or is refused by the masters",
        format!("`cv cert issue {wanted} NAME`, and name it in /etc/cavern/{role}.env or the configuration"),
    ))
}

/// What masters and workers at these addresses show.
pub async fn of_members(tls: &Tls, members: Vec<(Shown, String)>, dial: &Dial) -> Vec<Finding> {
    let views = survey(tls, members, dial.wait).await;
    // The last one is that of this command.
    views.iter().filter(|view| view.address.is_some()).filter_map(judge_view).collect()
}

fn judge_view(view: &CertificateView) -> Option<Finding> {
    let who = format!("the {} at {}", view.role, view.address.as_deref().unwrap_or_default());
    if let Some(cause) = &view.error {
        return Some(Finding::error(
            Check::CertificateMembers,
            format!("{who} shows no certificate that this host takes: {cause}"),
            "this host has no secure connection to it",
            "see `cv cert show` there; is it of the same authority, and of that role?",
        ));
    }
    view.ends_soon.then(|| {
        Finding::warning(
            Check::CertificateExpiry,
            format!("the certificate of {who} ends within {WARNING_DAYS} days: {}", or_dash(view.not_after.as_ref())),
            "from then on nobody takes it",
            "replace it there by a rename: `cv cert issue`",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::wrong;
    use super::*;
    use crate::cli::report::certificates::of_worker;

    fn own(days: i64, refusal: Option<&str>) -> Own {
        let info = of_worker(days);
        Own { key: "security.certificate", info, refusal: refusal.map(str::to_owned) }
    }

    #[test]
    fn certificates_that_nobody_takes_or_that_end_are_named() {
        let told = |days, refusal| wrong(&own(days, refusal).judge());
        assert_eq!(told(365, None), []);
        assert_eq!(told(20, None), [(Level::Warning, Check::CertificateExpiry)]);
        let ended = [(Level::Error, Check::CertificateChain), (Level::Error, Check::CertificateExpiry)];
        assert_eq!(told(-1, Some("expired")), ended);
        assert_eq!(told(365, Some("UnknownIssuer")), [(Level::Error, Check::CertificateChain)]);
        assert_eq!(wrong(&[without(true)]), [(Level::Warning, Check::Security)]);
        assert_eq!(wrong(&[without(false)]), []);
    }

    #[test]
    fn a_certificate_of_another_role_is_named() {
        let told = |own, asked: &[Role]| wrong(&judge_role(own, asked).into_iter().collect::<Vec<_>>());
        assert_eq!(told(Shown::Worker, &[Role::Worker]), []);
        assert_eq!(told(Shown::Admin, &[Role::Fuse]), []);
        assert_eq!(told(Shown::Client, &Role::ALL), []);
        for (own, asked) in [(Shown::Client, Role::Master), (Shown::Master, Role::Worker), (Shown::Viewer, Role::Fuse)]
        {
            assert_eq!(told(own, &[asked]), [(Level::Error, Check::CertificateRole)], "{own}");
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let place = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let path = |name: &str| place.path().join(name);
        (config.security.ca, config.security.certificate) = (path("ca.pem"), path("c.pem"));
        config.security.key = path("key.pem");
        let found = look(&config, &[]);
        assert_eq!(wrong(&found), [(Level::Error, Check::Security); 3]);
        assert!(found[0].what.contains("ca.pem"), "{found:?}");
    }

    #[test]
    fn members_that_show_no_good_certificate_are_named() {
        let view = |ends_soon, error: Option<&str>| {
            let mut view = CertificateView::new(Shown::Worker, Some("node1:7710".to_owned()), Err(String::new()));
            (view.ends_soon, view.error) = (ends_soon, error.map(str::to_owned));
            wrong(&judge_view(&view).into_iter().collect::<Vec<_>>())
        };
        assert_eq!(view(false, None), []);
        assert_eq!(view(true, None), [(Level::Warning, Check::CertificateExpiry)]);
        assert_eq!(view(false, Some("expired")), [(Level::Error, Check::CertificateMembers)]);
    }
}
