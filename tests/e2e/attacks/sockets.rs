//! Users of a host who put a socket where that of a worker was.

use std::fs::{OpenOptions, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::process::{Child, Command, Stdio};

use super::*;

const USER: &str = "1000";
/// Runs a program of Python in the directory that stdin is.
const BELOW_STDIN: &str = r#"cd /proc/self/fd/0/.; exec /usr/bin/python3 -c "$0" "$@" </dev/null"#;
/// Makes a directory below the one that it is in, listens there as a worker does, and notes who comes and what is said.
const POSE: &str = r#"
import os, socket, sys, threading

os.mkdir(sys.argv[1], 0o755)
os.chdir(sys.argv[1])
came, said = open("came", "ab", 0), open("said", "ab", 0)

def listen(name):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    os.chmod(name, 0o777)
    listener.listen()
    return listener

def serve(listener):
    while True:
        stream, _ = listener.accept()
        came.write(b"x")
        try:
            said.write(stream.recv(4096))
        except OSError:
            pass

for listener in [listen(sys.argv[2]), listen(sys.argv[2] + ".journals")]:
    threading.Thread(target=serve, args=[listener]).start()
print("ready", flush=True)
"#;

struct Posing(Child);

impl Posing {
    fn begin(above: &Path, directory: &str, socket: &str) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", USER, "--regid", USER, "--clear-groups", "sh", "-ec", BELOW_STDIN, POSE]);
        command.args([directory, socket]);
        // He could not find it by its path.
        let above = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(above).unwrap();
        let mut posing = Self(command.stdin(above).stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(posing.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        posing
    }
}

impl Drop for Posing {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_user_of_the_host_who_poses_as_the_worker_is_told_nothing() {
    let cluster = up();
    let tree = cluster.seed("bucket", "", 20, 50_000);
    cluster.mount("s3://bucket", "/data", &[]);
    let socket = &cluster.at_start.workers[0].socket;
    let (directory, name) = (socket.parent().unwrap(), socket.file_name().unwrap().to_str().unwrap());
    let (above, own_name) = (directory.parent().unwrap(), directory.file_name().unwrap().to_str().unwrap());
    // As if it were lost with the memory that it was in, and anybody might make it there.
    cluster.kill("worker0");
    let (mode, away) = (fs::metadata(above).unwrap().permissions(), above.join("away"));
    fs::rename(directory, &away).unwrap();
    fs::set_permissions(above, Permissions::from_mode(0o1777)).unwrap();
    let posing = Posing::begin(above, own_name, name);

    // What the worker does not have, the bucket does.
    cluster.assert_tree("data", "", &tree);
    eventually("somebody has come to him", PATIENCE, || {
        (fs::metadata(directory.join("came")).unwrap().len() > 0).then_some(())
    });
    // He may see it before the client has looked whose the socket is.
    eventually("the client says why it does not use the socket", PATIENCE, || {
        let log = fs::read_to_string(&cluster.at_start.fuse[0].log).unwrap();
        (log.contains("the socket of a worker is not used") && log.contains("user 1000's")).then_some(())
    });
    assert_eq!(fs::read_to_string(directory.join("said")).unwrap(), "");

    drop(posing);
    fs::remove_dir_all(directory).unwrap();
    fs::set_permissions(above, mode).unwrap();
    fs::rename(&away, directory).unwrap();
    cluster.start("worker0");
    cluster.assert_tree("data", "", &tree);
}
