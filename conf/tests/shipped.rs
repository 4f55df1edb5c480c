//! The files that are shipped in `etc` agree with the code.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use cavern_conf::{Config, Effective, SettingSource};

/// What is between systemd and `cv fuse`.
const HOLD_MOUNT: &str = "/usr/libexec/cavern/hold-mount";

fn shipped(name: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../etc").join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    (path, text)
}

/// Every `section.key` of the schema.
fn keys() -> Vec<(String, String)> {
    let table = toml::Table::try_from(Config::default()).unwrap();
    let keys: Vec<_> = table
        .iter()
        .flat_map(|(section, keys)| keys.as_table().unwrap().keys().map(move |key| (section.clone(), key.clone())))
        .collect();
    assert!(keys.len() > 50, "the schema has lost its keys");
    keys
}

#[test]
fn the_shipped_file_is_the_defaults() {
    let (path, text) = shipped("cluster.toml");
    let table: toml::Table = text.parse().unwrap();
    let is_auto = |section: &str, key: &str| table[section][key].as_str() == Some("auto");
    let effective = Effective::compose(Some((path, text.into_bytes())), []).unwrap();
    assert_eq!(effective.config, Config::default());
    for (section, key) in keys() {
        let origin = effective.origin(&format!("{section}.{key}"));
        let follows = matches!(origin, SettingSource::Limits(_)) && is_auto(&section, &key);
        assert!(follows || matches!(origin, SettingSource::File { .. }), "{section}.{key} is not in etc/cluster.toml");
    }
}

#[test]
fn the_shipped_file_describes_every_key() {
    let (_, text) = shipped("cluster.toml");
    // A comment stands above each key, or above the key before it where two belong together (a value and its maximum).
    let mut undescribed = 0;
    for line in text.lines().map(str::trim) {
        let two_belong_together = [
            "low_watermark",
            "retry_backoff_max",
            "worker_backoff_max",
            "attr_timeout",
            "negative_timeout",
            "gid",
            "dir_mode",
        ];
        if line.starts_with('#') {
            undescribed = 0;
        } else if let Some((key, _)) = line.split_once(" = ") {
            assert!(undescribed == 0 || two_belong_together.contains(&key), "{key} has no comment");
            undescribed += 1;
        }
    }
    assert!(text.lines().all(|line| line.chars().count() <= 120));
}

#[test]
fn the_shipped_file_lists_the_keys_in_the_order_of_the_schema() {
    let (_, text) = shipped("cluster.toml");
    let table: toml::Table = text.parse().unwrap();
    let order = |table: &toml::Table| -> Vec<(String, Vec<String>)> {
        table.iter().map(|(name, keys)| (name.clone(), keys.as_table().unwrap().keys().cloned().collect())).collect()
    };
    assert_eq!(order(&table), order(&toml::Table::try_from(Config::default()).unwrap()));
}

#[test]
fn prometheus_scrapes_the_default_ports() {
    let config = Config::default();
    let ports = [config.master.http_listen, config.worker.http_listen, config.fuse.http_listen];
    for name in ["prometheus.yml", "prometheus-secured.yml"] {
        let (_, text) = shipped(name);
        for address in &ports {
            assert!(text.contains(&format!("[\"{address}\"]")), "{name}: {address}");
        }
    }
    // How a port is asked that is secured: conf/security/tests/http_port.rs does so.
    let (_, text) = shipped("prometheus-secured.yml");
    for line in ["scheme: https", "server_name: cavern }", "authorization: { credentials_file: "] {
        assert_eq!(text.matches(line).count(), ports.len(), "{line}");
    }
}

