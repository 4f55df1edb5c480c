//! Credentials that a process fetches: of its instance, its container, its web identity, and of a role. What depends on
//! the environment runs in a process of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::collections::HashMap;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_conf::{process, schema};
use cavern_dev_s3::{DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY};
use cavern_ufs::{ListMode, Precondition, Ufs, UfsError};
use support::cloud::{self, ACCESS, Asked, EXTERNAL_ID, IDENTITY, POD_TOKEN, SECRET, Server, session};
use support::{Bucket, conf, options};

const OPTIONS: &str = "CAVERN_TEST_OPTIONS";
const ALLOWED: &str = "CAVERN_TEST_ALLOWED";
const ROLE: &str = "arn:aws:iam::123456789012:role/train";
const SOURCE: &str = "s3.credentials.source";

/// Runs only as a child of the tests below: says on standard output how a check went, and logs all it has to say.
#[tokio::test]
#[ignore = "a child process of other tests"]
async fn child() {
    process::init_logging(&schema::Log { level: "trace".to_owned(), ..schema::Log::default() }).unwrap();
    let given = std::env::var(OPTIONS).unwrap();
    let given: Vec<_> = given.lines().filter_map(|line| line.split_once('=')).collect();
    let conf = schema::Ufs {
        instance_credentials: std::env::var(ALLOWED).is_ok(),
        request_timeout: cavern_conf::Interval::millis(8000),
        retries: 0,
        ..conf()
    };
    let began = Instant::now();
    let ufs = Ufs::open("s3://data", &options(&given), &conf).unwrap();
    tracing::trace!("{ufs:?}");
    let head = ufs.head("key").await.unwrap_err();
    let verdict = match ufs.check().await {
        Ok(_) => "good".to_owned(),
        Err(error) => {
            // Attributes are asked for in another way, and end in the same.
            assert_eq!(head.kind(), error.kind(), "{head}");
            tracing::trace!("{error:?}");
            format!("{}, {error}", error.kind())
        }
    };
    println!("\nverdict: {verdict}, after {}s", began.elapsed().as_secs());
}

