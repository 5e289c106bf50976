//! Stops rings and starts them again under load, and removes the backend and sets it again.
//!
//! The guest is not informed. Its requests wait in the ring, and those in flight must be complete
//! when the stop returns. One thread makes the calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use serde::Serialize;

use crate::driver::{KernelHandle, RingParts};
use crate::error::{Result, fail};
use crate::rng::Rng;

/// Counts of the calls.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Restarts {
    /// Rings stopped and started again.
    pub rings: u64,
    /// Number of times that the backend was removed and set again.
    pub backends: u64,
}

/// Stops and starts every `pause` until `stop`.
///
/// # Errors
/// A call failed, or a stopped ring has requests in flight.
pub fn run(
    kernel: &KernelHandle,
    rings: &[RingParts],
    seed: u32,
    pause: Duration,
    stop: &AtomicBool,
) -> Result<Restarts> {
    let mut rng = Rng::new(u64::from(seed), 6000);
    let mut done = Restarts::default();
    while !stop.load(Ordering::Acquire) {
        std::thread::sleep(pause);
        if rng.one_in(8) {
            swap_backend(kernel, rings)?;
            done.backends += 1;
        } else {
            let ring = &rings[rng.below(rings.len() as u64) as usize];
            kernel.run_ring(ring.index, false)?;
            resume(kernel, ring)?;
            done.rings += 1;
        }
    }
    Ok(done)
}

/// Starts a stopped ring from its base.
fn resume(kernel: &KernelHandle, ring: &RingParts) -> Result<()> {
    let in_flight = kernel.stats(ring.index)?.in_flight;
    if in_flight != 0 {
        return Err(fail!(Io, "ring {} was stopped with {in_flight} requests in flight", ring.index));
    }
    let used = ring.device.load_u16(2);
    let base = kernel.base(ring.index)?;
    // All requests that were taken are complete, so both ends have the same position.
    if base != u32::from(used) {
        return Err(fail!(
            Io,
            "ring {} was stopped with {used} requests used, but is to go on from {base}",
            ring.index
        ));
    }
    kernel.set_base(ring.index, base)?;
    kernel.run_ring(ring.index, true)?;
    ring.kick();
    Ok(())
}

fn swap_backend(kernel: &KernelHandle, rings: &[RingParts]) -> Result<()> {
    match kernel.set_backend() {
        Err((Some(Errno::BUSY), _)) => {}
        Err((_, e)) => return Err(e),
        Ok(()) => return Err(fail!(Io, "a second backend was taken, although the device has one")),
    }
    kernel.clear_backend()?;
    for ring in rings {
        if kernel.stats(ring.index)?.running != 0 {
            return Err(fail!(Io, "ring {} runs although the backend was taken away", ring.index));
        }
    }
    kernel.set_backend().map_err(|(_, e)| e)?;
    rings.iter().try_for_each(|ring| resume(kernel, ring))
}
