//! Moves rings between workers of the kernel under load: creates workers, attaches rings to them,
//! and frees them.
//!
//! One thread makes the calls, and load threads know nothing of it. Nothing else creates or frees
//! workers of this device. So this thread knows what the kernel must answer to each call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use vhost_kernel::Vhost;
use virtio::vhost::VHOST_BLK_VRINGS_MAX;

use crate::error::{Error, Kind, Result, fail};
use crate::rng::Rng;

/// Most workers. More are freed before others are created.
const WORKERS_MAX: usize = 8;

/// Counts of the calls.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Moves {
    /// Workers created.
    pub made: u64,
    /// Attached rings.
    pub attached: u64,
    /// Workers freed.
    pub freed: u64,
    /// Workers that were correctly not freed, because rings were attached to them.
    pub busy: u64,
}

/// The assignment of rings to workers, as this thread knows it.
struct Mover<'a> {
    vhost: &'a Vhost,
    rng: Rng,
    workers: Vec<u32>,
    /// The worker of each ring.
    rings: Vec<u32>,
    /// The worker of the device's other rings. It cannot be freed.
    kept: Option<u32>,
    moves: Moves,
}

fn vhost_error(e: vhost_kernel::Error) -> Error {
    Error::new(Kind::Io, format!("while rings were moved under load: {e}"))
}

/// Moves rings every `pause` until `stop`.
///
/// # Errors
/// A call failed that had to succeed, or succeeded although it had to fail.
pub fn run(vhost: &Vhost, queues: u16, seed: u32, pause: Duration, stop: &AtomicBool) -> Result<Moves> {
    let rings: Vec<u32> = (0..u32::from(queues))
        .map(|ring| vhost.vring_worker(ring).map_err(vhost_error))
        .collect::<Result<_>>()?;
    // All rings of a device start at the worker that is created with its owner, also unused rings.
    let kept = match u32::from(queues) {
        VHOST_BLK_VRINGS_MAX.. => None,
        unused => Some(vhost.vring_worker(unused).map_err(vhost_error)?),
    };
    let mut workers = rings.clone();
    workers.extend(kept);
    workers.sort_unstable();
    workers.dedup();
    let rng = Rng::new(u64::from(seed), 3000);
    let mut mover = Mover { vhost, rng, workers, rings, kept, moves: Moves::default() };
    while !stop.load(Ordering::Acquire) {
        mover.step()?;
        std::thread::sleep(pause);
    }
    Ok(mover.moves)
}

impl Mover<'_> {
    fn step(&mut self) -> Result<()> {
        match self.rng.below(8) {
            0 | 1 if self.workers.len() < WORKERS_MAX => self.make(),
            2 => self.free(),
            _ => self.attach(),
        }
    }

    fn make(&mut self) -> Result<()> {
        let id = self.vhost.new_worker().map_err(vhost_error)?;
        if self.workers.contains(&id) {
            return Err(fail!(Io, "VHOST_NEW_WORKER gave the id {id}, which a worker has already"));
        }
        self.workers.push(id);
        self.moves.made += 1;
        Ok(())
    }

    fn attach(&mut self) -> Result<()> {
        let ring = self.rng.below(self.rings.len() as u64) as usize;
        let id = self.workers[self.rng.below(self.workers.len() as u64) as usize];
        self.vhost.attach(ring as u32, id).map_err(vhost_error)?;
        self.rings[ring] = id;
        self.moves.attached += 1;
        match self.vhost.vring_worker(ring as u32).map_err(vhost_error)? {
            now if now == id => Ok(()),
            now => Err(fail!(Io, "ring {ring} was attached to worker {id}, the kernel says it is at {now}")),
        }
    }

    fn free(&mut self) -> Result<()> {
        let at = self.rng.below(self.workers.len() as u64) as usize;
        let id = self.workers[at];
        let used = self.rings.contains(&id) || self.kept == Some(id);
        match (self.vhost.free_worker(id), used) {
            (Ok(()), false) => {
                self.workers.swap_remove(at);
                self.moves.freed += 1;
                Ok(())
            }
            (Err(e), true) if e.errno() == Errno::BUSY => {
                self.moves.busy += 1;
                Ok(())
            }
            (Ok(()), true) => Err(fail!(Io, "worker {id} was freed although rings are attached to it")),
            (Err(e), _) => Err(vhost_error(e)),
        }
    }
}
