//! The worker of each queue of an export, readable without waiting for a queue that moves.
//!
//! The thread that holds the queue's slot writes it, and any thread reads it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vshunt_types::error::{Error, Result};

use super::WorkerId;

/// A worker and a generation for each queue.
#[derive(Debug, Default)]
pub struct Placement(Vec<AtomicU64>);

impl Placement {
    /// Adds a queue with its first worker.
    pub fn push(&mut self, worker: WorkerId) {
        self.0.push(AtomicU64::new(pack(worker, 0)));
    }

    /// Returns the number of queues.
    pub fn len(&self) -> u16 {
        self.0.len() as u16
    }

    /// Returns whether there are no queues.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the worker that a queue is attached to, and how often it was attached.
    pub fn get(&self, index: u16) -> (WorkerId, u32) {
        let home = self.0[usize::from(index)].load(Relaxed);
        ((home >> 32) as WorkerId, home as u32)
    }

    /// Records that a queue is attached to a worker, for the `generation`th time.
    pub fn note(&self, index: u16, worker: WorkerId, generation: u32) {
        self.0[usize::from(index)].store(pack(worker, generation), Relaxed);
    }

    /// Checks that `export` has a queue with this index.
    ///
    /// # Errors
    /// There is no such queue. The message names the valid indices.
    pub fn check(&self, export: &str, index: u16) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        let last = self.len() - 1;
        Err(Error::not_found(format!("export {export} has no queue {index}; it has 0 to {last}")))
    }
}

fn pack(worker: WorkerId, generation: u32) -> u64 {
    u64::from(worker) << 32 | u64::from(generation)
}
