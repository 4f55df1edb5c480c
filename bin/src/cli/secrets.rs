//! `cv secrets`: what the masters encrypt the credentials of buckets with.

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_proto::raft::{RotateSecretsReply, RotateSecretsRequest};
use clap::Subcommand;
use serde::Serialize;

use super::connect::{ResultArgs, new_request_id};
use crate::console;
use crate::error::CliError;

#[derive(Subcommand)]
pub enum SecretsCommand {
    /// Change the key.
    #[command(after_help = "Examples:
  cv secrets rotate
  cv secrets rotate --json

The masters keep the credentials of mounts encrypted, with a key that is in the file secret.key of each of them. This \
makes a new key, gives it to all masters, encrypts all credentials anew and has the old key forgotten, while \
everything goes on. All masters of the group must answer: start one that does not, or take it out with \
`cv raft remove`. When it fails, or breaks off, either the old key is in use everywhere or the new one.

What is in older copies of the masters' directories stays readable for whoever has the old key as well: if somebody \
may have both, give the buckets other credentials, too (`cv mount update`).")]
    Rotate(ResultArgs),
}

#[derive(Serialize)]
struct RotatedView {
    /// How often the key was changed, with this time.
    generation: u64,
    /// Mounts whose credentials are encrypted with it.
    mounts: u64,
    /// Masters that have not forgotten the old one yet.
    behind: Vec<u64>,
}

impl SecretsCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Rotate(args) => rotate(&args).await,
        }
    }
}

async fn rotate(args: &ResultArgs) -> Result<(), CliError> {
    let request = RotateSecretsRequest { request_id: new_request_id() };
    let rotate = async |mut master: Stubs| master.raft.rotate_secrets(request.clone()).await;
    let RotateSecretsReply { generation, mounts, behind } = args.cluster.call(rotate).await?;
    args.show(&RotatedView { generation, mounts, behind }, |view| {
        let mounts = counted(view.mounts, "mount");
        console::line(format_args!("there is a new key, and the credentials of {mounts} have it"))?;
        view.behind.iter().try_for_each(|id| {
            console::line(format_args!("master {id} forgets the old key when it has caught up: see `cv raft status`"))
        })
    })
}
