//! `cv`: every process and every command of Cavern.

mod cli;
mod console;
mod error;
mod images;
mod local;

use std::process::ExitCode;

use clap::Parser as _;

/// Threads allocate and free blocks of all sizes at a high rate, and the general allocator of glibc keeps much of that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error::CliError::OutputClosed) => ExitCode::SUCCESS,
        Err(error) => {
            console::remark(format_args!("cv: {error}"));
            error.exit_code()
        }
    }
}
