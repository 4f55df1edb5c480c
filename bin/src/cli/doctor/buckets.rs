//! Buckets, asked from this host: each finding has the store's own answer.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, counted, host, schema};
use cavern_net::master::Stubs;
use cavern_net::{MasterChannel, key_lender};
use cavern_proto::master::{ListMountsRequest, Mount, MountStatus};
use cavern_ufs::{Contents, Denial, KeyRight, Metadata, Precondition, Probe, Ufs, UfsError};
use futures::future::join_all;

use super::clocks::judge_store;
use super::finding::{Check, Finding, Level};
use super::look::in_time;
use crate::error::CliError;

/// Mounts that are looked at, all at once; and for how long each.
const MOUNTS_MAX: usize = 64;
const BUCKET_PATIENCE: Duration = Duration::from_secs(20);
/// What an object of a test is called, below the prefix.
const OBJECT: &str = ".cavern-doctor-";

/// What becomes of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    /// One is put and deleted.
    Write,
}

/// What a store answers; `None` for what was not asked.
struct Answers {
    list: Result<Probe, UfsError>,
    get: Option<Result<(), UfsError>>,
    put: Option<Result<(), UfsError>>,
}

/// Asks a bucket that need not be mounted anywhere.
pub async fn look(uri: &str, options: &HashMap<String, String>, config: &Config, access: Access) -> Vec<Finding> {
    look_at(uri, Ufs::open(uri, options, &patient_once(config)), access).await
}

/// Asks the buckets of all mounts, as far as the masters give their credentials to this command, and says what the
/// workers say of them.
pub async fn look_at_mounts(config: &Config, access: Access) -> Vec<Finding> {
    // Masters that cannot be reached are told of elsewhere.
    let Ok(masters) = MasterChannel::connect(config).await else { return Vec::new() };
    let list = async |mut master: Stubs| master.cluster.list_mounts(ListMountsRequest {}).await;
    let Ok(table) = masters.ask_unary(list).await else { return Vec::new() };
    let mut found: Vec<Finding> = table.mounts.iter().flat_map(|mount| judge_status(mount, &table.status)).collect();
    let credentials = async |mut master: Stubs| master.cluster.get_credentials(ListMountsRequest {}).await;
    let mounts = match masters.ask_unary(credentials).await {
        Ok(table) => table.mounts,
        Err(error) => {
            found.extend((!table.mounts.is_empty()).then(|| withheld(&CliError::from(error).to_string())));
            Vec::new()
        }
    };
    let conf = patient_once(config);
    let looks = mounts.iter().take(MOUNTS_MAX).map(|mount| look_at_mount(mount, &masters, &conf, access));
    found.extend(join_all(looks).await.into_iter().flatten());
    if mounts.len() > MOUNTS_MAX {
        let what = format!("{} were not asked", counted((mounts.len() - MOUNTS_MAX) as u64, "bucket"));
        found.push(Finding::note(Check::BucketList, what, "there are many mounts", "name one with --bucket"));
    }
    found
}

/// As findings have it.
fn name(mount: &Mount) -> String {
    format!("{} at {}", mount.uri, mount.path)
}

async fn look_at_mount(mount: &Mount, masters: &MasterChannel, conf: &schema::Ufs, access: Access) -> Vec<Finding> {
    let (name, access) = (name(mount), access_to(mount, access));
    let right = if access == Access::Write { KeyRight::Write } else { KeyRight::Read };
    let lender = key_lender(masters, mount.id, &mount.path, right);
    let opened = Ufs::open_vended(&mount.uri, &mount.options, conf, &lender);
    let looked = in_time(&name, BUCKET_PATIENCE, look_at(&name, opened, access)).await;
    looked.unwrap_or_else(|late| vec![late])
}

async fn look_at(name: &str, opened: Result<Ufs, UfsError>, access: Access) -> Vec<Finding> {
    match opened {
        // On the heap: requests are large.
        Ok(ufs) => judge(name, &Box::pin(ask(&ufs, access)).await),
        Err(error) => vec![refused(Check::BucketList, name, &error)],
    }
}

/// A bucket that is only read is not written to.
fn access_to(mount: &Mount, access: Access) -> Access {
    if mount.is_written() { access } else { Access::Read }
}

/// As a process asks, but once: whoever waits wants to know.
fn patient_once(config: &Config) -> schema::Ufs {
    schema::Ufs { retries: 0, ..config.ufs.clone() }
}

