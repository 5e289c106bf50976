//! Wakes requests from a control thread.

use qcow2::Waker;
use vshunt_engine::Uring;

/// Calls `end`, which wakes requests, with an io_uring of its own for that. If they cannot be
/// woken, the process ends: guests would wait for ever.
pub(super) fn wake_now(end: impl FnOnce(&mut dyn FnMut(Waker))) {
    match Uring::new() {
        Ok(mut uring) => {
            end(&mut |w| uring.wake(w.who, w.token));
            if uring.send().is_err() {
                tracing::error!("an io_uring failed; ending at once");
                std::process::abort();
            }
        }
        Err(e) => {
            let mut waiting = 0;
            end(&mut |_| waiting += 1);
            if waiting > 0 {
                tracing::error!("{waiting} writes wait and cannot be woken ({e}); ending at once");
                std::process::abort();
            }
        }
    }
}
