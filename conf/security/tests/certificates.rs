//! An authority signs certificates, and nothing that is there is lost, shown or left open.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use cavern_conf::Config;
use cavern_conf::process::Metrics;
use cavern_security::{Authority, CertificateInfo, Identity, Role, SecurityError, Transport};

const DAY: Duration = Duration::from_secs(86_400);

fn worker() -> Identity {
    Identity::new("lab", Role::Worker, "node1").unwrap()
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

/// The configuration of a process with these files.
fn config(authority: &Path, certificate: &Path, key: &Path) -> Config {
    let mut config = Config::default();
    config.cluster.name = "lab".to_owned();
    config.security.ca = authority.to_owned();
    config.security.certificate = certificate.to_owned();
    config.security.key = key.to_owned();
    config
}

#[test]
fn an_authority_signs_what_says_whose_it_is() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("below/authority");
    let made = Authority::create(&directory, "lab").unwrap();
    assert_eq!((made.cluster(), made.info().is_authority), (Some("lab"), true));
    assert_eq!((mode(&directory), mode(&directory.join("ca-key.pem"))), (0o700, 0o600));

    let opened = Authority::open(&directory).unwrap();
    assert_eq!((opened.info(), opened.certificate()), (made.info(), directory.join("ca.pem").as_path()));
    let out = place.path().join("out");
    let issued = opened.issue(&worker(), DAY, &out, &worker().file_name()).unwrap();
    assert_eq!((&issued.certificate, &issued.key), (&out.join("worker-node1.pem"), &out.join("worker-node1-key.pem")));
    assert_eq!((mode(&out), mode(&issued.key), mode(&issued.certificate)), (0o700, 0o600, 0o644));

    let info = CertificateInfo::read(&issued.certificate).unwrap();
    assert_eq!((&info.identity, info.is_authority), (&Some(worker()), false));
    assert!((86_390..=86_400).contains(&info.remaining_secs()), "{}", info.remaining_secs());
    let Transport::Tls(tls) = Transport::of(&config(opened.certificate(), &issued.certificate, &issued.key)).unwrap()
    else {
        panic!("it has certificates")
    };
    assert_eq!((tls.identity(), tls.certificate()), (worker(), info));
    // The files of both in one, as others have them.
    let both = out.join("both.pem");
    let texts = [&issued.certificate, opened.certificate()].map(|path| fs::read_to_string(path).unwrap());
    fs::write(&both, texts.concat()).unwrap();
    let all = CertificateInfo::read_all(&both).unwrap();
    assert_eq!(all.iter().map(|info| info.is_authority).collect::<Vec<_>>(), [false, true]);
}

#[test]
fn a_process_knows_what_others_think_of_its_certificate() {
    let place = tempfile::tempdir().unwrap();
    let [own, other] = ["own", "other"].map(|name| Authority::create(&place.path().join(name), "lab").unwrap());
    let tls = |believed: &Authority, name: &str, holds: Duration| {
        let issued = own.issue(&worker(), holds, place.path(), name).unwrap();
        let config = config(believed.certificate(), &issued.certificate, &issued.key);
        let Transport::Tls(tls) = Transport::of(&config).unwrap() else { panic!("it has certificates") };
        tls
    };
    assert_eq!(tls(&own, "good", DAY).certificate_refusal(), None);
    assert!(tls(&other, "foreign", DAY).certificate_refusal().is_some());
    // It holds to the end of the second.
    let (ended, begun) = (tls(&own, "ended", Duration::ZERO), Instant::now());
    let reason = loop {
        match ended.certificate_refusal() {
            None => assert!(begun.elapsed() < Duration::from_secs(10)),
            Some(reason) => break reason,
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(reason.contains("expired"), "{reason}");
}

#[test]
fn nothing_that_is_there_is_overwritten() {
    let place = tempfile::tempdir().unwrap();
    let authority = Authority::create(place.path(), "lab").unwrap();
    authority.issue(&worker(), DAY, place.path(), "w").unwrap();
    let names = ["ca.pem", "ca-key.pem", "w.pem", "w-key.pem"];
    let contents = || names.map(|name| fs::read(place.path().join(name)).unwrap());
    let before = contents();
    let exists = |error: SecurityError| matches!(error, SecurityError::Exists(path) if path.starts_with(place.path()));
    assert!(Authority::create(place.path(), "lab").err().is_some_and(exists));
    assert!(authority.issue(&worker(), DAY, place.path(), "w").err().is_some_and(exists));
    assert_eq!(contents(), before);
    // One of the two is enough, and the other is not made.
    for (left, gone) in [("ca.pem", "ca-key.pem"), ("ca-key.pem", "ca.pem")] {
        let half = tempfile::tempdir().unwrap();
        fs::write(half.path().join(left), "kept").unwrap();
        assert!(Authority::create(half.path(), "lab").is_err());
        assert!(!half.path().join(gone).exists() && fs::read(half.path().join(left)).unwrap() == b"kept");
    }
}

#[test]
fn a_certificate_does_not_outlive_its_authority() {
    let place = tempfile::tempdir().unwrap();
    let authority = Authority::create(place.path(), "lab").unwrap();
    authority.issue(&worker(), 3650 * DAY, place.path(), "ten-years").unwrap();
    let error = authority.issue(&worker(), authority.remaining() + DAY, place.path(), "longer").unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, SecurityError::Outlives { days: 7299..=7300, .. }), "{text}");
    assert!(text.contains("ca.pem") && text.contains("cv cert init"), "{text}");
    assert!(!place.path().join("longer.pem").exists() && !place.path().join("longer-key.pem").exists());
}

