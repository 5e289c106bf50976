//! A tap as a port of a switch. It has no front end and no guest; its queues run from its start to
//! its end.
//!
//! A thread of each uplink checks every [`CHECK_EVERY`] what can change without a command: the
//! interface's MTU, the addresses of the host behind it, and loops through another uplink.

mod from_tap;
mod queue;
mod to_tap;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use vshunt_engine::{Observer, QueueSet};
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DropReason, NetQueueCounters, PortInfo};
use vshunt_types::sync::Locked;

use self::queue::{UplinkParts, UplinkQueue};
use super::Switch;
use super::offload::AcceptedOffloads;
use super::port::{Port, PortOptions};
use super::port_guard::PortGuard;
use super::probe::PROBE_EVERY_S;
use crate::counters::NetStats;
use vshunt_tap::{HEADER_LONG, Offloads, Tap, TapQueue};

/// How often the thread checks. Each time is a round of loop probes.
const CHECK_EVERY: Duration = Duration::from_secs(PROBE_EVERY_S as u64);
/// Time after the probes were sent at which the thread checks whether they came back.
const PROBE_BACK: Duration = Duration::from_millis(200);

/// See the module.
pub struct Uplink {
    name: String,
    guard: Arc<PortGuard>,
    taps: Vec<Arc<TapQueue>>,
    stats: Vec<Arc<NetStats>>,
    /// `None` once it is stopped. The lock guards nothing else.
    queues: Mutex<Option<Arc<QueueSet>>>,
    /// The thread ends when its sender is dropped. `None` once it was stopped. The lock guards
    /// nothing else.
    watcher: Mutex<Option<(mpsc::Sender<()>, JoinHandle<()>)>>,
}

impl Uplink {
    /// Joins a tap to a switch, with one of its queues for each of `queues`. `options.tap` is
    /// ignored, and `options.mtu` is used if the tap's MTU cannot be read.
    ///
    /// # Errors
    /// A call on the tap fails, or the switch is full. Nothing is joined then.
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
        // The switch does the offload work for ports that do not accept such frames.
        tap.set_offloads(Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: false, uso })?;
        let taps = tap.queues(queues.len())?;
        let mtu = tap.mtu().unwrap_or(options.mtu);
        let port =
            switch.join(queues.len(), PortOptions { tap: Some(Arc::downgrade(&tap)), mtu, ..options })?;
        switch.set_hosts(&port, tap.host_addresses().unwrap_or_default());
        let guard = Arc::new(PortGuard { switch, port });
        let stats: Vec<Arc<NetStats>> = (0..queues.len()).map(|_| Arc::default()).collect();
        let this = Self {
            name: name.to_owned(),
            guard: guard.clone(),
            taps,
            stats,
            queues: Mutex::new(Some(queues.clone())),
            watcher: Mutex::default(),
        };
        let whole = tap;
        for (index, (tap, net)) in (0..).zip(this.taps.iter().zip(&this.stats)) {
            let (observer, own) = (observer.clone(), name.to_owned());
            let parts = UplinkParts {
                tap: tap.clone(),
                guard: guard.clone(),
                index,
                accepted: AcceptedOffloads::of_tap(uso),
                stats: queues.stats(index).clone(),
                net: net.clone(),
                on_broken: Box::new(move |why| report_broken(&own, index, why, &observer)),
            };
            crate::slots::slot(&guard.port.queues, index).open();
            queues.start(index, Box::new(UplinkQueue::new(parts)));
            if let Err(e) = tap.attach() {
                this.stop();
                return Err(e);
            }
        }
        let (sender, stop) = mpsc::channel();
        // The thread does not keep the network, which ends with the export.
        let (tap, own) = (Arc::downgrade(&whole), guard.clone());
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

    /// Returns its port as it is now.
    pub fn port(&self) -> PortInfo {
        self.guard.info()
    }

    /// Returns the counters of a queue. The tap is counted as the guest.
    pub fn net_counters(&self, queue: u16) -> Option<NetQueueCounters> {
        self.stats.get(usize::from(queue)).map(|stats| stats.counters())
    }

    /// Stops it: frames that wait for the tap are returned to their senders, frames that wait in it
    /// are dropped. Idempotent.
    pub fn stop(&self) {
        if let Some((sender, thread)) = self.watcher.locked().take() {
            drop(sender);
            // A panic of the thread cannot be handled here.
            let _ = thread.join();
        }
        let Some(queues) = self.queues.locked().take() else { return };
        for queue in &self.guard.port.queues {
            queue.close();
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

/// The function of an uplink's thread.
fn watch(switch: &Switch, port: &Port, tap: &std::sync::Weak<Tap>, stop: &mpsc::Receiver<()>) {
    let ended = |wait| !matches!(stop.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
    let (mut was_blocked, mut round) = (false, 0);
    loop {
        let Some(tap) = tap.upgrade() else { return };
        // A value that cannot be read stays as it was, so that no guest can take the host's
        // address.
        if let Ok(mtu) = tap.mtu() {
            port.set_mtu(mtu);
        }
        if let Some(addresses) = tap.host_addresses() {
            switch.set_hosts(port, addresses);
        }
        drop(tap);
        switch.probe(port, round);
        round = round.wrapping_add(1);
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
        if ended(CHECK_EVERY - PROBE_BACK) {
            return;
        }
    }
}

/// Reports that a queue has lost its tap. This runs on its own thread, because a worker writes no
/// log line and waits for no client.
fn report_broken(name: &str, index: u16, why: &str, observer: &Arc<dyn Observer>) {
    let (name, why, observer) = (name.to_owned(), why.to_owned(), observer.clone());
    let report = move || {
        tracing::warn!("{name}:{index}: {why}; remove the export and its network, then add both again");
        observer.queue_broken(index, &why);
    };
    // A front end's queues have a session thread for this. If the thread cannot be made, the
    // queue's state still shows it.
    sandbox::detach(ThreadKind::Session, std::thread::Builder::new().name("uplink-broken".into()), report);
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.stop();
    }
}
