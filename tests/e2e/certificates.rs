//! `cv cert`: an authority, what it signs, and what certificates say. No cluster runs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use cavern_tests::{Cluster, Finished};

const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NOT_FOUND: i32 = 4;
const CONF: &str = "[cluster]\nname = \"lab\"\n";

struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("cluster.toml"), CONF).unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    /// `cv cert` with the configuration of this place.
    fn try_cert(&self, arguments: &[&str]) -> Finished {
        let finished = Cluster::alone(&[&["cert"], arguments].concat(), &[("CV_CONF", &self.path("cluster.toml"))]);
        assert!(!format!("{finished:?}").contains("PRIVATE"), "{finished:?}");
        finished
    }

    #[track_caller]
    fn cert(&self, arguments: &[&str]) -> Finished {
        let finished = self.try_cert(arguments);
        assert_eq!(finished.code, 0, "cv cert {arguments:?}: {finished:?}");
        finished
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], code: i32, fragments: &[&str]) {
        let finished = self.try_cert(arguments);
        assert_eq!(finished.code, code, "cv cert {arguments:?}: {finished:?}");
        assert!(!finished.stderr.contains("panicked"), "{finished:?}");
        for fragment in fragments {
            assert!(
                finished.stderr.contains(fragment),
                "cv cert {arguments:?} does not say {fragment:?}: {finished:?}"
            );
        }
    }

    /// Name, mode and content of all files of a directory.
    fn files(&self, name: &str) -> Vec<(String, u32, Vec<u8>)> {
        let entries = fs::read_dir(self.directory.path().join(name)).unwrap().map(Result::unwrap);
        let mut files: Vec<_> = entries
            .map(|entry| {
                let mode = entry.metadata().unwrap().permissions().mode() & 0o7777;
                (entry.file_name().into_string().unwrap(), mode, fs::read(entry.path()).unwrap())
            })
            .collect();
        files.sort();
        files
    }
}

