//! The cluster's bucket, whole.

use std::collections::BTreeMap;

use bytes::Bytes;
use cavern_tests::Cluster;
use cavern_ufs::{ListMode, Ufs, UfsError};
use tokio::runtime::Runtime;

/// Name of the object that says which cluster writes under a prefix in fs-mode.
pub const CLAIM: &str = ".cavern-cluster";

pub type Objects = BTreeMap<String, Bytes>;

pub struct Bucket {
    pub runtime: Runtime,
    pub ufs: Ufs,
}

impl Bucket {
    pub fn of(cluster: &Cluster, bucket: &str) -> Self {
        Self::open(&cluster.bucket_options(), bucket)
    }

    /// The bucket that options (`-c` of `cv mount`) reach.
    pub fn open(options: &[String], bucket: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let options = options.iter().filter_map(|option| option.split_once('='));
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let _inside = runtime.enter();
        let mut conf = cavern_conf::Config::default().ufs;
        conf.endpoints.push("127.0.0.1".to_owned());
        let ufs = Ufs::open(&format!("s3://{bucket}"), &options, &conf).unwrap();
        drop(_inside);
        Self { runtime, ufs }
    }

    /// All objects, without those that are deleted meanwhile, and those that say whose a prefix is.
    pub fn objects(&self) -> Objects {
        self.objects_below("")
    }

    /// The same of those whose keys begin so.
    pub fn objects_below(&self, prefix: &str) -> Objects {
        self.runtime.block_on(async {
            'listing: loop {
                let mut objects = Objects::new();
                let mut lister = self.ufs.list(prefix, ListMode::Recursive);
                while let Some(page) = lister.next_page().await.unwrap() {
                    for object in page.objects.into_iter().filter(|object| !object.key.ends_with(CLAIM)) {
                        match self.ufs.get_bytes(&object.key, &object.etag, 0..object.size).await {
                            Ok(content) => drop(objects.insert(object.key, content)),
                            // It has been deleted since it was listed, or replaced.
                            Err(UfsError::NotFound { .. }) => {}
                            Err(UfsError::VersionChanged { .. }) => continue 'listing,
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                break objects;
            }
        })
    }
}

/// Panics unless the bucket has exactly these objects, naming what is missing, left over, or another.
#[track_caller]
pub fn assert_same(when: &str, bucket: &Objects, expected: &Objects) {
    let missing: Vec<&String> = expected.keys().filter(|key| !bucket.contains_key(*key)).collect();
    let left_over: Vec<&String> = bucket.keys().filter(|key| !expected.contains_key(*key)).collect();
    let other = expected.iter().filter(|(key, content)| bucket.get(*key).is_some_and(|there| there != *content));
    let other: Vec<&String> = other.map(|(key, _)| key).collect();
    assert!(
        missing.is_empty() && left_over.is_empty() && other.is_empty(),
        "{when}: of {} objects missing {missing:?}, left over {left_over:?}, with another content {other:?}",
        expected.len()
    );
}
