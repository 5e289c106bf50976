//! A tap as a port of a switch: no front-end and no guest, its queues run from the beginning to the end.
//!
//! A thread of each uplink looks after what changes by itself, every [`LOOK_EVERY`]: the interface's MTU, the addresses of the
//! host behind it, and loops through another uplink.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use vshunt_types::sync::Locked;

use vshunt_engine::Observer;
use vshunt_engine::QueueSet;
use vshunt_net::switch::{PROBE_EVERY_S, Port, PortOptions};
use vshunt_net::tap::HEADER_LONG;
use vshunt_net::{Offloads, Switch, Tap, TapQueue};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DropReason, NetQueueCounters, PortInfo};

use crate::queue::net::NetStats;
use crate::queue::net::switch::uplink::{Parts, UplinkPair};
use crate::queue::net::switch::{Plug, Takes};

/// How often the thread looks, which is a turn of loop probes.
const LOOK_EVERY: Duration = Duration::from_secs(PROBE_EVERY_S as u64);
/// How long after probes were sent it looks whether they came back.
const PROBE_BACK: Duration = Duration::from_millis(200);

/// See the module.
pub struct Uplink {
    name: String,
    plug: Arc<Plug>,
    taps: Vec<Arc<TapQueue>>,
    stats: Vec<Arc<NetStats>>,
    /// None once it is stopped. Guards nothing else.
    queues: Mutex<Option<Arc<QueueSet>>>,
    /// The thread; it ends when its sender is dropped. None once it was stopped. Guards nothing else.
    watcher: Mutex<Option<(mpsc::Sender<()>, JoinHandle<()>)>>,
}

impl Uplink {
    /// Joins a tap to a switch, a queue of it for each of `queues`. `options` are of a port without a tap and an MTU.
    ///
    /// # Errors
    /// The tap does not let us, or the switch is full; nothing is joined then.
    pub fn start(
        name: &str,
        tap: Arc<Tap>,
        switch: Arc<Switch>,
        options: PortOptions,
        queues: &Arc<QueueSet>,
        observer: &Arc<dyn Observer>,
    ) -> Result<Self> {
        let uso = tap.has_uso();
        tap.set_header(HEADER_LONG)?;
        // The switch does what the host leaves to be done for ports that do not take such frames.
        tap.set_offloads(Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: false, uso })?;
        let taps = tap.queues(queues.len())?;
        let mtu = tap.mtu().unwrap_or(options.mtu);
        let port =
            switch.join(queues.len(), PortOptions { tap: Some(Arc::downgrade(&tap)), mtu, ..options })?;
        switch.set_hosts(&port, tap.host_addresses().unwrap_or_default());
        let plug = Arc::new(Plug { switch, port });
        let stats: Vec<Arc<NetStats>> = (0..queues.len()).map(|_| Arc::default()).collect();
        let this = Self {
            name: name.to_owned(),
            plug: plug.clone(),
            taps,
            stats,
            queues: Mutex::new(Some(queues.clone())),
            watcher: Mutex::default(),
        };
        let whole = tap;
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
        let (sender, stop) = mpsc::channel();
        // It keeps neither the network nor the port's place: those go when the export does.
        let (tap, own) = (Arc::downgrade(&whole), plug.clone());
        let watch = move || watch(&own.switch, &own.port, &tap, &stop);
        let builder = std::thread::Builder::new().name("uplink".into());
        match sandbox::spawn(ThreadKind::Control, builder, watch) {
            Ok(thread) => *this.watcher.locked() = Some((sender, thread)),
            Err(e) => {
                this.stop();
                return Err(Error::io(format!("cannot start the thread of uplink {name}"), e));
            }
        }
        Ok(this)
    }

    /// Its port as it is.
    pub fn port(&self) -> PortInfo {
        self.plug.info()
    }

    /// Counters of a queue; the tap is the guest.
    pub fn net_counters(&self, queue: u16) -> Option<NetQueueCounters> {
        self.stats.get(usize::from(queue)).map(|stats| stats.counters())
    }

    /// Ends it: what waits for the tap goes home, what waits in it is dropped. Idempotent.
    pub fn stop(&self) {
        if let Some((sender, thread)) = self.watcher.locked().take() {
            drop(sender);
            // It cannot panic; and if it did, there would be nothing to be done about it here.
            let _ = thread.join();
        }
        let Some(queues) = self.queues.locked().take() else { return };
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

/// The thread of an uplink.
fn watch(switch: &Switch, port: &Port, tap: &std::sync::Weak<Tap>, stop: &mpsc::Receiver<()>) {
    let ended = |wait| !matches!(stop.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
    let (mut was_blocked, mut turn) = (false, 0);
    loop {
        let Some(tap) = tap.upgrade() else { return };
        // What cannot be read now stays as it was: no guest may take over the host's address.
        if let Ok(mtu) = tap.mtu() {
            port.set_mtu(mtu);
        }
        if let Some(addresses) = tap.host_addresses() {
            switch.set_hosts(port, addresses);
        }
        drop(tap);
        switch.probe(port, turn);
        turn = turn.wrapping_add(1);
        if ended(PROBE_BACK) {
            return;
        }
        let blocked = port.is_blocked(switch.now_s());
        if blocked && !was_blocked {
            tracing::warn!("{}", switch.loop_of(port));
        } else if was_blocked && !blocked {
            tracing::info!("uplink {} forwards frames again: no loop probe came back lately", port.name());
        }
        was_blocked = blocked;
        if ended(LOOK_EVERY - PROBE_BACK) {
            return;
        }
    }
}

/// Reports that a queue has lost its tap. On a thread of its own: a worker writes no log line and waits for no client.
fn tell(name: &str, index: u16, why: &str, observer: &Arc<dyn Observer>) {
    let (name, why, observer) = (name.to_owned(), why.to_owned(), observer.clone());
    let told = move || {
        tracing::warn!("{name}:{index}: {why}; remove the export and its network, then add both again");
        observer.queue_broken(index, &why);
    };
    // It does what a session thread does for a front end's queues. Without it the queue's state still says so.
    sandbox::detach(ThreadKind::Session, std::thread::Builder::new().name("uplink-broken".into()), told);
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.stop();
    }
}
