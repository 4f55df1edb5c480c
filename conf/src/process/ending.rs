//! How a process ends that has opened a database.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Once;

unsafe extern "C" {
    fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn _exit(status: c_int) -> !;
}

extern "C" fn end_now(status: c_int, _: *mut c_void) {
    // SAFETY: ends the process, as `exit`, which calls this, is about to do.
    unsafe { _exit(status) }
}

/// From here on this process ends without the destructors of C++ objects that are there by now: to be called after the
/// first database has been opened, and free to be called again. `exit` would destroy what RocksDB's threads, and ours
/// that are within a call to it, still use, and the process could be aborted instead.
///
/// What Rust has printed is out before: its standard output is flushed ahead of `exit`.
pub fn skip_destructors_at_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `end_now` is a function of this program, is there for as long as it runs, and takes no argument.
        // Where it cannot be registered (no memory), the process ends as any other does.
        unsafe { on_exit(end_now, std::ptr::null_mut()) };
    });
}