async fn ask(ufs: &Ufs, access: Access) -> Answers {
    let mut answers = Answers { list: ufs.check().await, get: None, put: None };
    // Whoever does not answer is not asked again.
    if answers.list.as_ref().is_err_and(UfsError::is_outage) {
        return answers;
    }
    let first = answers.list.as_ref().ok().and_then(|probe| probe.first.as_ref()).filter(|first| first.size > 0);
    if let Some(first) = first {
        answers.get = Some(ufs.get_bytes(&first.key, &first.etag, 0..1).await.map(drop));
    }
    if access == Access::Write {
        let key = format!("{}{OBJECT}{}", ufs.prefix(), host::unique_name());
        let body = Bytes::from_static(b"written by cv doctor, and to be deleted\n");
        let put = ufs.put(&key, &body, &Metadata::new(), Precondition::Anything).await;
        // Also where nobody knows whether it is there.
        let deleted = ufs.delete(&key, Precondition::Anything).await;
        answers.put = Some(put.and(deleted));
    }
    answers
}

/// What the answers of a store come to.
fn judge(name: &str, answers: &Answers) -> Vec<Finding> {
    let mut found = Vec::new();
    match &answers.list {
        Ok(probe) => {
            found.push(Finding::ok(Check::BucketList, format!("{name} can be listed")));
            found.extend(probe.behind_s.map(|behind_s| judge_store(name, behind_s)));
            if probe.contents == Contents::Nothing {
                let todo = "see that bucket and prefix are spelled right, if there should be objects";
                let what = format!("nothing is in {name}");
                found.push(Finding::note(Check::BucketList, what, "no object could be read for a test", todo));
            }
        }
        Err(error) => found.push(refused(Check::BucketList, name, error)),
    }
    let [get, put] =
        [format!("an object of {name} can be read"), format!("an object was put into {name}, and deleted")];
    for (check, answer, done) in [(Check::BucketGet, &answers.get, get), (Check::BucketPut, &answers.put, put)] {
        match answer {
            Some(Ok(())) => found.push(Finding::ok(check, done)),
            // It was deleted or replaced since it was listed.
            Some(Err(error)) if check == Check::BucketGet && error.is_metadata_outdated() => {}
            Some(Err(error)) => found.push(refused(check, name, error)),
            None => {}
        }
    }
    found
}

/// The store's answer, or that there was none.
fn refused(check: Check, name: &str, error: &UfsError) -> Finding {
    let why = match check {
        Check::BucketPut => "what is written to the mount does not come to the bucket",
        _ => "files that are not cached cannot be read",
    };
    let is_denied = |wanted| matches!(error, UfsError::Denied { denial, .. } if *denial == wanted);
    let check = if is_denied(Denial::Clock) { Check::ClockStore } else { check };
    // One archived object says nothing of the others.
    let level = if is_denied(Denial::Archived) { Level::Warning } else { Level::Error };
    let todo = match error {
        UfsError::Denied { denial: Denial::Clock, .. } => "set the clock of this host by NTP",
        UfsError::Denied { denial: Denial::Archived, .. } => "restore archived objects before they are read",
        UfsError::Denied { .. } => "`cv mount update PATH -c …` changes credentials and region; see the owner's policy",
        UfsError::NoBucket { .. } => "correct the name, or the option of the endpoint",
        UfsError::NotAllowed { .. } => "allow it in [ufs] on all hosts, or mount another",
        UfsError::Invalid { .. } => "correct the option that is named",
        error if error.is_outage() => "try the endpoint from this host with curl: network, proxy, name, TLS",
        _ => "see what the store's log says of the request",
    };
    Finding::new(level, check, format!("{name}: {error}"), why, todo)
}

/// What the leader and the workers say of a mount.
fn judge_status(mount: &Mount, all: &[MountStatus]) -> Vec<Finding> {
    let Some(status) = all.iter().find(|status| status.mount_id == mount.id) else { return Vec::new() };
    let (name, mut found) = (name(mount), Vec::new());
    if !status.last_error.is_empty() {
        let what = format!("{name}: the master says: {}", status.last_error);
        let why = "listings of the bucket, or what it is to be given, are late";
        found.push(Finding::error(Check::BucketMembers, what, why, "see `cv mount`, and the log of the masters"));
    }
    if status.failing_workers > 0 {
        let first = status.fetch_failures.first().map(|failure| failure.message.as_str()).unwrap_or_default();
        let workers = counted(status.failing_workers, "worker");
        let what = format!("{name}: {workers} cannot fetch: {first}");
        let why = "clients read past them, from the bucket, and nothing of it is cached there";
        let todo = "see name resolution, routes and credentials of those hosts: run `cv doctor` there";
        found.push(Finding::error(Check::BucketMembers, what, why, todo));
    }
    found
}

