//! Certificates of a cluster that was made with `cv local up --secure`: an authority of its own in `D/certificates`,
//! one for each process, and one for whoever runs the cluster, which is that of `D/cluster.toml`. Beside them are the
//! list of those that are revoked, and the token of the HTTP ports.

use std::path::PathBuf;
use std::time::Duration;

use cavern_conf::host;
use cavern_conf::schema::Security;
use cavern_security::{Authority, Identity, Role as Part};

use super::child::{ChildName, Role};
use super::files;
use super::record::Cluster;
use crate::error::CliError;

/// As long as certificates can be made for.
const HOLD: Duration = Duration::from_secs(3650 * 86_400);
/// The name of whoever runs the cluster.
const ADMIN: &str = "local";
const AUTHORITY_FILES: [&str; 2] = ["ca.pem", "ca-key.pem"];
const REVOKED: &str = "crl.pem";
const TOKEN: &str = "http-token";
const TOKEN_LENGTH: usize = 40;

/// Makes what is not there yet of the certificates of a cluster: all at first, later those of children that are added.
///
/// # Errors
/// `Usage` where the cluster has been given another name: its certificates would be those of another cluster.
pub fn ensure(cluster: &Cluster, name: &str) -> Result<(), CliError> {
    let directory = cluster.certificates();
    let authority = if Authority::is_in(&directory) {
        Authority::open_of(&directory, name)?
    } else {
        // The list of another one would not be its own.
        AUTHORITY_FILES.iter().chain([&REVOKED]).try_for_each(|file| files::remove(&directory.join(file)))?;
        Authority::create(&directory, name)?
    };
    let hold = HOLD.min(authority.remaining());
    for (part, process) in holders(cluster) {
        let identity = Identity::new(name, part, &process)?;
        let pair = pair_of(&identity.file_name()).map(|file| directory.join(file));
        if pair.iter().all(|path| path.exists()) {
            continue;
        }
        // An `up` that was interrupted has left one of the two.
        pair.iter().try_for_each(|path| files::remove(path))?;
        authority.issue(&identity, hold, &directory, &identity.file_name())?;
    }
    if !directory.join(REVOKED).exists() {
        authority.revoke(&[], None)?;
    }
    let token = directory.join(TOKEN);
    if !token.exists() {
        files::write_whole(&token, format!("{}\n", host::random_text(TOKEN_LENGTH)).as_bytes())?;
    }
    Ok(())
}

/// What a child is to others; `None` for the object store, which is no part of the cluster.
fn part(role: Role) -> Option<Part> {
    match role {
        Role::S3 => None,
        Role::Master => Some(Part::Master),
        Role::Worker => Some(Part::Worker),
        Role::Fuse => Some(Part::Client),
    }
}

/// Whoever has a certificate, with its name.
fn holders(cluster: &Cluster) -> Vec<(Part, String)> {
    let children = cluster.children().into_iter();
    let children = children.filter_map(|child| Some((part(child.role)?, child.to_string())));
    children.chain([(Part::Admin, ADMIN.to_owned())]).collect()
}

/// Certificate and key.
fn pair_of(name: &str) -> [String; 2] {
    [format!("{name}.pem"), format!("{name}-key.pem")]
}

fn pair(cluster: &Cluster, part: Part, process: &str) -> [PathBuf; 2] {
    pair_of(&format!("{part}-{process}")).map(|file| cluster.certificates().join(file))
}

/// `[security]` of the command line.
pub fn of_admin(cluster: &Cluster) -> Security {
    let [certificate, key] = pair(cluster, Part::Admin, ADMIN);
    let files = [AUTHORITY_FILES[0], REVOKED, TOKEN].map(|file| cluster.certificates().join(file));
    let [ca, revoked, http_token] = files;
    Security { ca, certificate, key, revoked, http_token, ..Security::default() }
}

/// What the environment of a child has in the place of the files of the configuration.
pub fn environment(cluster: &Cluster, name: ChildName) -> Vec<(&'static str, String)> {
    let Some(part) = part(name.role).filter(|_| cluster.secure) else { return Vec::new() };
    let paths = pair(cluster, part, &name.to_string()).map(|path| path.to_string_lossy().into_owned());
    ["CV_SECURITY__CERTIFICATE", "CV_SECURITY__KEY"].into_iter().zip(paths).collect()
}

