//! A mount that limits the users of a client: its root above all.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use cavern_proto::master::mutation::Change;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{CheckAccessRequest, GetLayoutRequest, Mutation, RemoveName, SetAttr, User};
use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;

use super::*;

const OWNER: u32 = 1000;
const MEMBER: u32 = 2000;
const NOBODY: u32 = 65_534;
/// How long a client may take to hear of another mount table.
const TOLD: Duration = Duration::from_secs(10);

/// What a user of this host with these groups gets of a command, in a directory that he could not find by its path.
fn run(user: u32, groups: &str, directory: &Path, script: &str) -> Option<String> {
    let user = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--groups", groups]);
    command.args(["sh", "-ec", &format!("cd /proc/self/fd/0/.\n{script}")]);
    // Root may not even list some of them.
    let directory = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(directory).unwrap();
    let done = command.stdin(directory).stderr(Stdio::inherit()).output().unwrap();
    done.status.success().then(|| String::from_utf8(done.stdout).unwrap())
}

fn as_owner(directory: &Path, script: &str) -> String {
    run(OWNER, "1000", directory, script).unwrap_or_else(|| panic!("it failed: {script}"))
}

/// All that the owner sees of what is his.
fn seen(home: &Path) -> String {
    as_owner(home, "find . -printf '%p %y %m %U %G %s %T@ %C@\\n' | sort; find . -type f -exec cat {} +")
}

fn is_refused<T: std::fmt::Debug>(what: &str, result: io::Result<T>) {
    let errno = result.map_err(|error| error.raw_os_error());
    let refusals = [Errno::ACCESS, Errno::PERM].map(|errno| Some(errno.raw_os_error()));
    assert!(errno.as_ref().is_err_and(|errno| refusals.contains(errno)), "{what}: {errno:?}");
}