fn withheld(cause: &str) -> Finding {
    Finding::note(
        Check::BucketList,
        format!("the buckets of mounts were not asked from here: {cause}"),
        "masters give credentials to workers and clients only",
        "run this with the certificate of the client of this host, or name a bucket with --bucket",
    )
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{AccessMode, FetchFailure};

    use super::*;
    use crate::cli::doctor::finding::wrong;

    fn conf() -> Config {
        Config::default()
    }

    #[tokio::test]
    async fn a_bucket_is_listed_read_and_written_to_and_left_as_it_was() {
        let ufs = Ufs::open("memory://doctor/p", &HashMap::new(), &conf().ufs).unwrap();
        let told = async |access| look_at("b", Ok(ufs.clone()), access).await;
        let empty = told(Access::Write).await;
        assert_eq!(wrong(&empty), [(Level::Note, Check::BucketList)], "nothing is there");
        let checks = |found: &[Finding]| found.iter().map(|finding| finding.check).collect::<Vec<_>>();
        ufs.put("p/object", &Bytes::from_static(b"x"), &Metadata::new(), Precondition::Anything).await.unwrap();
        let read = told(Access::Read).await;
        assert_eq!((wrong(&read), checks(&read)), (vec![], vec![Check::BucketList, Check::BucketGet]));
        let written = told(Access::Write).await;
        assert_eq!(checks(&written), [Check::BucketList, Check::BucketGet, Check::BucketPut]);
        let first = ufs.check().await.unwrap().first.unwrap();
        assert_eq!(first.key, "p/object", "nothing is left");
    }

    #[tokio::test]
    async fn what_a_bucket_refuses_is_named() {
        let denied = |denial| UfsError::NotAllowed { what: String::new(), reason: denial, remedy: String::new() };
        let answers = Answers {
            list: Err(denied("list".to_owned())),
            get: Some(Err(denied("get".to_owned()))),
            put: Some(Err(denied("put".to_owned()))),
        };
        let found = judge("s3://b", &answers);
        let checks = [Check::BucketList, Check::BucketGet, Check::BucketPut];
        assert_eq!(wrong(&found), checks.map(|check| (Level::Error, check)));
        assert!(found.iter().zip(["list", "get", "put"]).all(|(finding, part)| finding.what.contains(part)));
        // An endpoint of this host that nobody has allowed, an option that is none, and nobody who answers.
        let options = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let keys = [("s3.credentials.access", "a"), ("s3.credentials.secret", "hush")];
        let here = [&keys[..], &[("s3.endpoint_url", "http://127.0.0.1:1")]].concat();
        let mut allowed = conf();
        allowed.ufs.endpoints = vec!["127.0.0.1".to_owned()];
        for (config, options, part) in [
            (conf(), options(&here), "ufs.endpoints"),
            (conf(), options(&[("s3.endpoint", "x")]), "s3.endpoint_url"),
            (allowed, options(&here), "unavailable"),
        ] {
            let found = look("s3://b", &options, &config, Access::Read).await;
            assert_eq!(wrong(&found), [(Level::Error, Check::BucketList)], "{part}");
            assert!(found[0].what.contains(part) && !format!("{found:?}").contains("hush"), "{found:?}");
        }
    }

    #[test]
    fn what_the_members_say_of_a_bucket_is_passed_on() {
        let mount = Mount { id: 7, uri: "s3://b".to_owned(), path: "/data".to_owned(), ..Mount::default() };
        let failure = FetchFailure { message: "no route".to_owned(), ..FetchFailure::default() };
        let well = MountStatus { mount_id: 7, ..MountStatus::default() };
        let failing = MountStatus { failing_workers: 2, fetch_failures: vec![failure], ..well.clone() };
        let behind = MountStatus { last_error: "access denied".to_owned(), ..well.clone() };
        assert_eq!(wrong(&judge_status(&mount, &[well])), []);
        for (status, part) in [(failing, "2 workers cannot fetch: no route"), (behind, "access denied")] {
            let found = judge_status(&mount, &[status]);
            assert_eq!(wrong(&found), [(Level::Error, Check::BucketMembers)]);
            assert!(found[0].what.contains(part), "{found:?}");
        }
        assert_eq!(wrong(&[withheld("no")]), [(Level::Note, Check::BucketList)]);
        let written = Mount { access_mode: AccessMode::ReadWrite as i32, ..mount.clone() };
        assert_eq!([&mount, &written].map(|mount| access_to(mount, Access::Write)), [Access::Read, Access::Write]);
    }
}
