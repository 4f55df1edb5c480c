//! Stores at addresses that no process connects to by itself are not asked, unless that is allowed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::io::ErrorKind;
use std::net::TcpListener;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_ufs::{ListMode, Precondition, Ufs, UfsError};
use support::{Bucket, conf, options};

#[tokio::test]
async fn a_store_that_may_not_be_reached_is_never_asked() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let conf = schema::Ufs { endpoints: vec!["127.0.0.1:1".to_owned()], ..conf() };
    for host in ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"] {
        let endpoint = format!("http://{host}:{port}");
        let given = options(&[("s3.endpoint_url", &endpoint), ("s3.anonymous", "true")]);
        let ufs = Ufs::open("s3://data", &given, &conf).unwrap();
        let answers = [
            ufs.check().await.err(),
            ufs.head("key").await.err(),
            ufs.get_bytes("key", "", 0..1).await.err(),
            ufs.list("", ListMode::Recursive).next_page().await.err(),
            ufs.put("key", &Bytes::from_static(b"x"), &Default::default(), Precondition::Anything).await.err(),
        ];
        for answer in answers {
            let error = answer.unwrap();
            assert!(matches!(error, UfsError::NotAllowed { .. }), "{host}: {error}");
            assert!(error.to_string().contains("ufs.endpoints"), "{host}: {error}");
        }
        let asked = listener.accept().map(|(_, from)| from);
        assert!(asked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "{host}");
        assert_eq!(ufs.stats().retries, 0, "{host}");
    }
}

#[tokio::test]
async fn a_store_that_is_listed_by_its_name_is_asked() {
    let bucket = Bucket::start().await;
    bucket.put("key", b"content");
    let endpoint = bucket.s3.endpoint().replace("127.0.0.1", "localhost");
    let mut given = bucket.options();
    given.insert("s3.endpoint_url".to_owned(), endpoint.clone());
    for listed in [endpoint.as_str(), "localhost", "127.0.0.1"] {
        let conf = schema::Ufs { endpoints: vec![listed.to_owned()], ..conf() };
        let ufs = Ufs::open("s3://data", &given, &conf).unwrap();
        assert_eq!(ufs.get_bytes("key", "", 0..7).await.unwrap(), "content", "{listed}");
    }
}
