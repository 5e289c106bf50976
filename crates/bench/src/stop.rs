//! Ctrl-C ends a load early, like the end of its time: requests in flight are waited for, and
//! written data is read back.
//!
//! The command line calls this once. The handler may run on any thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use vshunt_guest::error::{Error, Kind, Result};

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Returns a flag that the first SIGINT sets. The second SIGINT ends the program.
///
/// # Errors
/// The system refuses the handler.
pub(crate) fn by_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = STOP.get_or_init(Arc::default).clone();
    let handler: extern "C" fn(libc::c_int) = interrupted;
    // SAFETY: an all-zero sigaction is valid: it has no flags and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESETHAND;
    // SAFETY: the handler only uses atomic operations, which are allowed in a signal handler.
    if unsafe { libc::sigaction(libc::SIGINT, &action, std::ptr::null_mut()) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Error::with(Kind::System, "cannot handle SIGINT", error));
    }
    Ok(stop)
}

extern "C" fn interrupted(_: libc::c_int) {
    if let Some(stop) = STOP.get() {
        stop.store(true, Ordering::Relaxed);
    }
}
