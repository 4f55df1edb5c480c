//! Who sees the pages of an HTTP port whose process has certificates: whoever asks as Prometheus does, and by the
//! certificate of an admin.

// Helpers outside of `#[test]` functions count as code to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_conf::process::Metrics;
use cavern_security::{AuditLog, Authority, HttpAccess, HttpServer, Identity, Role, Transport};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

const DAY: Duration = Duration::from_secs(86_400);
const PATIENCE: Duration = Duration::from_secs(30);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A process with a certificate of a role, and its port.
struct Process {
    directory: TempDir,
    authority: Authority,
    address: SocketAddr,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Process {
    async fn start(role: Role, change: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::create(directory.path(), "lab").unwrap();
        let issued = authority.issue(&identity(role), DAY, directory.path(), "process").unwrap();
        let token = directory.path().join("token");
        fs::write(&token, format!("{TOKEN}\n")).unwrap();
        fs::set_permissions(&token, Permissions::from_mode(0o600)).unwrap();
        let mut config = Config::default();
        config.cluster.name = "lab".to_owned();
        config.security.ca = authority.certificate().to_owned();
        (config.security.certificate, config.security.key) = (issued.certificate, issued.key);
        config.security.http_token = token;
        config.security.revoked = authority.revoke(&[], None).unwrap().path;
        change(&mut config);
        let audit = AuditLog::open(directory.path().join("audit").to_str().unwrap()).unwrap();
        let access = HttpAccess::of(&config.security, &Transport::of(&config).unwrap(), &audit).unwrap();
        let server = HttpServer::bind("127.0.0.1:0").await.unwrap();
        let (address, metrics, stop) = (server.local_addr(), Metrics::new("test"), CancellationToken::new());
        let debug = axum::Router::new().route("/debug", axum::routing::get(|| std::future::ready("inside")));
        tokio::spawn(server.serve(access, debug, metrics.clone(), || Ok(()), stop.clone()));
        Self { directory, authority, address, metrics, stop }
    }

    fn certificate(&self, role: Role) -> [PathBuf; 2] {
        let name = role.name();
        let issued = self.authority.issue(&identity(role), DAY, self.directory.path(), name).unwrap();
        [issued.certificate, issued.key]
    }

    /// The whole answer. The name of the server is looked at, as Prometheus does.
    async fn ask(&self, path: &str, header: &str, certificate: Option<&[PathBuf; 2]>) -> String {
        let config = client(self.authority.certificate(), certificate);
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = "cavern".try_into().unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
        answer
    }

    async fn status(&self, path: &str, header: &str, certificate: Option<&[PathBuf; 2]>) -> u16 {
        let answer = self.ask(path, header, certificate).await;
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn refused(&self) -> u64 {
        let text = self.metrics.encode().unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("cavern_http_requests_refused_total "));
        line.unwrap().parse().unwrap()
    }

    fn audit(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.directory.path().join("audit")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn identity(role: Role) -> Identity {
    Identity::new("lab", role, "x").unwrap()
}

fn client(authority: &Path, certificate: Option<&[PathBuf; 2]>) -> ClientConfig {
    let read = |path: &Path| -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_file_iter(path).unwrap().collect::<Result<_, _>>().unwrap()
    };
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(read(authority));
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    match certificate {
        None => builder.with_no_client_auth(),
        Some([certificate, key]) => {
            builder.with_client_auth_cert(read(certificate), PrivateKeyDer::from_pem_file(key).unwrap()).unwrap()
        }
    }
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn pages_take_the_token_or_the_certificate_of_an_admin() {
    // All that have a port, also one whose certificate is that of a client.
    for role in [Role::Master, Role::Worker, Role::Client] {
        let process = Process::start(role, |_| {}).await;
        let (right, wrong) = (bearer(TOKEN), bearer("0123456789abcdef0123456789abcdeF"));
        assert_eq!(process.status("/healthz", "", None).await, 200);
        assert_eq!(process.refused(), 0);
        for path in ["/metrics", "/debug", "/nowhere", "/%68ealthz", "//healthz", "/healthz/"] {
            let answer = process.ask(path, "", None).await;
            assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("www-authenticate: Bearer"), "{answer}");
            let answer = process.ask(path, &wrong, None).await;
            assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("invalid_token"), "{answer}");
        }
        assert_eq!(process.refused(), 12);
        let metrics = process.ask("/metrics", &right, None).await;
        assert!(metrics.starts_with("HTTP/1.1 200") && metrics.contains("cavern_http_requests_refused"), "{metrics}");
        assert!(process.ask("/debug", &right, None).await.ends_with("inside"));
        assert_eq!(process.status("/nowhere", &right, None).await, 404);

        let (admin, worker) = (process.certificate(Role::Admin), process.certificate(Role::Worker));
        assert_eq!(process.status("/metrics", "", Some(&admin)).await, 200);
        for person in [Role::Viewer, Role::Operator] {
            assert_eq!(process.status("/metrics", "", Some(&process.certificate(person))).await, 200, "{person}");
        }
        let answer = process.ask("/metrics", "", Some(&worker)).await;
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("cavern://lab/worker/x may not"), "{answer}");
        assert_eq!(process.status("/metrics", &right, Some(&worker)).await, 200);
        assert_eq!(process.refused(), 13);

        let lines = process.audit();
        let last = lines.last().unwrap();
        assert_eq!((&last["operation"], &last["subject"]), (&"Http".into(), &"GET /metrics".into()));
        assert_eq!(last["identity"], "cavern://lab/worker/x");
        assert!(lines.len() <= 12, "{} lines: it is a flood", lines.len());
        assert!(lines.iter().all(|line| line["result"] != "ok"), "{lines:?}");
        let text = fs::read_to_string(process.directory.path().join("audit")).unwrap();
        assert!(!text.contains("0123456789"), "what was given for a token is not quoted: {text}");
    }
}

