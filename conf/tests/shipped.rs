//! The files that are shipped in `etc` agree with the code.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};

use cavern_conf::{Config, Effective, SettingSource};

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
    let effective = Effective::compose(Some((path, text.into_bytes())), []).unwrap();
    assert_eq!(effective.config, Config::default());
    for (section, key) in keys() {
        let origin = effective.origin(&format!("{section}.{key}"));
        assert!(matches!(origin, SettingSource::File { .. }), "{section}.{key} is not in etc/cluster.toml");
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
        assert!(text.contains(&format!("ExecStart=/usr/bin/cv {role} --conf /etc/cavern/cluster.toml\n")));
        for line in ["Type=simple", "KillSignal=SIGTERM", "Restart=on-failure", "LimitNOFILE=1048576"] {
            assert!(text.lines().any(|found| found == line), "{role}: {line}");
        }
        assert!(text.contains(&format!("\nEnvironmentFile=-/etc/cavern/{role}.env\n")), "{role}");
    }
    let mount_point = Config::default().fuse.mount_point;
    let (_, text) = shipped("systemd/cavern-fuse.service");
    assert!(text.contains(&format!("MOUNT_POINT={}\n", mount_point.display())));
    // One for each data set has its own path, mount point and port.
    let (_, text) = shipped("systemd/cavern-fuse@.service");
    assert!(text.contains("\nExecStart=/usr/bin/cv fuse --conf /etc/cavern/cluster.toml\n"));
    for (key, value) in [("PATH", "%f"), ("MOUNT_POINT", "/data%f"), ("HTTP_LISTEN", "127.0.0.1:0")] {
        assert!(text.contains(&format!("\nEnvironment=CV_FUSE__{key}={value}\n")), "{key}");
    }
}
