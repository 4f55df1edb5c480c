//! `cv`: every process and every command of Cavern.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod bench;
mod cli;
mod console;
mod error;
mod group;
mod local;
mod runtime;

use std::process::ExitCode;

/// Threads allocate and free blocks of all sizes at a high rate, and the general allocator of glibc keeps much of that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Has the allocator give memory back ten milliseconds after it was freed, not a second: `cv fuse` and `cv worker` stay
/// within what their budgets promise even while many threads free what others have allocated.
#[expect(unsafe_code, reason = "the allocator's crate does not show its options")]
fn give_memory_back_soon() {
    unsafe extern "C" {
        fn mi_option_set(option: std::ffi::c_int, value: std::ffi::c_long);
    }
    /// `mi_option_purge_delay`: milliseconds.
    const PURGE_DELAY: std::ffi::c_int = 15;
    // SAFETY: an option that exists, set before any other thread runs.
    unsafe { mi_option_set(PURGE_DELAY, 10) }
}

fn main() -> ExitCode {
    give_memory_back_soon();
    match cli::run() {
        Ok(()) | Err(error::CliError::OutputClosed) => ExitCode::SUCCESS,
        Err(error) => {
            console::remark(format_args!("cv: {error}"));
            error.exit_code()
        }
    }
}
