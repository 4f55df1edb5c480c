//! An embedded S3 store per test, and handles on it.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod cloud;
pub mod contract;
pub mod fake;
pub mod gcs;
pub mod outside;

use std::collections::HashMap;
use std::fs;

use cavern_conf::Interval;
use cavern_conf::schema;
use cavern_dev_s3::{DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY, DevS3, DevS3Config, Running};
use cavern_ufs::{ListMode, ListPage, Ufs};

pub struct Bucket {
    pub s3: Running,
    root: tempfile::TempDir,
}

pub const BUCKET: &str = "data";

/// Few retries, and deadlines that a host which has much else to do does not miss.
pub fn conf() -> schema::Ufs {
    let time = Interval::secs(20);
    schema::Ufs {
        connect_timeout: time,
        request_timeout: time,
        io_timeout: time,
        retries: 2,
        retry_backoff: Interval::millis(1),
        retry_backoff_max: Interval::millis(4),
        concurrency: 64,
        file_roots: vec!["/".into()],
        endpoints: vec!["127.0.0.1".to_owned()],
        instance_credentials: false,
    }
}

/// Deadlines short enough for a test that waits for them.
pub fn hasty() -> schema::Ufs {
    let time = Interval::millis(500);
    schema::Ufs { connect_timeout: time, request_timeout: time, io_timeout: time, ..conf() }
}

pub fn options(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

impl Bucket {
    pub async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let s3 = DevS3::start(DevS3Config::new(root.path())).await.unwrap();
        s3.store().create_bucket(BUCKET).unwrap();
        Self { s3, root }
    }

    pub fn put(&self, key: &str, bytes: &[u8]) -> String {
        self.s3.store().put(BUCKET, key, bytes).unwrap().etag.clone()
    }

    /// How many uploads are neither objects nor given up.
    pub fn uploads(&self) -> usize {
        fs::read_dir(self.root.path().join("buckets").join(BUCKET).join("uploads")).map_or(0, Iterator::count)
    }

    pub fn options(&self) -> HashMap<String, String> {
        options(&[
            ("s3.endpoint_url", &self.s3.endpoint()),
            ("s3.credentials.access", DEFAULT_ACCESS_KEY),
            ("s3.credentials.secret", DEFAULT_SECRET_KEY),
        ])
    }

    pub fn ufs(&self) -> Ufs {
        self.ufs_with(&conf())
    }

    pub fn ufs_with(&self, conf: &schema::Ufs) -> Ufs {
        Ufs::open(&format!("s3://{BUCKET}"), &self.options(), conf).unwrap()
    }
}

/// Every page of a listing.
pub async fn pages(ufs: &Ufs, prefix: &str, mode: ListMode) -> Vec<ListPage> {
    let mut lister = ufs.list(prefix, mode);
    let mut pages = Vec::new();
    while let Some(page) = lister.next_page().await.unwrap() {
        pages.push(page);
    }
    pages
}

/// Every key of a listing, in the order in which it comes.
pub async fn keys(ufs: &Ufs, prefix: &str, mode: ListMode) -> Vec<String> {
    pages(ufs, prefix, mode).await.into_iter().flat_map(|page| page.objects).map(|object| object.key).collect()
}