#[test]
fn an_authority_signs_for_each_role_and_what_is_printed_is_a_configuration() {
    let place = Place::new();
    let authority = place.path("authority");
    let made = place.cert(&["init", "--dir", &authority]);
    assert!(made.stdout.contains("\"lab\"") && made.stdout.contains("cv cert issue"), "{made:?}");
    let out = place.path("out");
    for role in ["master", "worker", "client", "viewer", "operator", "admin"] {
        let issued = place.cert(&["issue", role, "node1", "--dir", &authority, "--out", &out]);
        let printed = issued.stdout.split_once('\n').unwrap().1;
        assert!(printed.starts_with("[security]\n"), "{issued:?}");
        let conf = place.path(&format!("{role}.toml"));
        fs::write(&conf, format!("{CONF}{printed}")).unwrap();
        let checked = Cluster::alone(&["conf", "check", "--conf", &conf], &[]);
        assert_eq!(checked.code, 0, "{checked:?}");
        assert!(printed.contains(&format!("/{role}-node1.pem\"")) && printed.contains("/ca.pem\""), "{printed}");
    }
    let files = place.files("out");
    assert_eq!(files.len(), 12);
    for (name, mode, _) in &files {
        assert_eq!(*mode, if name.ends_with("-key.pem") { 0o600 } else { 0o644 }, "{name}");
    }

    let shown = |names: &[&str]| {
        let paths: Vec<String> = names.iter().map(|name| place.path(name)).collect();
        let mut arguments = vec!["show", "--json"];
        arguments.extend(paths.iter().map(String::as_str));
        place.cert(&arguments).json()
    };
    let views = shown(&["authority/ca.pem", "out/worker-node1.pem"]);
    assert_eq!((&views[0]["authority"], &views[0]["identity"]), (&true.into(), &serde_json::Value::Null), "{views}");
    assert_eq!(views[1]["identity"], "cavern://lab/worker/node1", "{views}");
    assert!([364, 365].contains(&views[1]["days_left"].as_i64().unwrap()), "{views}");
    assert!(views[1]["not_after"].as_str().unwrap().ends_with('Z'), "{views}");
    let table = place.cert(&["show", &place.path("out/admin-node1.pem")]).stdout;
    assert!(table.contains("cavern://lab/admin/node1") && table.contains("days"), "{table}");

    let days = place.cert(&["issue", "client", "short", "--dir", &authority, "--days", "1", "--json"]).json();
    assert_eq!(days["identity"], "cavern://lab/client/short");
    assert!(Path::new(days["key"].as_str().unwrap()).exists(), "{days}");
    place.cert(&["issue", "client", "long", "--dir", &authority, "--days", "3650"]);
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_is_overwritten() {
    let place = Place::new();
    let (authority, none) = (place.path("authority"), place.path("none"));
    place.refused(&["init"], USAGE, &["--dir"]);
    place.refused(&["issue", "worker", "w", "--dir", &none], NOT_FOUND, &["none/ca.pem", "cv cert init"]);
    place.cert(&["init", "--dir", &authority]);
    place.cert(&["issue", "worker", "w", "--dir", &authority]);
    let before = place.files("authority");

    place.refused(&["init", "--dir", &authority], FAILED, &["ca.pem", "is there already"]);
    place.refused(&["issue", "worker", "w", "--dir", &authority], FAILED, &["worker-w.pem", "is there already"]);
    place.refused(
        &["issue", "root", "w", "--dir", &authority],
        USAGE,
        &["master, worker, client, viewer, operator or admin"],
    );
    for name in ["a b", "../w", "", "é"] {
        place.refused(&["issue", "worker", name, "--dir", &authority], USAGE, &["cavern://CLUSTER/ROLE/NAME"]);
    }
    for days in ["0", "3651", "x"] {
        place.refused(&["issue", "worker", "x", "--dir", &authority, "--days", days], USAGE, &["--days"]);
    }
    // Signed for another cluster, it would be of no use there.
    let other = place.path("other.toml");
    fs::write(&other, "[cluster]\nname = \"other\"\n").unwrap();
    let arguments = ["issue", "worker", "x", "--dir", &authority, "--conf", &other];
    place.refused(&arguments, USAGE, &["\"lab\"", "\"other\"", "--conf"]);
    assert_eq!(place.files("authority"), before);

    place.refused(&["show"], USAGE, &["FILE"]);
    place.refused(&["show", &none], NOT_FOUND, &["none"]);
    let key = place.path("authority/worker-w-key.pem");
    place.refused(&["show", &key], FAILED, &["worker-w-key.pem", "no certificate"]);
    place.refused(&["show", "/etc/passwd"], FAILED, &["/etc/passwd", "no certificate"]);
    // The others are shown all the same.
    let mixed = place.try_cert(&["show", &key, &place.path("authority/worker-w.pem")]);
    assert!(mixed.code == FAILED && mixed.stdout.contains("cavern://lab/worker/w"), "{mixed:?}");
}

#[test]
fn what_is_revoked_is_on_a_list_that_a_configuration_takes_and_that_is_shown() {
    let place = Place::new();
    let (authority, other) = (place.path("authority"), place.path("other"));
    for directory in [&authority, &other] {
        place.cert(&["init", "--dir", directory]);
    }
    for name in ["node1", "node2"] {
        place.cert(&["issue", "worker", name, "--dir", &authority]);
    }
    let [node1, node2, list] =
        ["worker-node1.pem", "worker-node2.pem", "crl.pem"].map(|name| format!("{authority}/{name}"));
    // From the start, with nothing on it.
    let made = place.cert(&["revoke", "--dir", &authority]);
    let line = made.stdout.lines().last().unwrap();
    assert!(line.starts_with("revoked = ") && line.contains("/crl.pem"), "{made:?}");
    let conf = place.path("node.toml");
    let files =
        format!("ca = \"{authority}/ca.pem\"\ncertificate = {node1:?}\nkey = \"{authority}/worker-node1-key.pem\"\n");
    let check = |revoked: &str| {
        fs::write(&conf, format!("{CONF}[security]\n{files}{revoked}\n")).unwrap();
        Cluster::alone(&["conf", "check", "--conf", &conf], &[])
    };
    assert_eq!(check(line).code, 0);
    let missing = check(&format!("revoked = \"{authority}/none.pem\""));
    assert!(missing.code == USAGE && missing.stderr.contains("security.revoked"), "{missing:?}");
    place.cert(&["revoke", "--dir", &other]);
    let foreign = check(&format!("revoked = \"{other}/crl.pem\""));
    assert!(foreign.code == USAGE && foreign.stderr.contains("no authority of security.ca"), "{foreign:?}");

    let out = place.path("copy.pem");
    let revoked = place.cert(&["revoke", &node1, "--dir", &authority, "--out", &out, "--json"]).json();
    assert_eq!((&revoked["number"], &revoked["revoked"], &revoked["added"]), (&"2".into(), &1.into(), &1.into()));
    assert_eq!(fs::read(&out).unwrap(), fs::read(&list).unwrap());
    for named in [["--dir", &authority], ["--revoked", &out]] {
        let views = place.cert(&[&["show", &node1, &node2, "--json"][..], &named].concat()).json();
        assert_eq!((&views[0]["revoked"], &views[1]["revoked"]), (&true.into(), &false.into()), "{views}");
        assert!(views[0]["revoked_since"].as_str().unwrap().ends_with('Z'), "{views}");
    }
    let views = place.cert(&["show", &node1, &list, "--json"]).json();
    assert!(views[0]["revoked"].is_null(), "{views}");
    assert_eq!(views[1]["revokes"][0]["serial"], views[0]["serial"], "{views}");
    let table = place.cert(&["show", &list]).stdout;
    assert!(table.contains("1 certificate") && table.contains(views[0]["serial"].as_str().unwrap()), "{table}");

    let before = place.files("authority");
    let foreign = format!("{other}/ca.pem");
    place.refused(&["revoke", &foreign, "--dir", &authority], FAILED, &["other/ca.pem", "has not signed it"]);
    place.refused(&["revoke", &list, "--dir", &authority], FAILED, &["crl.pem", "no certificate"]);
    place.refused(&["revoke", &place.path("none.pem"), "--dir", &authority], NOT_FOUND, &["none.pem"]);
    assert_eq!(place.files("authority"), before);
}

#[test]
fn a_listener_for_other_hosts_needs_certificates_or_says_that_it_needs_none() {
    let place = Place::new();
    for (role, port) in [("master", 7700), ("worker", 7710)] {
        let conf = place.path(&format!("{role}.toml"));
        fs::write(&conf, format!("[{role}]\nlisten = \"0.0.0.0:{port}\"\n")).unwrap();
        for arguments in [&["conf", "check", "--conf", &conf][..], &[role, "--conf", &conf]] {
            let refused = Cluster::alone(arguments, &[]);
            assert_eq!(refused.code, USAGE, "{arguments:?}: {refused:?}");
            for fragment in [&format!("{role}.toml:2: {role}.listen"), "[security]", "security.insecure = true"] {
                assert!(refused.stderr.contains(fragment), "{fragment}: {refused:?}");
            }
        }
        let insecure = Cluster::alone(&["conf", "check", "--conf", &conf], &[("CV_SECURITY__INSECURE", "true")]);
        assert_eq!(insecure.code, 0, "{insecure:?}");
    }
}

#[test]
fn a_check_of_the_configuration_reads_the_files_of_this_host_and_names_each_that_cannot_be_used() {
    let place = Place::new();
    let authority = place.path("authority");
    place.cert(&["init", "--dir", &authority]);
    place.cert(&["issue", "worker", "node1", "--dir", &authority]);
    place.cert(&["issue", "worker", "node2", "--dir", &authority]);
    let token = place.path("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    let conf = place.path("node.toml");
    let check = |[ca, certificate, key, token]: [&str; 4]| {
        let [ca, certificate, key] = [ca, certificate, key].map(|name| format!("{authority}/{name}"));
        let token = place.path(token);
        let security = format!("ca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\nhttp_token = {token:?}\n");
        fs::write(&conf, format!("{CONF}[security]\n{security}")).unwrap();
        Cluster::alone(&["conf", "check", "--conf", &conf], &[])
    };
    let good = check(["ca.pem", "worker-node1.pem", "worker-node1-key.pem", "token"]);
    assert_eq!(good.code, 0, "{good:?}");
    // Each that is missing, in one run.
    let missing = check(["none.pem", "worker-none.pem", "worker-none-key.pem", "no-token"]);
    assert_eq!(missing.code, USAGE, "{missing:?}");
    for named in ["/none.pem", "/worker-none.pem", "/worker-none-key.pem", "/no-token"] {
        assert!(missing.stderr.contains(named), "{named}: {missing:?}");
    }
    for key in ["security.ca", "security.certificate", "security.key", "security.http_token"] {
        assert!(missing.stderr.contains(key), "{key}: {missing:?}");
    }
    let of_another = check(["ca.pem", "worker-node1.pem", "worker-node2-key.pem", "token"]);
    assert!(of_another.code == USAGE && of_another.stderr.contains("does not fit to security.key"), "{of_another:?}");
    let no_certificate = check(["worker-node1-key.pem", "worker-node1.pem", "worker-node1-key.pem", "token"]);
    assert!(no_certificate.code == USAGE && no_certificate.stderr.contains("no certificate"), "{no_certificate:?}");
}
