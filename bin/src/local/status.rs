//! `cv local status`: the endpoints of a cluster and what its children are doing.

use std::path::Path;

use serde_json::{Value, json};

use super::child::{ChildName, Role, RunRecord, State};
use super::masters::survey;
use super::mounted::is_mounted;
use super::record::{Cluster, Fuse, Master, Restart, S3, Worker};
use super::supervisor::until_ms;
use crate::console::{self, or_dash, prefixed};
use crate::error::{CliError, Context as _};
use crate::group::GroupView;
use crate::runtime::block_on;

pub struct Status<'c> {
    cluster: &'c Cluster,
    children: Vec<Child>,
}

/// A child as it is shown: to scripts, and to people.
struct Child {
    role: Role,
    /// It runs, and nobody would start it again.
    is_alone: bool,
    view: Value,
    row: [String; 4],
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Looks at every child. Asks none of them anything, so that it answers at once however they are, but for several
/// masters: which of them leads they say within half a second, or not at all.
pub fn status(cluster: &Cluster) -> Result<Status<'_>, CliError> {
    let group = if cluster.masters.len() > 1 { Some(block_on(survey(cluster))?.view()) } else { None };
    let children = cluster.children().into_iter().map(|name| child(cluster, name, group.as_ref()));
    Ok(Status { cluster, children: children.collect::<Result<_, _>>()? })
}

fn child(cluster: &Cluster, name: ChildName, group: Option<&GroupView>) -> Result<Child, CliError> {
    let (state, pid, exit) = match cluster.state(name)? {
        State::Running(process) => ("running", Some(process.pid), None),
        State::Stopped => ("stopped", None, None),
        State::Crashed(exit) => ("crashed", None, exit),
    };
    let record = cluster.run_record(name)?.unwrap_or_default();
    let is_supervised = record.is_supervised() && cluster.restart == Restart::OnFailure;
    let RunRecord { restarts, last_exit, next_try_ms, .. } = record;
    let next_try_ms = next_try_ms.filter(|_| is_supervised).map(until_ms);
    let mut view = json!({
        "pid": pid,
        "state": state,
        // How it ended, when it crashed and its supervisor saw it.
        "exit": exit,
        // How often it was started again by itself since `up` or `start`, and how the run before this one ended.
        "restarts": restarts,
        "last_exit": last_exit,
        "next_try_ms": next_try_ms,
        "supervised": is_supervised,
        "log": text(&cluster.log_path(name)),
    });
    // What a master does among several, if it runs.
    let master = cluster.masters.get(name.number).filter(|_| name.role == Role::Master && pid.is_some());
    let member = master.and_then(|master| group?.masters.iter().find(|view| view.address == master.grpc));
    if let Some(member) = member {
        view["role"] = member.role.name().into();
    }
    let (endpoints, place) = place(cluster, name)?;
    if let (Value::Object(view), Value::Object(place)) = (&mut view, place) {
        view.extend(place);
    }
    let notes = [
        exit.map(|exit| format!(" ({exit})")),
        next_try_ms.map(|next| format!(", next try in {:.1} s", next as f64 / 1000.0)),
        (restarts > 0).then(|| format!(", restarts: {restarts}")),
        last_exit.filter(|_| restarts > 0).map(|exit| format!(", last: {exit}")),
        member.map(|member| format!(", {}", member.role.name())),
    ];
    let state = format!("{state}{}", notes.into_iter().flatten().collect::<String>());
    let is_alone = pid.is_some() && !is_supervised;
    Ok(Child { role: name.role, is_alone, view, row: [name.to_string(), state, or_dash(pid), endpoints] })
}

/// Where a child is reached, for people; and what it has of its own, for scripts.
fn place(cluster: &Cluster, name: ChildName) -> Result<(String, Value), CliError> {
    Ok(match name.role {
        Role::S3 => {
            let S3 { listen, admin, access_key, secret_key, root } = &cluster.s3;
            let (endpoint, admin_token) = (format!("http://{listen}"), cluster.s3.token());
            let admin = admin.as_ref().map(|admin| format!("http://{admin}"));
            let view = json!({
                "endpoint": endpoint,
                // The port for statistics and faults, and the file of its token: `null` where it has none.
                "admin": admin,
                "admin_token": admin_token.as_deref().map(text),
                "access_key": access_key,
                "secret_key": secret_key,
                "root": text(root),
            });
            (format!("{endpoint}{}", prefixed(" admin=", admin.as_deref().unwrap_or_default())), view)
        }
        Role::Master => {
            let Master { grpc, http, data_dir, .. } = &cluster.masters[name.number];
            (format!("grpc={grpc} http={http}"), json!({"grpc": grpc, "http": http, "data_dir": text(data_dir)}))
        }
        Role::Worker => {
            let Worker { data, http, socket, dirs } = &cluster.workers[name.number];
            let dirs: Vec<String> = dirs.iter().map(|dir| text(&dir.path)).collect();
            let view = json!({"data": data, "http": http, "socket": text(socket), "dirs": dirs});
            (format!("data={data} http={http}"), view)
        }
        Role::Fuse => {
            let Fuse { http, mount_point } = &cluster.fuse[name.number];
            let is_mounted = is_mounted(mount_point).context("cannot read the mount table")?;
            let mounted = if is_mounted { "" } else { " (not mounted)" };
            let view = json!({"http": http, "mount_point": text(mount_point), "mounted": is_mounted});
            (format!("{}{mounted} http={http}", mount_point.display()), view)
        }
    })
}

impl Status<'_> {
    /// `cv local status --json`.
    pub fn view(&self) -> Value {
        let cluster = self.cluster;
        let of = |role| -> Vec<&Value> {
            self.children.iter().filter(|child| child.role == role).map(|child| &child.view).collect()
        };
        let fuse = of(Role::Fuse);
        json!({
            "directory": text(&cluster.directory),
            // The configuration of this cluster's processes, for `--conf`.
            "conf": text(&cluster.conf_path()),
            "mount_point": fuse.first().map(|first| &first["mount_point"]),
            "mounted": fuse.first().map(|first| &first["mounted"]),
            // Whether what ends by itself is started again.
            "restart": cluster.restart,
            // Whether its processes show each other certificates.
            "secure": cluster.secure,
            "s3": of(Role::S3).pop(),
            "masters": of(Role::Master),
            "workers": of(Role::Worker),
            "fuse": fuse,
        })
    }

    /// `cv local status`, for people.
    pub fn print(&self) -> Result<(), CliError> {
        let Cluster { restart, s3, fuse, secure, .. } = self.cluster;
        let rows = self.children.iter().map(|child| child.row.clone());
        console::table(["CHILD", "STATE", "PID", "ENDPOINTS"], rows)?;
        if *restart == Restart::OnFailure && self.children.iter().any(|child| child.is_alone) {
            console::line(
                "the supervisor of a child is gone: `cv local up` gives it another, which starts the child again if it \
                 ends",
            )?;
        }
        if let Some(first) = fuse.first() {
            console::line(format_args!("mount point    {}", first.mount_point.display()))?;
        }
        console::line(format_args!("S3 access key  {}  secret key {}", s3.access_key, s3.secret_key))?;
        console::line(format_args!("configuration  {}", self.cluster.conf_path().display()))?;
        if *secure {
            console::line("connections    mutual TLS: the configuration has the certificate of an admin")?;
        }
        Ok(())
    }
}