#[test]
fn units_start_each_process_with_the_installed_file() {
    for role in ["master", "worker", "fuse"] {
        let (_, text) = shipped(&format!("systemd/cavern-{role}.service"));
        let program = if role == "fuse" { HOLD_MOUNT.to_owned() } else { format!("/usr/bin/cv {role}") };
        assert!(text.contains(&format!("ExecStart={program} --conf /etc/cavern/cluster.toml\n")), "{role}");
        assert!(text.contains("\nAssertPathExists=/etc/cavern/cluster.toml\n"), "{role}");
        for line in ["Type=simple", "KillSignal=SIGTERM", "Restart=on-failure", "LimitNOFILE=1048576"] {
            assert!(text.lines().any(|found| found == line), "{role}: {line}");
        }
        assert!(text.contains(&format!("\nEnvironmentFile=-/etc/cavern/{role}.env\n")), "{role}");
    }
    let mount_point = Config::default().fuse.mount_point;
    for (unit, at) in [("cavern-fuse", mount_point.to_str().unwrap()), ("cavern-fuse@", "/data%f")] {
        let (_, text) = shipped(&format!("systemd/{unit}.service"));
        // A restart leaves `cv fuse` as it is, and the next process finds it.
        for line in [
            "KillMode=process",
            "RestartKillSignal=SIGHUP",
            "OOMPolicy=continue",
            "RuntimeDirectory=%N",
            "RuntimeDirectoryPreserve=yes",
            "StartLimitIntervalSec=0",
        ] {
            assert!(text.lines().any(|found| found == line), "{unit}: {line}");
        }
        assert!(text.contains(&format!("\nEnvironment=MOUNT_POINT={at}\n")), "{unit}");
        assert!(!text.contains("umount --lazy"), "{unit}");
    }
    // One for each data set has its own path, mount point and port.
    let (_, text) = shipped("systemd/cavern-fuse@.service");
    assert!(text.contains(&format!("\nExecStart={HOLD_MOUNT} --conf /etc/cavern/cluster.toml\n")));
    for (key, value) in [("PATH", "%f"), ("MOUNT_POINT", "/data%f"), ("HTTP_LISTEN", "127.0.0.1:0")] {
        assert!(text.contains(&format!("\nEnvironment=CV_FUSE__{key}={value}\n")), "{key}");
    }
}

fn units() -> Vec<(String, String)> {
    let names = ["cavern-master", "cavern-worker", "cavern-fuse", "cavern-fuse@"];
    names.map(|name| (name.to_owned(), shipped(&format!("systemd/{name}.service")).1)).into()
}

#[test]
fn units_give_processes_no_more_rights_than_they_need() {
    for (name, text) in units() {
        let has = |line: &str| text.lines().any(|found| found == line);
        for line in ["LimitCORE=0", "NoNewPrivileges=yes", "MemoryDenyWriteExecute=yes", "RestrictNamespaces=yes"] {
            assert!(has(line), "{name}: {line}");
        }
        // The mount of a client is for everybody, so that it has no file systems of its own.
        let is_client = name.starts_with("cavern-fuse");
        let own =
            ["ProtectHome=yes", "ProtectSystem=full", "PrivateTmp=yes", "PrivateDevices=yes", "ProtectProc=invisible"];
        for line in own.into_iter().chain(["User=cavern", "CapabilityBoundingSet=", "SystemCallFilter=@system-service"])
        {
            assert_eq!(has(line), !is_client, "{name}: {line}");
        }
    }
}

/// As `systemd-analyze` judges units, where there is one that does so without a running systemd (250 and later).
#[test]
fn units_leave_little_to_attack() {
    let analyze = |arguments: &[&str]| {
        let said = Command::new("systemd-analyze").args(arguments).output().ok()?;
        Some((said.status.success(), String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned()))
    };
    if !analyze(&["--help"]).is_some_and(|(_, help)| help.contains("--offline")) {
        eprintln!("there is no systemd-analyze that judges files");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in units() {
        let path = directory.path().join(format!("{name}.service"));
        // What is not installed here cannot be started, which is not the question.
        let text = text.replace("/usr/bin/cv", "/bin/sh").replace(HOLD_MOUNT, "/bin/sh").replace("%f", "/a");
        std::fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap();
        let (is_sound, said) = analyze(&["verify", "--man=no", path]).unwrap();
        assert!(is_sound, "{name}: {said}");
        // Tenths.
        let threshold = if name.starts_with("cavern-fuse") { "--threshold=65" } else { "--threshold=40" };
        let (is_below, said) = analyze(&["security", "--offline=yes", "--no-pager", threshold, path]).unwrap();
        assert!(is_below, "{name}: {said}");
    }
}
