//! The HTTP ports of a secured cluster: metrics are for whoever has the token, or is an admin; health is for everybody.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use cavern_tests::{Child, Cluster, Https, Options, eventually, http_get, http_request_with};
use serde_json::Value;

use super::PATIENCE;

fn children(cluster: &Cluster) -> Vec<Child> {
    let status = cluster.status();
    status.masters.into_iter().chain(status.workers).chain(status.fuse).collect()
}

fn status(https: &Https, child: &Child, path: &str) -> u16 {
    https.get(&child.http, path).unwrap().status
}

/// A file that is replaced as a whole, as it is told.
fn replace(path: &Path, content: &str) {
    let beside = path.with_extension("new");
    fs::write(&beside, content).unwrap();
    fs::set_permissions(&beside, Permissions::from_mode(0o600)).unwrap();
    fs::rename(beside, path).unwrap();
}

#[test]
fn metrics_of_a_secured_cluster_are_for_whoever_has_the_token_or_is_an_admin() {
    let directory = tempfile::tempdir().unwrap();
    let audits = ["master", "worker"].map(|name| directory.path().join(name));
    let [master, worker] = audits.each_ref().map(|path| path.display());
    let conf = format!("[master]\naudit_log = \"{master}\"\n[worker]\naudit_log = \"{worker}\"\n");
    let cluster = Cluster::up(Options { secure: true, conf, ..Options::default() });
    let certificates = cluster.directory().join("certificates");
    let file = certificates.join("http-token");
    let token = fs::read_to_string(&file).unwrap().trim().to_owned();
    let nobody = Https { authority: certificates.join("ca.pem"), ..Https::default() };
    let scraper = Https { token: Some(token.clone()), ..nobody.clone() };
    let wrong = Https { token: Some(format!("{token}x")), ..nobody.clone() };
    let pair =
        |name: &str| Some([format!("{name}.pem"), format!("{name}-key.pem")].map(|file| certificates.join(file)));
    let admin = Https { certificate: pair("admin-local"), ..nobody.clone() };
    let client = Https { certificate: pair("client-fuse0"), ..nobody.clone() };
    let children = children(&cluster);
    assert_eq!(children.len(), 3);
    for child in &children {
        let plain = http_get(&format!("http://{}/metrics", child.http)).unwrap();
        assert!(plain.status == 400 && !plain.body.contains("cavern_"), "{plain:?}");
        let refused = nobody.get(&child.http, "/metrics").unwrap();
        assert!(refused.status == 401 && !refused.body.contains("cavern_"), "{refused:?}");
        assert!(refused.head.to_lowercase().contains("www-authenticate: bearer"), "{refused:?}");
        assert_eq!(status(&wrong, child, "/metrics"), 401);
        assert_eq!(status(&client, child, "/metrics"), 403);
        assert_eq!(status(&nobody, child, "/debug/pprof"), 401);
        for one in [&nobody, &wrong, &client] {
            assert_eq!(status(one, child, "/healthz"), 200);
        }
        assert_eq!(status(&admin, child, "/metrics"), 200);
        let page = scraper.get(&child.http, "/metrics").unwrap();
        assert!(page.status == 200 && page.body.contains("cavern_http_requests_refused_total 5"), "{}", page.body);
    }
    for audit in &audits {
        let text = fs::read_to_string(audit).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let refused = lines.iter().filter(|line| line["operation"] == "Http" && line["result"] != "ok");
        assert!(refused.count() == 4 && !text.contains(&token), "{text}");
    }
    // No log has it either, nor the list of processes.
    for child in &children {
        assert!(!fs::read_to_string(&child.log).unwrap().contains(&token));
    }

    // Another token, without a restart.
    let new = "another-token-of-this-cluster";
    replace(&file, new);
    let renewed = Https { token: Some(new.to_owned()), ..nobody };
    for child in &children {
        eventually("the new token is in force", PATIENCE, || {
            (status(&renewed, child, "/metrics") == 200).then_some(())
        });
        assert_eq!(status(&scraper, child, "/metrics"), 401);
    }
}

#[test]
fn metrics_for_other_hosts_are_secured_or_said_to_be_open() {
    let directory = tempfile::tempdir().unwrap();
    let check = |conf: &str| {
        let path = directory.path().join("cluster.toml");
        fs::write(&path, conf).unwrap();
        Cluster::alone(&["conf", "check", "--conf", path.to_str().unwrap()], &[])
    };
    let authority = directory.path().to_str().unwrap();
    for arguments in [&["init"][..], &["issue", "worker", "w"]] {
        let made = Cluster::alone(&[&["cert"], arguments, &["--dir", authority]].concat(), &[]);
        assert_eq!(made.code, 0, "{made:?}");
    }
    let files = format!(
        "[security]\nca = \"{authority}/ca.pem\"\ncertificate = \"{authority}/worker-w.pem\"\n\
         key = \"{authority}/worker-w-key.pem\"\n"
    );
    for section in ["master", "worker", "fuse"] {
        let open = format!("[{section}]\nhttp_listen = \"0.0.0.0:7799\"\n");
        let refused = check(&open);
        let key = format!("{section}.http_listen");
        assert!(refused.code == 2 && refused.stderr.contains(&key), "{refused:?}");
        assert!(refused.stderr.contains("security.insecure = true"), "{refused:?}");
        assert_eq!(check(&format!("{open}{files}")).code, 0);
        assert_eq!(check(&format!("{open}[security]\ninsecure = true\n")).code, 0);
    }
    let alone = check("[security]\nhttp_token = \"/c/token\"\n");
    assert!(alone.code == 2 && alone.stderr.contains("security.http_token"), "{alone:?}");
}

#[test]
fn the_admin_port_of_the_object_store_takes_its_token() {
    let cluster = Cluster::up(Options { secure: true, ..Options::default() });
    let s3 = cluster.status().s3;
    let token = s3.admin_token.unwrap();
    assert_eq!(fs::metadata(&token).unwrap().permissions().mode() & 0o777, 0o600);
    let bearer = format!("Authorization: Bearer {}\r\n", fs::read_to_string(&token).unwrap().trim());
    cluster.s3.create_bucket("bucket");
    cluster.s3.put("bucket", "key", "kept");
    let overwrite = format!("{}/_dev/sparse?bucket=bucket&key=key&size=1000", s3.admin.unwrap());
    let status = |more: &str| http_request_with("POST", &overwrite, more, "").unwrap().status;
    assert_eq!(status(""), 401);
    assert_eq!(status("Authorization: Bearer 0123456789abcdef\r\n"), 401);
    // A page of a browser that has got the token.
    assert_eq!(status(&format!("Origin: http://localhost\r\n{bearer}")), 403);
    // Of a name that leads here, as well as this host's own.
    assert_eq!(status(&format!("Host: evil.example\r\n{bearer}")), 403);
    assert_eq!(cluster.s3.get("bucket", "key"), "kept");
    assert!((200..300).contains(&status(&bearer)));
    assert_eq!(cluster.s3.get("bucket", "key").len(), 1000);

    // A token holds until the next start.
    cluster.stop("s3");
    cluster.start("s3");
    assert_eq!(status(&bearer), 401);
    assert!(cluster.s3.stats()["requests"].is_u64());
}
