//! `cv fs cat` and `cv fs get`: bytes of files, through the cache as a mount reads them.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use cavern_client::{Client, Node};
use cavern_proto::master::Kind;
use clap::Args;

use super::args::Copied;
use super::list::path_below;
use super::reader::Reader;
use super::target::Target;
use super::walk::{each_path, walk, with_client};
use crate::cli::connect::{ClusterArgs, ResultArgs};
use crate::console;
use crate::error::{CliError, Context as _};

#[derive(Args)]
pub struct CatArgs {
    /// Absolute paths in the namespace.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct GetArgs {
    /// Absolute path in the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// Where to [default: the same name in the current directory].
    #[arg(value_name = "TARGET")]
    target: Option<PathBuf>,
    #[command(flatten)]
    result: ResultArgs,
}

impl CatArgs {
    pub async fn run(self) -> Result<(), CliError> {
        each_path(&self.cluster, &self.paths, async |client, path| {
            let node = client.metadata().resolve(path).await?;
            Reader::open(client, path, &node).await?.read_all(console::raw).await
        })
        .await
    }
}

impl GetArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let target = match &self.target {
            Some(target) => target.clone(),
            None => self.path.rsplit('/').find(|part| !part.is_empty()).map(PathBuf::from).ok_or_else(|| {
                CliError::Usage("say where to put the whole namespace: cv fs get / TARGET".to_owned())
            })?,
        };
        let copied = with_client(&self.result.cluster, async |client| {
            let root = client.metadata().resolve(&self.path).await?;
            // As `cp`: a file goes into an existing directory.
            let target = match self.path.rsplit_once('/') {
                Some((_, name)) if root.kind != Kind::Directory && target.is_dir() => target.join(name),
                _ => target,
            };
            let mut copied = Copied::default();
            // What lies below is found beneath it, whatever symbolic links there are.
            let (target, top) = if root.kind == Kind::Directory {
                fs::create_dir_all(&target).context(format_args!("cannot create {}", target.display()))?;
                (Target::open(&target)?, String::new())
            } else {
                Target::of_file(&target)?
            };
            walk(client, root, async |path, node| {
                let local = if path.is_empty() { top.as_str() } else { path };
                match node.kind {
                    Kind::Directory if local.is_empty() => return Ok(()),
                    Kind::Directory => return target.make_directory(local),
                    Kind::Symlink => {
                        return target.make_link(local, node.posix().map_or(&b""[..], |posix| &posix.target));
                    }
                    Kind::File | Kind::Unspecified => {}
                    _ => {
                        console::remark(format_args!(
                            "left out, since it is no file: {}",
                            path_below(&self.path, path)
                        ));
                        return Ok(());
                    }
                }
                copied.files += 1;
                copied.bytes += copy(client, &path_below(&self.path, path), node, &target, local).await?;
                Ok(())
            })
            .await?;
            Ok(copied)
        })
        .await?;
        copied.show(&self.result)
    }
}

/// Copies one file under a temporary name first, so that an interrupted copy is not taken for a whole one.
async fn copy(client: &Client, path: &str, node: &Arc<Node>, target: &Target, local: &str) -> Result<u64, CliError> {
    let reader = Reader::open(client, path, node).await?;
    let mut draft = target.draft(local)?;
    let what = format!("cannot write {}", target.shown(local));
    reader.read_all(|bytes| draft.file().write_all(bytes).context(&what)).await?;
    draft.keep()?;
    Ok(reader.size())
}
