//! What a cloud has for a process that looks for credentials: instance metadata, the endpoint of a container, STS. And
//! a bucket that takes the credentials which they gave, until these end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use reqsign_core::time::Timestamp;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// A request: `METHOD /path?query`, headers in lower case, body.
#[derive(Clone, Default)]
pub struct Asked {
    pub line: String,
    pub headers: HashMap<String, String>,
    pub body: String,
}

/// Status and body; `None` for no answer at all.
pub type Answer = Option<(u16, String)>;

/// Answers by a function, and keeps what it was asked; it ends when it is dropped.
pub struct Server {
    pub url: String,
    pub asked: Arc<Mutex<Vec<Asked>>>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (answer, log) = (Arc::new(answer), asked.clone());
        let task = tokio::spawn(async move {
            let mut exchanges = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (answer, log) = (answer.clone(), log.clone());
                exchanges.spawn(async move { exchange(socket, &*answer, &log).await.ok() });
            }
        });
        Self { url, asked, task }
    }

    /// How many requests had this in their line or their body.
    pub fn count(&self, text: &str) -> usize {
        let asked = self.asked.lock();
        asked.iter().filter(|asked| asked.line.contains(text) || asked.body.contains(text)).count()
    }
}

async fn exchange(
    mut socket: TcpStream,
    answer: &(impl Fn(&Asked) -> Answer + Send + Sync),
    log: &Mutex<Vec<Asked>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.lines();
    let line = lines.next().unwrap_or_default().trim_end_matches(" HTTP/1.1").to_owned();
    let headers: HashMap<_, _> = lines.filter_map(|line| line.split_once(": ")).collect();
    let headers: HashMap<_, _> = headers.into_iter().map(|(n, v)| (n.to_lowercase(), v.to_owned())).collect();
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap_or(0));
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await?;
    let asked = Asked { line, headers, body: String::from_utf8_lossy(&body).into_owned() };
    log.lock().push(asked.clone());
    match answer(&asked) {
        Some((status, body)) => {
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            socket.write_all(format!("{head}{body}").as_bytes()).await
        }
        None => std::future::pending().await,
    }
}

pub const ACCESS: &str = "HUSHACCESSOFACLOUD";
pub const SECRET: &str = "hush-secret";
pub const POD_TOKEN: &str = "Bearer hush-pod";
pub const IDENTITY: &str = "hush-identity";
pub const EXTERNAL_ID: &str = "hush-external/1";

fn end(life: Duration) -> String {
    (Timestamp::now() + life).format_rfc3339_zulu()
}

fn json(token: &str) -> String {
    let end = end(Duration::from_secs(3600));
    format!(
        "{{\"Code\":\"Success\",\"AccessKeyId\":\"{ACCESS}\",\"SecretAccessKey\":\"{SECRET}\",\"Token\":\"{token}\",\
         \"Expiration\":\"{end}\"}}"
    )
}

/// The answer of STS to an action.
pub fn session(action: &str, (access, secret, token): (&str, &str, &str), life: Duration) -> String {
    let end = end(life);
    format!(
        "<{action}Response xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><{action}Result><Credentials>\
         <AccessKeyId>{access}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey><SessionToken>{token}\
         </SessionToken><Expiration>{end}</Expiration></Credentials></{action}Result></{action}Response>"
    )
}

/// The cloud, well. A bucket of it takes requests whose token begins with `bucket` in its options.
pub fn answer(asked: &Asked) -> Answer {
    let header = |name: &str| asked.headers.get(name).map_or("", String::as_str);
    let ok = |body: String| Some((200, body));
    let refused = |code: &str| Some((403, format!("<Error><Code>{code}</Code></Error>")));
    let imds = "/latest/meta-data/iam/security-credentials/";
    match asked.line.as_str() {
        "PUT /latest/api/token" if !header("x-aws-ec2-metadata-token-ttl-seconds").is_empty() => {
            ok("hush-imds".to_owned())
        }
        line if line.starts_with(&format!("GET {imds}")) && header("x-aws-ec2-metadata-token") != "hush-imds" => {
            Some((401, String::new()))
        }
        line if line == format!("GET {imds}") => ok("node".to_owned()),
        line if line == format!("GET {imds}node") => ok(json("hush-instance")),
        "GET /pod" if header("authorization") == POD_TOKEN => ok(json("hush-container")),
        "POST /" if asked.body.contains("Action=AssumeRoleWithWebIdentity&") => {
            match asked.body.contains(&format!("WebIdentityToken={IDENTITY}")) {
                true => {
                    ok(session("AssumeRoleWithWebIdentity", (ACCESS, SECRET, "hush-web"), Duration::from_secs(900)))
                }
                false => refused("InvalidIdentityToken"),
            }
        }
        "POST /" if asked.body.contains("Action=AssumeRole&") => {
            ok(session("AssumeRole", (ACCESS, SECRET, "hush-role"), Duration::from_secs(900)))
        }
        line if line.starts_with("GET /data?") => {
            let is_signed = header("authorization").contains(&format!("Credential={ACCESS}/"));
            match is_signed && header("x-amz-security-token").starts_with("hush-") {
                true => ok("<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>".to_owned()),
                false => refused("AccessDenied"),
            }
        }
        _ => Some((404, String::new())),
    }
}