/// What a child says, in whose log there are no secrets.
async fn verdict(given: &[(&str, &str)], environment: &[(&str, &str)], is_allowed: bool) -> String {
    let given: Vec<_> = given.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["child", "--exact", "--ignored", "--nocapture"]).env_clear();
    child.env(OPTIONS, given.join("\n")).envs(environment.iter().copied());
    if is_allowed {
        child.env(ALLOWED, "1");
    }
    let output = tokio::task::spawn_blocking(move || child.output().unwrap()).await.unwrap();
    let [said, log] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(log.contains("TRACE"), "{log}");
    for text in [&said, &log] {
        assert!(!text.to_lowercase().contains("hush"), "{text}");
    }
    said.lines().find_map(|line| line.strip_prefix("verdict: ")).unwrap_or(&log).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_source_gives_credentials_that_the_bucket_takes() {
    let server = Server::start(cloud::answer).await;
    let url = server.url.as_str();
    let home = tempfile::tempdir().unwrap();
    let [token, pod] = ["token", "pod"].map(|name| home.path().join(name).to_str().unwrap().to_owned());
    std::fs::write(&token, format!("{IDENTITY}\n")).unwrap();
    std::fs::write(&pod, POD_TOKEN).unwrap();
    let full = format!("{url}/pod");
    let web = [("AWS_WEB_IDENTITY_TOKEN_FILE", token.as_str()), ("AWS_ROLE_ARN", ROLE), ("AWS_ENDPOINT_URL_STS", url)];
    let container =
        [("AWS_CONTAINER_CREDENTIALS_FULL_URI", full.as_str()), ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &pod)];
    let instance = [("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)];
    for (source, environment, session) in [
        ("instance", &instance[..], "hush-instance"),
        ("container", &container, "hush-container"),
        ("web_identity", &web, "hush-web"),
        ("environment", &web, "hush-web"),
        ("default", &web, "hush-web"),
        ("default", &container, "hush-container"),
        ("default", &instance, "hush-instance"),
    ] {
        server.asked.lock().clear();
        let given = [("s3.endpoint_url", url), (SOURCE, source)];
        let verdict = verdict(&given, environment, true).await;
        assert!(verdict.starts_with("good"), "{source}: {verdict}");
        let asked = server.asked.lock();
        let last = asked.iter().rfind(|asked| asked.line.contains("/data?")).unwrap();
        assert_eq!(last.headers["x-amz-security-token"], session, "{source}");
        // A HEAD and a LIST, by two signers, with one set of credentials.
        let fetched = asked.iter().filter(|asked| !asked.line.contains("/data")).count();
        assert_eq!(fetched, if session == "hush-instance" { 3 } else { 1 }, "{source}");
    }
    // A role is taken on with what another source gives.
    let given = [("s3.endpoint_url", url), (SOURCE, "instance"), ("s3.credentials.role", ROLE)];
    let environment = [instance[0], ("AWS_ENDPOINT_URL_STS", url)];
    let verdict = verdict(&given, &environment, true).await;
    assert!(verdict.starts_with("good"), "{verdict}");
    let asked = server.asked.lock();
    let assumed = asked.iter().rfind(|asked| asked.line == "POST /").unwrap();
    assert_eq!(assumed.headers["x-amz-security-token"], "hush-instance");
}

/// The file of the token of a sign-on to `company`: the SHA-1 of that.
const SIGN_ON: &str = "71b21161ffa1e6516bcc072aaf5ef38cbe85b511.json";

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_has_keys_or_says_who_gives_some() {
    let server = Server::start(|asked: &Asked| {
        let is_signed_on = asked.headers.get("x-amz-sso_bearer_token").is_some_and(|token| token == "hush-token");
        if !asked.line.starts_with("GET /sso?") || !asked.line.contains("role_name=Reader") || !is_signed_on {
            return cloud::answer(asked);
        }
        let keys = format!("\"accessKeyId\":\"{ACCESS}\",\"secretAccessKey\":\"{SECRET}\"");
        let end = "\"expiration\":4102444800000";
        Some((200, format!("{{\"roleCredentials\":{{{keys},\"sessionToken\":\"hush-sso\",{end}}}}}")))
    });
    let server = server.await;
    let url = server.url.as_str();
    let home = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = home.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let said = |version: u32| {
        let keys = format!("\"AccessKeyId\":\"{ACCESS}\",\"SecretAccessKey\":\"{SECRET}\"");
        format!(
            "{{\"Version\":{version},{keys},\"SessionToken\":\"hush-program\",\"Expiration\":\"2099-01-01T00:00:00Z\"}}"
        )
    };
    write("said", said(1));
    write("of-later", said(2));
    let keys = format!("aws_access_key_id = {ACCESS}\naws_secret_access_key = {SECRET}\n");
    write(".aws/credentials", format!("[keys]\n{keys}aws_session_token = hush-keys\n"));
    let role = format!("role_arn = {ROLE}\nsource_profile =");
    write(
        ".aws/config",
        format!(
            "[profile role]\nexternal_id = {EXTERNAL_ID}\n{role} first\n[profile first]\n{role} keys\n\
             [profile own]\n{role} own\n{keys}[profile ring]\n{role} rest\n[profile rest]\n{role} ring\n\
             [profile program]\ncredential_process = cat \"$HOME/said\"\n\
             [profile later]\ncredential_process = cat \"$HOME/of-later\"\n\
             [profile failing]\ncredential_process = echo hush; exit 3\n\
             [profile code]\nmfa_serial = x\n{role} keys\n\
             [profile reader]\nsso_session = company\nsso_account_id = 1\nsso_role_name = Reader\n\
             [profile stranger]\nsso_start_url = https://other\nsso_account_id = 1\nsso_role_name = Reader\n\
             sso_region = eu-west-1\n[sso-session company]\nsso_region = eu-west-1\n"
        ),
    );
    let token = "{\"accessToken\":\"hush-token\",\"expiresAt\":\"2099-01-01T00:00:00Z\"}";
    write(&format!(".aws/sso/cache/{SIGN_ON}"), token.to_owned());
    let (sso, home) = (format!("{url}/sso"), home.path().to_str().unwrap());
    let environment = [("HOME", home), ("AWS_ENDPOINT_URL_STS", url), ("AWS_SSO_ENDPOINT", sso.as_str())];
    for (profile, expected) in [
        ("keys", "hush-keys"),
        ("role", "hush-role"),
        ("own", "hush-role"),
        ("program", "hush-program"),
        ("reader", "hush-sso"),
    ] {
        let named = [("s3.endpoint_url", url), ("s3.credentials.profile", profile)];
        let of_variable = [&environment[..], &[("AWS_PROFILE", profile)]].concat();
        for (given, environment) in
            [(named, &environment[..]), ([named[0], (SOURCE, "default")], of_variable.as_slice())]
        {
            server.asked.lock().clear();
            let verdict = verdict(&given, environment, false).await;
            assert!(verdict.starts_with("good"), "{profile}: {verdict}");
            let asked = server.asked.lock();
            let last = asked.iter().rfind(|asked| asked.line.contains("/data?")).unwrap();
            assert_eq!(last.headers["x-amz-security-token"], expected, "{profile}");
            if profile == "role" {
                // One role with the credentials of the other.
                let assumed: Vec<_> = asked.iter().filter(|asked| asked.line == "POST /").collect();
                let tokens: Vec<_> = assumed.iter().map(|asked| &asked.headers["x-amz-security-token"]).collect();
                assert_eq!(tokens, ["hush-keys", "hush-role"]);
                assert!(!assumed[0].body.contains("ExternalId") && assumed[1].body.contains("ExternalId"));
            }
        }
    }
    for (profile, part) in [
        ("none", "\"none\""),
        ("ring", "lead to each other"),
        ("code", "one-time code"),
        ("failing", "exit status: 3"),
        ("later", "no credentials that can be used"),
        ("stranger", "aws sso login"),
    ] {
        let given = [("s3.endpoint_url", url), ("s3.credentials.profile", profile)];
        let verdict = verdict(&given, &environment, false).await;
        assert!(verdict.starts_with("denied") && verdict.contains(part), "{profile}: {verdict}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_of_a_host_are_for_no_mount_unless_its_configuration_says_so() {
    let server = Server::start(cloud::answer).await;
    let url = server.url.as_str();
    let environment =
        [("AWS_EC2_METADATA_SERVICE_ENDPOINT", url), ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &format!("{url}/pod"))];
    for source in ["default", "instance", "container"] {
        for role in [None, Some(("s3.credentials.role", ROLE))] {
            let mut given = vec![("s3.endpoint_url", url), (SOURCE, source)];
            given.extend(role.into_iter().chain(role.map(|_| ("s3.sts_endpoint_url", url))));
            let verdict = verdict(&given, &environment, false).await;
            assert!(verdict.starts_with("not_allowed"), "{verdict}");
            assert!(verdict.contains("ufs.instance_credentials = true") && verdict.contains(source), "{verdict}");
        }
    }
    // Without a source they are never looked for.
    let verdict = verdict(&[("s3.endpoint_url", url)], &environment, true).await;
    assert!(verdict.starts_with("denied") && verdict.contains("no usable credentials"), "{verdict}");
    assert_eq!(server.asked.lock().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_goes_only_where_the_environment_says() {
    let (sts, other) = (Server::start(cloud::answer).await, Server::start(cloud::answer).await);
    let home = tempfile::tempdir().unwrap();
    let token = home.path().join("token");
    std::fs::write(&token, IDENTITY).unwrap();
    let environment = [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", token.to_str().unwrap()),
        ("AWS_ROLE_ARN", ROLE),
        ("AWS_ENDPOINT_URL_STS", &sts.url),
    ];
    let given = [
        ("s3.endpoint_url", other.url.as_str()),
        (SOURCE, "web_identity"),
        ("s3.credentials.role", ROLE),
        ("s3.sts_endpoint_url", &other.url),
    ];
    let said = verdict(&given, &environment, false).await;
    assert!(said.starts_with("good"), "{said}");
    assert_eq!((sts.count("WebIdentityToken"), other.count("WebIdentityToken")), (1, 0));
    assert_eq!((sts.count("Action=AssumeRole&"), other.count("Action=AssumeRole&")), (0, 1));
    // Nor does the one of a container go over the network in clear.
    let environment = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://credentials.example/pod"),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN", POD_TOKEN),
    ];
    let said = verdict(&[("s3.endpoint_url", &other.url), (SOURCE, "container")], &environment, true).await;
    assert!(said.starts_with("denied") && said.contains("over https only"), "{said}");
}

/// A source, its environment, and what is said.
type Case = (&'static str, Vec<(&'static str, String)>, Vec<&'static str>);

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_answer_or_answers_wrongly_is_named_within_seconds() {
    let silent = Server::start(|_| None).await;
    let instance = |url: &str| vec![("AWS_EC2_METADATA_SERVICE_ENDPOINT", url.to_owned())];
    let container = |url: &str| vec![("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{url}/pod"))];
    let secret = format!("{{\"AccessKeyId\": \"{SECRET}\"");
    let documents = ["", "<html>", "{}", &secret, "{\"Code\":\"Failed\",\"Message\":\"hush\"}"];
    let mut cases: Vec<Case> = vec![
        ("instance", instance(&silent.url), vec!["unavailable", "instance metadata", "has not answered for 3s"]),
        ("container", container(&silent.url), vec!["unavailable", "credentials endpoint", "has not answered for 3s"]),
        ("instance", instance("http://127.0.0.1:1"), vec!["unavailable", "instance metadata", "cannot connect"]),
        (
            "instance",
            vec![("AWS_EC2_METADATA_DISABLED", "true".to_owned())],
            vec!["denied", "AWS_EC2_METADATA_DISABLED"],
        ),
        ("container", vec![], vec!["denied", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]),
        ("default", instance("http://127.0.0.1:1"), vec!["no usable credentials in the environment", "instance"]),
        ("web_identity", vec![], vec!["denied", "AWS_WEB_IDENTITY_TOKEN_FILE"]),
    ];
    let mut servers = Vec::new();
    for document in documents {
        let document = document.to_owned();
        let server = Server::start(move |asked| {
            let is_secret = asked.line.ends_with("/node") || asked.line.ends_with("/pod");
            if is_secret { Some((200, document.clone())) } else { cloud::answer(asked) }
        });
        servers.push(server.await);
    }
    for server in &servers {
        cases.push(("instance", instance(&server.url), vec!["denied", "no credentials that can be used"]));
        cases.push(("container", container(&server.url), vec!["denied", "no credentials that can be used"]));
    }
    let down = Server::start(|_| Some((503, "hush".to_owned()))).await;
    cases.push(("instance", instance(&down.url), vec!["unavailable", "answers 503"]));
    let without = Server::start(|_| Some((404, "hush".to_owned()))).await;
    cases.push(("container", container(&without.url), vec!["denied", "answers 404"]));
    for (source, environment, parts) in cases {
        let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let said = verdict(&[("s3.endpoint_url", &down.url), (SOURCE, source)], &environment, true).await;
        assert!(parts.iter().all(|part| said.contains(part)), "{source} {environment:?}: {said}");
        let seconds: u64 = said.rsplit_once("after ").unwrap().1.trim_end_matches('s').parse().unwrap();
        assert!(seconds < 9, "{source}: {said}");
    }
}

fn of_role(endpoint: &str, sts: &str) -> HashMap<String, String> {
    options(&[
        ("s3.endpoint_url", endpoint),
        ("s3.credentials.access", "HUSHBASEACCESS"),
        ("s3.credentials.secret", "hush-base"),
        ("s3.credentials.session_token", "hush-base-token"),
        ("s3.credentials.role", ROLE),
        ("s3.credentials.external_id", EXTERNAL_ID),
        ("s3.credentials.role_session", "night=1"),
        ("s3.sts_endpoint_url", sts),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_is_taken_on_with_its_external_id_and_signs_all_requests() {
    let bucket = Bucket::start().await;
    bucket.put("key", b"content");
    let keys = (DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY, "token+/=");
    let sts = Server::start(move |_| Some((200, session("AssumeRole", keys, Duration::from_secs(3600))))).await;
    let given = of_role(&bucket.s3.endpoint(), &sts.url);
    let ufs = Ufs::open("s3://data", &given, &conf()).unwrap();
    assert_eq!(ufs.head("key").await.unwrap().size, 7);
    assert_eq!(ufs.get_bytes("key", "", 0..7).await.unwrap(), "content");
    assert_eq!(support::keys(&ufs, "", ListMode::Recursive).await, ["key"]);
    ufs.put("other", &Bytes::from_static(b"x"), &Default::default(), Precondition::Anything).await.unwrap();
    // Another handle of the same mount uses what is there.
    let again = Ufs::open("s3://data", &given, &conf()).unwrap();
    again.check().await.unwrap();
    let asked = sts.asked.lock().clone();
    assert_eq!(asked.len(), 1);
    let Asked { line, headers, body } = &asked[0];
    assert_eq!(line, "POST /");
    let role = ROLE.replace(':', "%3A").replace('/', "%2F");
    assert_eq!(
        *body,
        format!(
            "Version=2011-06-15&Action=AssumeRole&RoleArn={role}&RoleSessionName=night%3D1&\
             ExternalId=hush-external%2F1"
        )
    );
    let authorization = &headers["authorization"];
    for part in ["Credential=HUSHBASEACCESS/", "/us-east-1/sts/aws4_request", "host;x-amz-content-sha256;x-amz-date"] {
        assert!(authorization.contains(part), "{authorization}");
    }
    assert_eq!(headers["x-amz-security-token"], "hush-base-token");
    assert_eq!(headers["x-amz-content-sha256"], reqsign_core::hash::hex_sha256(body.as_bytes()));
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn renewals_under_load_are_few_and_no_request_fails() {
    const LIFE: Duration = Duration::from_secs(6);
    // The ends of sessions are whole seconds: each is over a second later at the most.
    let begun = Instant::now();
    let (sessions, at_once, most) =
        (AtomicUsize::new(0), AtomicUsize::new(0), std::sync::Arc::new(AtomicUsize::new(0)));
    let most_at_once = most.clone();
    let sts = Server::start(move |_| {
        most_at_once.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(200));
        at_once.fetch_sub(1, Ordering::SeqCst);
        let number = sessions.fetch_add(1, Ordering::SeqCst);
        // It has a bad moment.
        if number == 2 {
            return Some((503, String::new()));
        }
        let end = begun.elapsed() + LIFE;
        let token = format!("until-{}", end.as_millis());
        Some((200, session("AssumeRole", (ACCESS, SECRET, &token), LIFE)))
    })
    .await;
    let bucket = Server::start(move |asked| {
        let token = asked.headers.get("x-amz-security-token").map_or("", String::as_str);
        let until = token.strip_prefix("until-").and_then(|until| until.parse().ok()).unwrap_or(0);
        match begun.elapsed().as_millis() < until {
            true => Some((200, "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>".to_owned())),
            false => Some((400, "<Error><Code>ExpiredToken</Code></Error>".to_owned())),
        }
    })
    .await;
    let conf = schema::Ufs { retries: 0, request_timeout: cavern_conf::Interval::millis(5000), ..conf() };
    let ufs = Ufs::open("s3://data", &of_role(&bucket.url, &sts.url), &conf).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut load = tokio::task::JoinSet::new();
    let asked = sts.asked.clone();
    for _ in 0..32 {
        let (ufs, asked) = (ufs.clone(), asked.clone());
        load.spawn(async move {
            let mut requests = 0;
            while asked.lock().len() < 4 {
                assert!(Instant::now() < deadline, "sessions are not renewed");
                ufs.check().await?;
                requests += 1;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Ok::<usize, UfsError>(requests)
        });
    }
    let mut requests = 0;
    while let Some(answer) = load.join_next().await {
        requests += answer.unwrap().unwrap();
    }
    assert!(requests > 500, "{requests}");
    // One that fails comes between two renewals, each in the middle of a life.
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!((sts.count("AssumeRole"), most.load(Ordering::SeqCst)), (4, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_end_before_their_time_are_replaced_and_no_request_fails() {
    let sessions = AtomicUsize::new(0);
    let sts = Server::start(move |_| {
        let token = format!("session-{}", sessions.fetch_add(1, Ordering::SeqCst));
        Some((200, session("AssumeRole", (ACCESS, SECRET, &token), Duration::from_secs(3600))))
    })
    .await;
    let valid = std::sync::Arc::new(AtomicUsize::new(0));
    let now_valid = valid.clone();
    let bucket = Server::start(move |asked| {
        let token = asked.headers.get("x-amz-security-token").map_or("", String::as_str);
        match token == format!("session-{}", now_valid.load(Ordering::SeqCst)) {
            true => Some((200, "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>".to_owned())),
            false => Some((400, "<Error><Code>ExpiredToken</Code></Error>".to_owned())),
        }
    })
    .await;
    // As it is by default: what signs requests asks once in a second.
    let (first, longest) = (cavern_conf::Interval::millis(200), cavern_conf::Interval::millis(1000));
    let conf = schema::Ufs { retries: 5, retry_backoff: first, retry_backoff_max: longest, ..conf() };
    let ufs = Ufs::open("s3://data", &of_role(&bucket.url, &sts.url), &conf).unwrap();
    ufs.check().await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    valid.store(1, Ordering::SeqCst);
    for checked in futures::future::join_all((0..8).map(|_| ufs.check())).await {
        checked.unwrap();
    }
    assert_eq!(sts.count("AssumeRole"), 2);
    // New ones are no better: that is said, with who gave them.
    valid.store(9, Ordering::SeqCst);
    let error = loop {
        match ufs.check().await {
            Err(error @ UfsError::Denied { .. }) => break error.to_string(),
            Err(error @ UfsError::Unavailable { .. }) => assert!(error.to_string().contains("are fetched"), "{error}"),
            other => panic!("{other:?}"),
        }
    };
    let named = format!("check what STS at {}, asked for {ROLE}, gives", sts.url);
    assert!(error.contains("ExpiredToken") && error.contains(&named), "{error}");
    assert!((2..=4).contains(&sts.count("AssumeRole")), "{}", sts.count("AssumeRole"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sts_that_refuses_hangs_or_may_not_be_asked_is_named() {
    let refusing = Server::start(|_| {
        let message =
            format!("User: x is not authorized to perform: sts:AssumeRole with {EXTERNAL_ID} hush-base-token");
        let error = format!("<Error><Code>AccessDenied</Code><Message>{message}</Message></Error>");
        Some((403, format!("<ErrorResponse>{error}</ErrorResponse>")))
    });
    let (refusing, silent) = (refusing.await, Server::start(|_| None).await);
    let senseless = Server::start(|_| Some((200, format!("<AssumeRoleResponse>{SECRET}</AssumeRoleResponse>")))).await;
    let ended = Server::start(|_| Some((200, session("AssumeRole", (ACCESS, SECRET, "hush"), Duration::ZERO)))).await;
    let conf = schema::Ufs { endpoints: vec![refusing.url.clone(), silent.url.clone()], retries: 0, ..conf() };
    let listed = schema::Ufs { endpoints: vec!["127.0.0.1".to_owned()], ..conf.clone() };
    let waits_briefly = schema::Ufs { request_timeout: cavern_conf::Interval::millis(500), ..conf.clone() };
    for (conf, sts, kind, parts) in [
        (&conf, refusing.url.as_str(), "denied", [ROLE, "403 Forbidden: AccessDenied: User: x is not authorized"]),
        (&waits_briefly, &silent.url, "unavailable", [ROLE, "has not answered for 400ms"]),
        (&listed, &senseless.url, "denied", [ROLE, "no credentials that can be used"]),
        (&listed, &ended.url, "denied", [ROLE, "ended already"]),
        (&conf, &senseless.url, "not_allowed", ["s3.sts_endpoint_url", "ufs.endpoints"]),
        (&conf, "http://169.254.169.254", "not_allowed", ["s3.sts_endpoint_url", "link-local"]),
    ] {
        let ufs = Ufs::open("s3://data", &of_role(&refusing.url, sts), conf).unwrap();
        // At the same time: after a pause, whoever comes later asks again.
        let (checked, there) = tokio::join!(ufs.check(), ufs.head("key"));
        for error in [checked.unwrap_err(), there.unwrap_err()] {
            let (shown, debug) = (error.to_string(), format!("{error:?}"));
            assert_eq!(error.kind(), kind, "{shown}");
            assert!(parts.iter().all(|part| shown.contains(part)), "{sts}: {shown}");
            assert!(!shown.to_lowercase().contains("hush") && !debug.to_lowercase().contains("hush"), "{debug}");
        }
    }
    assert_eq!(senseless.asked.lock().len(), 1);
    // Outside of AWS somebody has to say where it is.
    let mut given = of_role(&refusing.url, "");
    let error = Ufs::open("s3://data", &given, &conf).unwrap_err().to_string();
    assert!(error.contains("s3.sts_endpoint_url") && error.contains("AWS_ENDPOINT_URL_STS"), "{error}");
    given.remove("s3.endpoint_url");
    Ufs::open("s3://data", &given, &conf).unwrap();
}