/// A mount with a directory of a user, and one for everybody, of which root is squashed for `fuse0` and `attacker`.
fn squashed() -> Cluster {
    let cluster = up();
    cluster.seed("bucket", "x/", 1, 1000);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    let work = cluster.path("work");
    let made = [("home", OWNER, 0o755), ("shared", 0, 0o1777), ("group", OWNER, 0o770)];
    for (name, owner, mode) in made {
        fs::create_dir(work.join(name)).unwrap();
        std::os::unix::fs::chown(work.join(name), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(work.join(name), Permissions::from_mode(mode)).unwrap();
    }
    let rules = ["mount", "update", "/work", "--client", "fuse0=rw,root_squash", "--client", "attacker=root_squash"];
    eventually("the rules are taken", PATIENCE, || (cluster.try_cv(&rules).code == 0).then_some(()));
    let shown = cluster.cv(&["mount"]).stdout;
    assert!(shown.contains("there for fuse0=rw,root_squash, attacker=rw,root_squash only"), "{shown}");
    // Before it is told, the client says nothing of who asks, and nobody may do this.
    eventually("the client knows the rules", TOLD, || run(OWNER, "1000", &work.join("home"), "touch told"));
    cluster
}

#[test]
fn root_of_a_host_is_nobody_where_it_is_squashed() {
    let cluster = squashed();
    let work = cluster.path("work");
    let (home, shared) = (work.join("home"), work.join("shared"));
    let made = "umask 077; echo secret > private; echo public > public; chmod 644 public; mkdir closed below; \
        echo inner > closed/f; chmod 666 closed/f; mkdir -m 777 closed/open; chmod 755 below";
    as_owner(&home, made);
    let before = seen(&home);
    let private = home.join("private");

    is_refused("read", fs::read(&private));
    is_refused("write", OpenOptions::new().write(true).open(&private));
    is_refused("append", OpenOptions::new().append(true).open(&private));
    is_refused("read and write", OpenOptions::new().read(true).write(true).open(&private));
    is_refused("open and cut", File::create(&private));
    is_refused("chmod", fs::set_permissions(&private, Permissions::from_mode(0o777)));
    is_refused("chown", std::os::unix::fs::chown(&private, Some(0), Some(0)));
    let time = rustix::fs::Timespec { tv_sec: 5, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    let set = rustix::fs::utimensat(CWD, &private, &times, AtFlags::empty());
    is_refused("times", set.map_err(Into::into));
    is_refused("unlink", fs::remove_file(&private));
    is_refused("rename", fs::rename(&private, home.join("mine")));
    is_refused("rename elsewhere", fs::rename(&private, shared.join("mine")));
    is_refused("replace", fs::rename(home.join("public"), &private));
    is_refused("link", fs::hard_link(&private, home.join("mine")));
    is_refused("rmdir", fs::remove_dir(home.join("below")));
    is_refused("create", File::create(home.join("mine")));
    is_refused("mkdir", fs::create_dir(home.join("mine")));
    is_refused("symlink", std::os::unix::fs::symlink("x", home.join("mine")));
    is_refused("write what all may read", OpenOptions::new().write(true).open(home.join("public")));
    let set = |name| rustix::fs::setxattr(&private, name, b"x", rustix::fs::XattrFlags::empty()).map_err(Into::into);
    is_refused("an attribute", set("user.x"));
    is_refused("an attribute of root's", set("trusted.x"));
    is_refused("list", fs::read_dir(home.join("closed")).map(drop));
    is_refused("read what all may, in a closed directory", fs::read(home.join("closed/f")));
    is_refused("write it", OpenOptions::new().write(true).open(home.join("closed/f")));
    is_refused("create below a closed directory", File::create(home.join("closed/open/mine")));
    let device = rustix::fs::mknodat(
        CWD,
        shared.join("device"),
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::RUSR,
        rustix::fs::makedev(1, 3),
    );
    is_refused("a device", device.map_err(Into::into));
    assert_eq!(seen(&home), before);

    // What all may read, it reads; what it makes is nobody's, and it may do with that as it likes.
    assert_eq!(fs::read_to_string(home.join("public")).unwrap(), "public\n");
    let own = shared.join("own");
    fs::write(&own, "written").unwrap();
    File::open(&own).unwrap().sync_all().unwrap();
    let made = fs::metadata(&own).unwrap();
    assert_eq!((made.uid(), made.gid()), (NOBODY, NOBODY));
    fs::set_permissions(&own, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read_to_string(&own).unwrap(), "written");
    OpenOptions::new().append(true).open(&own).and_then(|mut file| file.write_all(b" twice")).unwrap();
    assert_eq!(fs::read_to_string(&own).unwrap(), "written twice");
    is_refused("give it to root", std::os::unix::fs::chown(&own, Some(0), None));
    fs::create_dir(shared.join("mine")).unwrap();
    fs::rename(&own, shared.join("mine/own")).unwrap();
    assert_eq!(fs::read_to_string(shared.join("mine/own")).unwrap(), "written twice");
    fs::remove_file(shared.join("mine/own")).unwrap();
    fs::remove_dir(shared.join("mine")).unwrap();
    assert_eq!(run(OWNER, "1000", &shared, "echo x > of-owner").as_deref(), Some(""));
    is_refused("unlink in a sticky directory", fs::remove_file(shared.join("of-owner")));
}

#[test]
fn users_who_count_as_themselves_work_as_on_any_mount() {
    let cluster = squashed();
    let work = cluster.path("work");
    // What is open stays so, whatever its mode becomes.
    let script = "exec 3> held; echo one >&3; chmod 0 held; echo two >&3; exec 3>&-; chmod 600 held; cat held";
    assert_eq!(as_owner(&work.join("home"), script), "one\ntwo\n");
    let script = "umask 777; echo made > own; umask 022; chmod 400 own; cat own; mv own other; ln other more; \
        rm -f other; stat -c %h more; mkdir -p a/b/c; rm -r a; dd if=/dev/zero of=big bs=1M count=5 status=none; \
        truncate -s 3M big; stat -c %s big; touch -d @5 big; stat -c %Y big";
    assert_eq!(as_owner(&work.join("home"), script), "made\n1\n3145728\n5\n");
    // By one of his other groups.
    let script = "echo x > f; cat f; chmod 660 f; rm f; echo y > kept";
    assert_eq!(run(MEMBER, "2000,1000", &work.join("group"), script).as_deref(), Some("x\n"));
    let kept = rustix::fs::statat(CWD, work.join("group/kept"), AtFlags::empty()).unwrap();
    assert_eq!((kept.st_uid, kept.st_gid), (MEMBER, MEMBER));
    assert_eq!(as_owner(&work.join("group"), "rm kept; ls"), "");
}

#[test]
fn a_client_that_says_it_is_root_gains_nothing() {
    let cluster = squashed();
    let home = cluster.path("work").join("home");
    as_owner(&home, "umask 077; echo secret > private");
    let before = seen(&home);
    let (private, directory) = (fs::metadata(home.join("private")).unwrap().ino(), fs::metadata(&home).unwrap().ino());

    let attacker = Somebody::of(&cluster, Role::Client);
    let mut clusters = ClusterClient::new(attacker.channel(&cluster));
    let listed = attacker.answer(clusters.get_credentials(ListMountsRequest {})).unwrap().into_inner();
    let secret = &cluster.at_start.s3.secret_key;
    assert!(listed.mounts[0].users.is_some() && listed.mounts[0].options.values().all(|value| value != secret));

    let (sender, hellos) = tokio::sync::mpsc::channel(1);
    sender.try_send(WatchRequest { client: "attacker".to_owned(), ..WatchRequest::default() }).unwrap();
    let hellos = tokio_stream::wrappers::ReceiverStream::new(hellos);
    let mut events = attacker.answer(clusters.watch(hellos)).unwrap().into_inner();
    let first = attacker.answer(events.message()).unwrap().unwrap();
    let Some(Event::Reset(reset)) = first.event else { panic!("{first:?}") };

    let root = Some(User { uid: 0, gid: 0, groups: vec![0, OWNER] });
    let mut calls = NamespaceClient::new(attacker.channel(&cluster));
    let changes = [
        Change::SetAttr(SetAttr { inode: private, mode: Some(0o777), ..SetAttr::default() }),
        Change::SetAttr(SetAttr { inode: private, size: Some(0), ..SetAttr::default() }),
        Change::Remove(RemoveName { parent: directory, name: "private".into(), directory: false }),
    ];
    let mutations = changes.iter().flat_map(|change| [(change, root.clone()), (change, None)]).zip(1..);
    let mutations: Vec<_> = mutations
        .map(|((change, user), seq)| Mutation { seq, user, change: Some(change.clone()), ..Mutation::default() })
        .collect();
    let request = MutateRequest { session: reset.session, mutations, answered: 0 };
    let mutate = async { calls.mutate(tokio_stream::iter([request])).await?.into_inner().message().await };
    let reply = attacker.answer(mutate).unwrap().unwrap();
    assert_eq!(reply.results.len(), 6);
    for result in reply.results {
        let refusals = [Errno::ACCESS, Errno::PERM].map(Errno::raw_os_error);
        assert!(refusals.contains(&result.errno), "{result:?}");
    }
    for user in [root, None] {
        let layout = GetLayoutRequest { inode: private, user: user.clone(), ..GetLayoutRequest::default() };
        let refused = attacker.answer(calls.get_layout(layout)).unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
        let access = CheckAccessRequest { inode: private, user, wanted: 4, session: 0 };
        assert!(!attacker.answer(calls.check_access(access)).unwrap().into_inner().allowed);
    }
    assert_eq!(seen(&home), before);
}
