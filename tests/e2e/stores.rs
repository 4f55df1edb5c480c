//! Mounts of stores that speak other protocols than that of S3, as others have made them. They are asked where they
//! are installed: `bin/test --long=stores`.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use cavern_conf::schema;
use cavern_tests::{Cluster, Options, OutsideStore, eventually};
use cavern_ufs::{ListMode, Ufs, UfsError};
use tokio::runtime::Runtime;

/// Azurite's account, which everybody knows.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// What is in a bucket, asked for past the cluster.
struct Bucket {
    ufs: Ufs,
    runtime: Runtime,
}

impl Bucket {
    fn open(uri: &str, options: &[String]) -> Self {
        let options = options.iter().map(|option| option.split_once('=').unwrap());
        let options: HashMap<_, _> = options.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let conf = schema::Ufs { endpoints: vec!["127.0.0.1".to_owned()], ..schema::Ufs::default() };
        Self { ufs: Ufs::open(uri, &options, &conf).unwrap(), runtime: Runtime::new().unwrap() }
    }

    /// All bytes of an object; `None` where there is none.
    fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.runtime.block_on(async {
            match self.ufs.head(key).await {
                Ok(there) => Some(self.ufs.get_bytes(key, &there.etag, 0..there.size).await.unwrap().to_vec()),
                Err(UfsError::NotFound { .. }) => None,
                Err(error) => panic!("{error}"),
            }
        })
    }

    fn keys(&self, prefix: &str) -> Vec<String> {
        self.runtime.block_on(async {
            let mut lister = self.ufs.list(prefix, ListMode::Recursive);
            let mut keys = Vec::new();
            while let Some(page) = lister.next_page().await.unwrap() {
                keys.extend(page.objects.into_iter().map(|object| object.key));
            }
            keys
        })
    }
}

fn noise(length: u32) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[test]
#[ignore = "needs Azurite: bin/test --long=stores"]
fn a_container_of_azure_is_mounted_in_both_modes() {
    let cluster = Cluster::up(Options::default());
    let azurite = OutsideStore::serve("azurite", "data");
    let options = [
        format!("azblob.endpoint_url={}", azurite.endpoint),
        format!("azblob.account={ACCOUNT}"),
        format!("azblob.credentials.key={KEY}"),
    ];
    let bucket = Bucket::open("azblob://data", &options);

    // Cache-mode: the container has a file when its close returns, in parts where it is large.
    cluster.mount_from(&options, "azblob://data/cache", "/cache", &["--access-mode", "read_write"]);
    let (small, large) = (noise(50_000), noise(20 << 20));
    fs::create_dir(cluster.path("cache/d")).unwrap();
    for (name, content) in [("d/small \u{e9}+%", &small), ("large", &large)] {
        fs::write(cluster.path("cache").join(name), content).unwrap();
        assert!(bucket.object(&format!("cache/{name}")).unwrap() == *content, "{name}");
        assert!(fs::read(cluster.path("cache").join(name)).unwrap() == *content, "{name}");
    }
    fs::rename(cluster.path("cache/large"), cluster.path("cache/d/moved")).unwrap();
    assert!(bucket.object("cache/d/moved").unwrap() == large);
    assert_eq!(bucket.object("cache/large"), None);
    fs::remove_file(cluster.path("cache/d/moved")).unwrap();
    assert_eq!(bucket.object("cache/d/moved"), None);

    // Fs-mode: the container follows.
    let mut mount = vec!["mount", "azblob://data/fs", "/fs", "--write-type", "fs-mode"];
    mount.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
    cluster.cv(&mount);
    eventually("/fs appears", Duration::from_secs(10), || cluster.path("fs").is_dir().then_some(()));
    fs::create_dir(cluster.path("fs/run")).unwrap();
    for (name, content) in [("run/small", &small), ("run/large", &large)] {
        fs::write(cluster.path("fs").join(name), content).unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(bucket.object("fs/run/small").unwrap() == small);
    assert!(bucket.object("fs/run/large").unwrap() == large);
    fs::rename(cluster.path("fs/run"), cluster.path("fs/done")).unwrap();
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert!(bucket.object("fs/done/large").unwrap() == large);
    assert!(bucket.keys("fs/run/").is_empty());
    assert!(fs::read(cluster.path("fs/done/small")).unwrap() == small);

    // The key of the account is shown nowhere.
    let shown = cluster.cv(&["mount", "--json"]).stdout;
    assert!(shown.contains("azblob.credentials.key") && !shown.contains(KEY), "{shown}");
    assert!(!cluster.logs().contains(KEY));
}

#[test]
fn a_mount_of_another_store_is_refused_with_what_to_give() {
    let cluster = Cluster::up(Options::default());
    let refused = |uri: &str, options: &[&str], parts: &[&str]| {
        let mut arguments = vec!["mount", uri, "/data", "--write-type", "fs-mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", *option]));
        let finished = cluster.try_cv(&arguments);
        assert_ne!(finished.code, 0, "{uri} {options:?}");
        assert!(parts.iter().all(|part| finished.stderr.contains(part)), "{uri}: {}", finished.stderr);
        assert!(!finished.stderr.contains("hush"), "{}", finished.stderr);
    };
    refused("azblob://data", &[], &["azblob.account", "not given"]);
    refused(
        "azblob://data",
        &["azblob.account=acct", "azblob.credentials.sas=hush"],
        &["azblob.credentials.sas", "sig="],
    );
    refused("gs://data", &["gs.credentials.key=hush"], &["gs.credentials.key", "base64"]);
    refused("gs://data", &["gs.endpoint_url=http://127.0.0.1:9"], &["gs.endpoint_url", "goes nowhere else"]);
    refused("gs://data", &["gs.credentials.source=instance"], &["ufs.instance_credentials"]);
    refused("gs://data", &["s3.region_name=x"], &["gs:// has no such option"]);
    refused("gcs://data", &[], &["its scheme is not known", "gs://BUCKET", "azblob://CONTAINER"]);
}
