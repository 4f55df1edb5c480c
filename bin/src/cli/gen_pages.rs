//! `cv gen-pages`: the completions and man pages of a package, made of the command line itself.

use std::fs;
use std::io;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;

use crate::error::{CliError, Context as _};

#[derive(Args)]
pub struct GenPagesArgs {
    /// Where to write; created if it does not exist.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl GenPagesArgs {
    /// Writes a file for each shell (`cv.bash`, `cv.fish`, `_cv`), and a man page for `command` and for each command
    /// below it that its help shows (`cv.1`, `cv-fuse-reload.1`).
    pub fn run(self, mut command: Command) -> Result<(), CliError> {
        let mut write = || -> io::Result<()> {
            fs::create_dir_all(&self.directory)?;
            for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
                clap_complete::generate_to(shell, &mut command, "cv", &self.directory)?;
            }
            clap_mangen::generate_to(command.clone(), &self.directory)
        };
        write().context(format_args!("cannot write to {}", self.directory.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_command_has_a_page_and_each_shell_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let pages = GenPagesArgs { directory: directory.path().join("pages") };
        pages.run(crate::cli::command()).unwrap();
        let files = fs::read_dir(directory.path().join("pages")).unwrap();
        let files: BTreeSet<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        for name in ["cv.bash", "cv.fish", "_cv", "cv.1", "cv-mount.1", "cv-fuse-reload.1", "cv-cert-issue.1"] {
            assert!(files.contains(name), "{name} is not in {files:?}");
        }
        assert!(files.len() > 50 && !files.contains("cv-gen-pages.1"), "{files:?}");
        let read = |name: &str| fs::read_to_string(directory.path().join("pages").join(name)).unwrap();
        assert!(read("cv-fuse-reload.1").contains("mount\\-point"), "{}", read("cv-fuse-reload.1"));
        for file in &files {
            assert!(!read(file).contains("cavern-secret") && !read(file).contains("cavern\\-secret"), "{file}");
        }
    }
}