/// As a client of the gRPC port of the same process, and as browsers and Prometheus do.
#[tokio::test]
async fn whoever_means_another_port_is_refused() {
    let process = Process::start(Role::Master, |_| {}).await;
    for (offered, is_taken) in [(vec!["h2"], false), (vec!["cavern-data/2"], false), (vec!["h2", "http/1.1"], true)] {
        let mut config = client(process.authority.certificate(), None);
        config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(process.address).await.unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect("cavern".try_into().unwrap(), stream);
        let connected = tokio::time::timeout(PATIENCE, connecting).await.unwrap();
        let chosen = connected.map(|stream| stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec));
        match chosen {
            Ok(chosen) => assert!(is_taken && chosen.as_deref() == Some(&b"http/1.1"[..]), "{offered:?} {chosen:?}"),
            Err(error) => assert!(!is_taken && error.to_string().contains("NoApplicationProtocol"), "{error}"),
        }
    }
}

#[tokio::test]
async fn metrics_may_be_open_and_a_token_need_not_be_there() {
    let process = Process::start(Role::Master, |config| {
        config.security.open_metrics = true;
        config.security.http_token = PathBuf::new();
    })
    .await;
    assert_eq!(process.status("/metrics", "", None).await, 200);
    assert_eq!(process.status("/debug", "", None).await, 401);
    for token in ["", TOKEN] {
        assert_eq!(process.status("/debug", &bearer(token), None).await, 401);
    }
}

#[tokio::test]
async fn who_speaks_no_tls_or_has_the_certificate_of_somebody_else_gets_no_page() {
    let process = Process::start(Role::Worker, |_| {}).await;
    let mut plain = TcpStream::connect(process.address).await.unwrap();
    plain.write_all(format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{}\r\n", bearer(TOKEN)).as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, plain.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.ends_with("ask for https://\n"), "{answer}");

    let elsewhere = tempfile::tempdir().unwrap();
    let foreign = Authority::create(elsewhere.path(), "lab").unwrap();
    let issued = foreign.issue(&identity(Role::Admin), DAY, elsewhere.path(), "admin").unwrap();
    let config = client(process.authority.certificate(), Some(&[issued.certificate, issued.key]));
    let stream = TcpStream::connect(process.address).await.unwrap();
    let connected = TlsConnector::from(Arc::new(config)).connect("cavern".try_into().unwrap(), stream).await;
    let mut byte = [0];
    // With TLS 1.3 a client hears of it when it reads.
    let read = match connected {
        Ok(mut stream) => tokio::time::timeout(PATIENCE, stream.read(&mut byte)).await.unwrap(),
        Err(error) => Err(error),
    };
    assert!(read.is_err(), "{read:?}");
    // It has been counted by then, or a moment later.
    let counted = async {
        while process.refused() < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, counted).await.unwrap();
    assert_eq!(process.status("/healthz", "", None).await, 200);
}

#[tokio::test]
async fn a_connection_over_which_pages_are_asked_for_ends_when_its_certificate_is_revoked() {
    let process = Process::start(Role::Worker, |_| {}).await;
    let admin = process.certificate(Role::Admin);
    let config = client(process.authority.certificate(), Some(&admin));
    let stream = TcpStream::connect(process.address).await.unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect("cavern".try_into().unwrap(), stream).await.unwrap();
    process.authority.revoke(&admin[..1], None).unwrap();
    let ask = async {
        loop {
            stream.write_all(b"GET /debug HTTP/1.1\r\nHost: x\r\n\r\n").await?;
            let mut answer = Vec::new();
            while !answer.ends_with(b"inside") {
                if stream.read_buf(&mut answer).await? == 0 {
                    return Ok::<_, std::io::Error>(());
                }
            }
        }
    };
    let _ended = tokio::time::timeout(PATIENCE, ask).await.expect("pages are shown for ever");
    let config = client(process.authority.certificate(), Some(&admin));
    let stream = TcpStream::connect(process.address).await.unwrap();
    let connected = TlsConnector::from(Arc::new(config)).connect("cavern".try_into().unwrap(), stream).await;
    let read = match connected {
        Ok(mut stream) => tokio::time::timeout(PATIENCE, stream.read_u8()).await.unwrap().map(drop),
        Err(error) => Err(error),
    };
    assert!(read.unwrap_err().to_string().contains("CertificateRevoked"));
    assert_eq!(process.status("/metrics", &bearer(TOKEN), None).await, 200);
}
