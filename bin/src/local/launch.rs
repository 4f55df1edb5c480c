//! How each child of a cluster is started from its record.

use std::path::Path;

use super::certificates;
use super::child::{ChildName, Role};
use super::record::Cluster;

/// Arguments and environment of a child, beside what it inherits.
pub struct Launch {
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
}

impl Cluster {
    /// How to start a child. What differs between children of one role goes through the environment, the rest is in
    /// the common configuration; keys of the object store stay out of the process list.
    pub fn launch(&self, name: ChildName) -> Launch {
        let mut launch = self.launch_role(name);
        launch.environment.extend(certificates::environment(self, name));
        launch
    }

    fn launch_role(&self, name: ChildName) -> Launch {
        let role = name.role.ready_word().to_owned();
        let conf = || vec![role.clone(), "--conf".to_owned(), self.conf_path().to_string_lossy().into_owned()];
        let text = |path: &Path| path.to_string_lossy().into_owned();
        match name.role {
            Role::S3 => Launch {
                arguments: [role.as_str(), "--root", &text(&self.s3.root), "--listen", &self.s3.listen]
                    .into_iter()
                    .chain(self.s3.admin.iter().flat_map(|admin| ["--admin-listen", admin.as_str()]))
                    .map(str::to_owned)
                    .collect(),
                environment: vec![
                    ("CV_DEV_S3_ACCESS_KEY", self.s3.access_key.clone()),
                    ("CV_DEV_S3_SECRET_KEY", self.s3.secret_key.clone()),
                ],
            },
            Role::Master => {
                let master = &self.masters[name.number];
                Launch {
                    arguments: conf(),
                    environment: vec![
                        ("CV_MASTER__LISTEN", master.grpc.clone()),
                        ("CV_MASTER__ADVERTISE", master.grpc.clone()),
                        ("CV_MASTER__HTTP_LISTEN", master.http.clone()),
                        ("CV_MASTER__DATA_DIR", text(&master.data_dir)),
                    ],
                }
            }
            Role::Worker => {
                let worker = &self.workers[name.number];
                let dirs: Vec<String> =
                    worker.dirs.iter().map(|dir| format!("{}{}", dir.tier, dir.path.display())).collect();
                Launch {
                    arguments: conf(),
                    environment: vec![
                        ("CV_WORKER__LISTEN", worker.data.clone()),
                        ("CV_WORKER__ADVERTISE", worker.data.clone()),
                        ("CV_WORKER__HTTP_LISTEN", worker.http.clone()),
                        ("CV_WORKER__SOCKET", text(&worker.socket)),
                        ("CV_WORKER__DIRS", toml::Value::from(dirs).to_string()),
                    ],
                }
            }
            Role::Fuse => {
                let fuse = &self.fuse[name.number];
                Launch {
                    arguments: conf(),
                    environment: vec![
                        ("CV_FUSE__HTTP_LISTEN", fuse.http.clone()),
                        ("CV_FUSE__MOUNT_POINT", text(&fuse.mount_point)),
                    ],
                }
            }
        }
    }
}
