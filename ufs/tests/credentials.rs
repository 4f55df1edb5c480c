//! Where credentials come from when the options hold none. Each case runs in a process of its own, with its own
//! environment.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::process::Command;

use cavern_ufs::{Ufs, UfsError};
use support::{Bucket, conf, options};

const ENDPOINT: &str = "CAVERN_TEST_ENDPOINT";
const PROFILE: &str = "CAVERN_TEST_PROFILE";

/// Runs only as a child of the test below: says on standard output how a check went.
#[tokio::test]
#[ignore = "a child process of the_environment_is_searched"]
async fn child() {
    let endpoint = std::env::var(ENDPOINT).unwrap();
    let mut given = options(&[("s3.endpoint_url", &endpoint)]);
    if let Ok(profile) = std::env::var(PROFILE) {
        given.insert("s3.credentials.profile".to_owned(), profile);
    }
    let ufs = Ufs::open("s3://data", &given, &conf()).unwrap();
    match ufs.check().await {
        Ok(_) => println!("\nverdict: good"),
        Err(error @ UfsError::Denied { .. }) => println!("\nverdict: denied, {error}"),
        Err(error) => println!("\nverdict: {error:?}"),
    }
}

fn verdict(endpoint: &str, home: &std::path::Path, environment: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["child", "--exact", "--ignored", "--nocapture"]).env_clear();
    child.env("HOME", home).env(ENDPOINT, endpoint).envs(environment.iter().copied());
    let output = child.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("verdict: ")).unwrap_or(&text).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_is_searched() {
    let bucket = Bucket::start().await;
    let endpoint = bucket.s3.endpoint();
    let home = tempfile::tempdir().unwrap();
    let path = home.path().to_owned();
    let runs = tokio::task::spawn_blocking(move || {
        let run = |environment: &[(&str, &str)]| verdict(&endpoint, &path, environment);
        let none = run(&[]);
        let pair = [("AWS_ACCESS_KEY_ID", "cavern"), ("AWS_SECRET_ACCESS_KEY", "cavern-secret")];
        let from_environment = run(&pair);
        let file = path.join("keys");
        let key = "aws_access_key_id = cavern\naws_secret_access_key";
        std::fs::write(&file, format!("[default]\n{key} = wrong\n[right]\n{key} = cavern-secret\n")).unwrap();
        let shared = ("AWS_SHARED_CREDENTIALS_FILE", file.to_str().unwrap());
        let of_default = run(&[shared]);
        let of_variable = run(&[shared, ("AWS_PROFILE", "right")]);
        // The option wins over the environment.
        let of_option = run(&[shared, ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), (PROFILE, "right")]);
        [none, from_environment, of_default, of_variable, of_option]
    });
    let [none, from_environment, of_default, of_variable, of_option] = runs.await.unwrap();
    assert!(none.starts_with("denied") && none.contains("no usable credentials"), "{none}");
    assert_eq!(from_environment, "good");
    assert!(of_default.starts_with("denied") && of_default.contains("SignatureDoesNotMatch"), "{of_default}");
    assert_eq!(of_variable, "good");
    assert_eq!(of_option, "good");
    bucket.s3.stop().await;
}
