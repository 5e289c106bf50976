//! The rings of a device as queues of workers of this process.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use virtio::log::DirtyLog;
use virtio::ring::UsedLog;
use vshunt_engine::{EventFd, Queue, QueueSet, QueueStats, State};
use vshunt_types::error::Result;
use vshunt_virtqueue::{RingAreas, RingParts, RingServer, RingStart, owner, state_of, take_ring};

use super::device::{Device, RingPlace};

/// Serves the rings of a device as queues of workers.
pub struct WorkerRings {
    set: Arc<QueueSet>,
    device: Arc<dyn Device>,
}

impl WorkerRings {
    /// Makes the server of the rings of `device`. Its queues are those of `set`.
    pub fn new(set: Arc<QueueSet>, device: Arc<dyn Device>) -> Self {
        Self { set, device }
    }

    /// Passes a queue to its worker.
    fn run(&self, index: u16, mut queue: Box<dyn Queue>) {
        let state = owner(queue.as_mut()).map_or(State::Running, |owner| state_of(owner));
        self.set.start_as(index, queue, state);
    }
}

impl RingServer for WorkerRings {
    fn rings(&self) -> u16 {
        self.device.rings()
    }

    fn queues(&self) -> u16 {
        self.set.len()
    }

    fn queue_of(&self, ring: u16) -> Option<u16> {
        self.device.place(ring).map(|place| place.queue)
    }

    fn stats(&self, queue: u16) -> &Arc<QueueStats> {
        self.set.stats(queue)
    }

    unsafe fn start(&self, ring: u16, start: RingStart) -> std::result::Result<(), String> {
        let place = self.device.place(ring).ok_or("there is no such ring")?;
        let stats = self.set.stats(place.queue).clone();
        if let Some(network) = self.device.network() {
            network.ring_starts(place, start.fresh)?;
        }
        stats.size.store(start.areas.size, Relaxed);
        let parts = RingParts {
            vring: start.vring,
            mem: start.mem,
            replays: start.tracking.map_or(Vec::new(), |tracking| tracking.replays),
            kick: start.kick,
            call: start.call,
            log: start.log,
            discards: start.discards,
            stats: stats.clone(),
            name: start.name,
            on_broken: start.on_broken,
        };
        // Another ring of the same queue may run.
        let others = self.set.stop(place.queue);
        self.run(place.queue, self.device.queue(place, parts, others));
        Ok(())
    }

    fn stop(&self, ring: u16, discard: bool, hand_over: bool) -> Option<u32> {
        let place = self.device.place(ring)?;
        let (base, rest) = take_ring(self.set.stop(place.queue)?, place.nth, discard, hand_over);
        if let Some(rest) = rest {
            self.run(place.queue, rest);
        }
        Some(base)
    }

    fn discards(&self, ring: u16) -> bool {
        self.device.network().zip(self.device.place(ring)).is_some_and(|(network, at)| network.transmits(at))
    }

    fn stop_all(&self, rings: &[u16]) -> Vec<(u16, u32)> {
        let mut bases = Vec::with_capacity(rings.len());
        for (at, queue) in self.set.stop_all() {
            let mut left = Some(queue);
            for &ring in rings {
                if let Some(place) = self.device.place(ring).filter(|place| place.queue == at)
                    && let Some(queue) = left.take()
                {
                    let (base, rest) = take_ring(queue, place.nth, false, false);
                    bases.push((ring, base));
                    left = rest;
                }
            }
            debug_assert!(left.is_none(), "a queue has no ring that does not run");
        }
        bases
    }

    fn close(&self, ring: u16) {
        if let (Some(network), Some(place)) = (self.device.network(), self.device.place(ring)) {
            network.ring_closed(place);
        }
    }

    fn set_call(&self, ring: u16, call: Option<Arc<EventFd>>) -> std::result::Result<(), String> {
        let Some(RingPlace { queue, nth }) = self.device.place(ring) else { return Ok(()) };
        let changed = self.set.run_on(queue, move |queue| {
            if let Some(ring) = owner(queue).and_then(|owner| owner.ring(nth)) {
                ring.set_call(call);
            }
        });
        // An error affects only this front end.
        if let Err(e) = changed {
            tracing::warn!("{e}");
        }
        Ok(())
    }

    unsafe fn set_log(
        &self,
        ring: u16,
        _areas: RingAreas,
        log: Option<Arc<DirtyLog>>,
        used: Option<UsedLog>,
    ) -> std::result::Result<(), String> {
        let Some(RingPlace { queue, nth }) = self.device.place(ring) else { return Ok(()) };
        self.set.with_drained(queue, |queue| {
            if let Some(ring) = owner(queue).and_then(|owner| owner.ring(nth)) {
                ring.set_log(log, used);
            }
        });
        Ok(())
    }

    fn with_all_drained(&self, until: Instant, f: &mut dyn FnMut()) -> Result<()> {
        self.set.with_all_drained(until, f)
    }
}
