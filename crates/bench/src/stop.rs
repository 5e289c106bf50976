//! Ctrl-C ends a load early, as its time does: what is outstanding is waited for, what was written is read back.
//!
//! Called once, by the command line; the handler may run on any thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use vshunt_guest::error::{Error, Kind, Result};

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// What becomes true at the first SIGINT. The second ends the program.
///
/// # Errors
/// The system refuses the handler.
pub(crate) fn by_interrupt() -> Result<Arc<AtomicBool>> {
    let stop = STOP.get_or_init(Arc::default).clone();
    let handler: extern "C" fn(libc::c_int) = interrupted;
    // SAFETY: all zeroes is a sigaction without flags and with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESETHAND;
    // SAFETY: the handler does nothing but atomic operations, which may interrupt anything.
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
