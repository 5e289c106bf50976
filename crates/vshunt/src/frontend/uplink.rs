//! A tap as a port of a switch: no front-end and no guest, its queues run from the beginning to the end.

use std::sync::{Arc, Mutex};

use super::Observer;
use crate::backend::net::tap::HEADER_LONG;
use crate::backend::net::{Offloads, Switch, Tap, TapQueue};
use crate::error::Result;
use crate::export::spec::NetQueueCounters;
use crate::queue::net::switch::uplink::{Parts, UplinkPair};
use crate::queue::net::switch::{Plug, Takes};
use crate::queue::net::{DropReason, NetStats};
use crate::worker::QueueSet;

/// See the module.
pub struct Uplink {
    name: String,
    plug: Arc<Plug>,
    taps: Vec<Arc<TapQueue>>,
    stats: Vec<Arc<NetStats>>,
    /// None once it is stopped. Guards nothing else.
    queues: Mutex<Option<Arc<QueueSet>>>,
}

impl Uplink {
    /// Joins a tap to a switch, a queue of it for each of `queues`.
    ///
    /// # Errors
    /// The tap does not let us, or the switch is full; nothing is joined then.
    pub fn start(
        name: &str,
        tap: Arc<Tap>,
        switch: Arc<Switch>,
        queues: &Arc<QueueSet>,
        observer: &Arc<dyn Observer>,
    ) -> Result<Self> {
        let uso = tap.has_uso();
        tap.set_header(HEADER_LONG)?;
        // Who does not take what the host leaves to be done has it done by the switch.
        tap.set_offloads(Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: false, uso })?;
        let taps = tap.queues(queues.len())?;
        let port = switch.join(queues.len(), Some(&tap))?;
        let plug = Arc::new(Plug { switch, port });
        let stats: Vec<Arc<NetStats>> = (0..queues.len()).map(|_| Arc::default()).collect();
        let this = Self {
            name: name.to_owned(),
            plug: plug.clone(),
            taps,
            stats,
            queues: Mutex::new(Some(queues.clone())),
        };
        for (index, (tap, net)) in (0..).zip(this.taps.iter().zip(&this.stats)) {
            let (observer, own) = (observer.clone(), name.to_owned());
            let parts = Parts {
                tap: tap.clone(),
                plug: plug.clone(),
                index,
                takes: Takes::of_tap(uso),
                stats: queues.stats(index).clone(),
                net: net.clone(),
                on_broken: Box::new(move |why| tell(&own, index, why, &observer)),
            };
            plug.port.ends[usize::from(index)].open();
            queues.start(index, Box::new(UplinkPair::new(parts)));
            if let Err(e) = tap.attach() {
                this.stop();
                return Err(e);
            }
        }
        Ok(this)
    }

    /// Counters of a queue; the tap is the guest.
    pub fn net_counters(&self, queue: u16) -> Option<NetQueueCounters> {
        self.stats.get(usize::from(queue)).map(|stats| stats.counters())
    }

    /// Ends it: what waits for the tap goes home, what waits in it is dropped. Idempotent.
    pub fn stop(&self) {
        let Some(queues) = self.queues.lock().expect("no holder panics").take() else { return };
        for end in &self.plug.port.ends {
            end.close();
        }
        for (index, (tap, net)) in (0..).zip(self.taps.iter().zip(&self.stats)) {
            drop(queues.stop(index));
            net.dropped(DropReason::Detached, tap.discard());
            if let Err(e) = tap.detach() {
                tracing::warn!("{}: {e}", self.name);
            }
        }
    }
}

/// A queue has lost its tap. On a thread of its own: a worker writes no log line, and waits for no client that is told.
fn tell(name: &str, index: u16, why: &str, observer: &Arc<dyn Observer>) {
    let (name, why, observer) = (name.to_owned(), why.to_owned(), observer.clone());
    let told = move || {
        tracing::warn!("{name}:{index}: {why}; remove the export and its network, and add them again");
        observer.queue_broken(index, &why);
    };
    // Without a thread for it the queue's state still says so.
    let _ = std::thread::Builder::new().name("uplink-broken".into()).spawn(told);
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.stop();
    }
}