/// The names of all files that the cluster has made in its directory of certificates.
pub fn names(cluster: &Cluster) -> Vec<String> {
    let holders = holders(cluster).into_iter().flat_map(|(part, process)| pair_of(&format!("{part}-{process}")));
    AUTHORITY_FILES.into_iter().chain([REVOKED, TOKEN]).map(str::to_owned).chain(holders).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use cavern_security::CertificateInfo;

    use super::super::record::{Fuse, Master, S3, Worker};
    use super::*;

    fn cluster(directory: &Path, workers: usize) -> Cluster {
        let address = || "127.0.0.1:1".to_owned();
        let (access_key, secret_key) = (String::new(), String::new());
        let s3 = S3 { listen: address(), admin: None, access_key, secret_key, root: directory.join("s3") };
        let mut cluster = Cluster { directory: directory.to_owned(), s3, secure: true, ..Cluster::default() };
        let data_dir = directory.join("master0");
        cluster.masters = vec![Master { grpc: address(), http: address(), data_dir, joins: false }];
        let socket = directory.join("socket");
        let worker = Worker { data: address(), http: address(), socket, dirs: vec![] };
        cluster.workers = vec![worker; workers];
        cluster.fuse = vec![Fuse { http: address(), mount_point: directory.join("mnt") }];
        cluster
    }

    fn content(path: &Path) -> Vec<u8> {
        fs::read(path).unwrap()
    }

    #[test]
    fn each_process_has_its_own_certificate_and_later_ones_get_theirs() {
        let directory = tempfile::tempdir().unwrap();
        let one = cluster(directory.path(), 1);
        ensure(&one, "lab").unwrap();
        let identity = |cluster: &Cluster, role, number| {
            let environment = environment(cluster, ChildName { role, number });
            CertificateInfo::read(Path::new(&environment[0].1)).unwrap().identity.unwrap().to_string()
        };
        assert_eq!(identity(&one, Role::Master, 0), "cavern://lab/master/master0");
        assert_eq!(identity(&one, Role::Worker, 0), "cavern://lab/worker/worker0");
        assert_eq!(identity(&one, Role::Fuse, 0), "cavern://lab/client/fuse0");
        assert!(environment(&one, ChildName::S3).is_empty());
        let admin = of_admin(&one);
        let info = CertificateInfo::read(&admin.certificate).unwrap();
        assert_eq!(info.identity.unwrap().to_string(), "cavern://lab/admin/local");
        let token = fs::metadata(&admin.http_token).unwrap();
        assert_eq!((token.len(), token.permissions().mode() & 0o777), (TOKEN_LENGTH as u64 + 1, 0o600));
        let before = [&admin.ca, &admin.certificate, &admin.key, &admin.http_token].map(|path| content(path));

        // As an `up` leaves it that was interrupted.
        let two = cluster(directory.path(), 2);
        fs::write(two.certificates().join("worker-worker1-key.pem"), "half a k").unwrap();
        ensure(&two, "lab").unwrap();
        assert_eq!(identity(&two, Role::Worker, 1), "cavern://lab/worker/worker1");
        assert_eq!([&admin.ca, &admin.certificate, &admin.key, &admin.http_token].map(|path| content(path)), before);
        for name in names(&two) {
            assert!(two.certificates().join(&name).exists(), "{name}");
        }
        assert_eq!(fs::read_dir(two.certificates()).unwrap().count(), names(&two).len());

        let renamed = ensure(&two, "other").unwrap_err();
        assert!(matches!(&renamed, CliError::Usage(text) if text.contains("\"lab\"")), "{renamed}");
    }

    #[test]
    fn a_cluster_without_certificates_gives_its_children_none() {
        let directory = tempfile::tempdir().unwrap();
        let mut plain = cluster(directory.path(), 1);
        plain.secure = false;
        assert!(environment(&plain, ChildName { role: Role::Master, number: 0 }).is_empty());
    }
}