#[test]
fn files_that_are_none_are_named_with_the_cause_and_shown_nowhere() {
    let place = tempfile::tempdir().unwrap();
    let error = Authority::open(&place.path().join("none")).err().unwrap().to_string();
    assert!(error.contains("none/ca.pem") && error.contains("cv cert init"), "{error}");
    let authority = Authority::create(place.path(), "lab").unwrap();
    let issued = authority.issue(&worker(), DAY, place.path(), "w").unwrap();

    // A key in the place of a certificate, and the other way round.
    let refused = |ca: &Path, certificate: &Path, key: &Path| {
        let error = Transport::of(&config(ca, certificate, key)).unwrap_err().to_string();
        assert!(!error.contains("PRIVATE") && !error.contains("MIG"), "{error}");
        error
    };
    let ca = authority.certificate();
    let error = refused(ca, &issued.key, &issued.key);
    assert!(error.contains("w-key.pem") && error.contains("no certificate"), "{error}");
    let error = refused(ca, &issued.certificate, ca);
    assert!(error.contains("ca.pem"), "{error}");
    let missing = place.path().join("missing.pem");
    let error = refused(&missing, &issued.certificate, &issued.key);
    assert!(error.contains("missing.pem") && error.contains("security.ca"), "{error}");
    // The key of another certificate.
    let other = authority.issue(&worker(), DAY, place.path(), "other").unwrap();
    let error = refused(ca, &issued.certificate, &other.key);
    assert!(error.contains("w.pem") && error.contains("security.key"), "{error}");
    // That of the authority is of no process.
    let error = refused(ca, ca, &place.path().join("ca-key.pem"));
    assert!(error.contains("cavern://CLUSTER/ROLE/NAME"), "{error}");
    // One that everybody can read has been read by somebody.
    for open in [0o604, 0o644, 0o666] {
        fs::set_permissions(&issued.key, fs::Permissions::from_mode(open)).unwrap();
        let error = refused(ca, &issued.certificate, &issued.key);
        assert!(error.contains("w-key.pem") && error.contains("chmod 600"), "{error}");
    }
    fs::set_permissions(&issued.key, fs::Permissions::from_mode(0o640)).unwrap();
    Transport::of(&config(ca, &issued.certificate, &issued.key)).unwrap();
    // A configuration of another cluster.
    let mut elsewhere = config(ca, &issued.certificate, &issued.key);
    elsewhere.cluster.name = "other".to_owned();
    let error = Transport::of(&elsewhere).unwrap_err().to_string();
    assert!(error.contains("cavern://lab/worker/node1") && error.contains("\"other\""), "{error}");

    // The authority itself: without its key, and with another certificate in the place of its own.
    fs::copy(&issued.certificate, place.path().join("ca.pem")).unwrap();
    let error = Authority::open(place.path()).err().unwrap().to_string();
    assert!(error.contains("no authority"), "{error}");
    let garbage = place.path().join("garbage.pem");
    fs::write(&garbage, "-----BEGIN CERTIFICATE-----\nMIGx\n-----END CERTIFICATE-----\n").unwrap();
    let error = CertificateInfo::read(&garbage).unwrap_err().to_string();
    assert!(error.contains("garbage.pem") && error.contains("no certificate"), "{error}");
}

#[test]
fn a_master_and_a_worker_start_with_a_certificate_of_their_own_role_only() {
    let place = tempfile::tempdir().unwrap();
    let authority = Authority::create(place.path(), "lab").unwrap();
    for shown in Role::ALL {
        let identity = Identity::new("lab", shown, "node1").unwrap();
        let issued = authority.issue(&identity, DAY, place.path(), &identity.file_name()).unwrap();
        let config = config(authority.certificate(), &issued.certificate, &issued.key);
        for role in [Role::Master, Role::Worker] {
            let refusal = Transport::of_server(&config, role).err().map(|error| error.to_string());
            let expected = format!(
                "{} (security.certificate): it is of {identity}, not of a {role}: make one by `cv cert issue {role}`",
                issued.certificate.display()
            );
            assert_eq!(refusal, (shown != role).then_some(expected));
        }
    }
}

#[test]
fn the_end_of_a_certificate_is_a_metric_of_whoever_has_one() {
    let place = tempfile::tempdir().unwrap();
    let authority = Authority::create(place.path(), "lab").unwrap();
    let issued = authority.issue(&worker(), DAY, place.path(), "w").unwrap();
    let shown = |config: &Config| {
        let metrics = Metrics::new("worker");
        Transport::of(config).unwrap().register_metrics(&metrics);
        metrics.encode().unwrap()
    };
    let end = CertificateInfo::read(&issued.certificate).unwrap().not_after;
    let page = shown(&config(authority.certificate(), &issued.certificate, &issued.key));
    assert!(page.contains(&format!("\ncavern_certificate_expires_seconds {end}\n")), "{page}");
    assert!(!shown(&Config::default()).contains("cavern_certificate"));
}
