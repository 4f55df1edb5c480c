//! Command lines of people who may look at a cluster, or operate it, and no more.

use super::*;

#[test]
fn viewers_look_and_operators_operate_and_neither_does_more() {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    fs::write(cluster.path("work/f"), "content").unwrap();
    let certificates = cluster.directory().join("certificates");
    for role in ["viewer", "operator"] {
        cluster.cv(&["cert", "issue", role, "somebody", "--dir", certificates.to_str().unwrap()]);
    }
    let run = |role: &str, arguments: &[&str]| {
        let mut command = cluster.command(arguments);
        command.env("CV_SECURITY__CERTIFICATE", certificates.join(format!("{role}-somebody.pem")));
        command.env("CV_SECURITY__KEY", certificates.join(format!("{role}-somebody-key.pem")));
        let done = command.output().unwrap();
        (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let looks: [&[&str]; 5] =
        [&["report"], &["node", "list"], &["mount"], &["job", "list"], &["persist", "status", "/work"]];
    for role in ["viewer", "operator"] {
        for arguments in looks {
            let (is_done, said) = run(role, arguments);
            assert!(is_done, "{role}: {arguments:?}: {said}");
        }
    }
    let before = state(&cluster);
    let operates: [&[&str]; 4] = [
        &["refresh", "/work"],
        &["mount", "update", "/work", "--client", "somebody"],
        &["node", "drain", "1"],
        &["umount", "/work"],
    ];
    let secures: [&[&str]; 3] = [&["fs", "ls", "/work"], &["fs", "cat", "/work/f"], &["secrets", "rotate"]];
    let attempts = operates.iter().chain(&secures).map(|arguments| ("viewer", *arguments));
    for (role, arguments) in attempts.chain(secures.iter().map(|arguments| ("operator", *arguments))) {
        let (is_done, said) = run(role, arguments);
        assert!(!is_done && said.contains("takes a certificate of the role"), "{role}: {arguments:?}: {said}");
    }
    assert_eq!(state(&cluster), before);
    assert_eq!(fs::read_to_string(cluster.path("work/f")).unwrap(), "content");
    for arguments in [&["refresh", "/work"][..], &["umount", "/work"]] {
        let (is_done, said) = run("operator", arguments);
        assert!(is_done, "{arguments:?}: {said}");
    }
}
