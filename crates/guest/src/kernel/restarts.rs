//! Rings stopped and started again while load runs, and the backend taken away and set again.
//!
//! The guest is told nothing: its requests wait in the ring, and what was in flight must be complete when the stop
//! returns. One thread of its own makes the calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use serde::Serialize;

use crate::driver::{KernelHandle, RingParts};
use crate::error::{Result, fail};
use crate::rng::XorShift;

/// What was done.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Restarts {
    /// Rings stopped and started again.
    pub rings: u64,
    /// Times that the backend was taken away and set again.
    pub backends: u64,
}

/// Stops and starts every `pause` until `stop`.
///
/// # Errors
/// A call failed, or a ring that was stopped has requests in flight.
pub fn run(
    kernel: &KernelHandle,
    rings: &[RingParts],
    seed: u32,
    pause: Duration,
    stop: &AtomicBool,
) -> Result<Restarts> {
    let mut rng = XorShift::new(u64::from(seed), 6000);
    let mut done = Restarts::default();
    while !stop.load(Ordering::Acquire) {
        std::thread::sleep(pause);
        if rng.one_in(8) {
            swap_backend(kernel, rings)?;
            done.backends += 1;
        } else {
            let ring = &rings[rng.below(rings.len() as u64) as usize];
            kernel.run_ring(ring.index, false)?;
            go_on(kernel, ring)?;
            done.rings += 1;
        }
    }
    Ok(done)
}

/// Starts a stopped ring where it stands.
fn go_on(kernel: &KernelHandle, ring: &RingParts) -> Result<()> {
    let in_flight = kernel.stats(ring.index)?.in_flight;
    if in_flight != 0 {
        return Err(fail!(Io, "ring {} was stopped with {in_flight} requests in flight", ring.index));
    }
    let used = ring.device.load_u16(2);
    let base = kernel.base(ring.index)?;
    // All that was taken is complete, so both ends stand at the same place.
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
    rings.iter().try_for_each(|ring| go_on(kernel, ring))
}
