//! A network served by the kernel: `/dev/vhost-net` between a guest's queue pairs and the queues of
//! a tap.
//!
//! Each pair has an open `/dev/vhost-net` of its own, and so a worker of its own. The device makes
//! one worker with its owner, and has no call to make, move or free workers (ENOTTY). Several
//! workers therefore need several devices. Ring 0 of such a device is the guest's receive ring,
//! ring 1 its transmit ring. A ring runs while it has the tap's queue as its backend.

use std::os::fd::AsFd;
use std::sync::Arc;

use vhost_kernel::Vhost;
use virtio::features::{
    VHOST_F_LOG_ALL, VIRTIO_F_VERSION_1, VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, bit,
};
use virtio::net::*;
use vshunt_engine::{KernelWorker, QueueStats, Settings, WorkerId, Workers};
use vshunt_net::negotiated;
use vshunt_tap::{Tap, TapQueue};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, Workers as Spread};

use super::workers;

const DEVICE: &str = "/dev/vhost-net";

/// Rings of one device: receive and transmit.
const RINGS: u16 = 2;

/// Features of the device that are offered to the guest. ACCESS_PLATFORM needs an IOTLB, of which
/// the front end tells this process nothing. With bit 27 (VHOST_NET_F_VIRTIO_NET_HDR here,
/// ANY_LAYOUT elsewhere) vhost-net would make the headers that the tap makes.
const PASSED_ON: u64 = bit(VIRTIO_NET_F_MRG_RXBUF)
    | bit(VIRTIO_RING_F_INDIRECT_DESC)
    | bit(VIRTIO_RING_F_EVENT_IDX)
    | bit(VIRTIO_F_VERSION_1)
    | bit(VHOST_F_LOG_ALL);

/// The opened files that the kernel needs to serve a network.
pub struct NetPlan {
    tap: Arc<Tap>,
    pairs: Vec<(Vhost, Arc<TapQueue>)>,
}

impl NetPlan {
    /// Returns the number of queue pairs.
    pub fn pairs(&self) -> u16 {
        self.pairs.len() as u16
    }
}

/// Opens the files that the kernel needs to serve `tap` with `pairs` queue pairs, as `spec`
/// demands.
///
/// # Errors
/// The reason why the kernel cannot serve it, in words.
pub fn plan_net(spec: &ExportSpec, tap: &Arc<Tap>, pairs: u16) -> std::result::Result<NetPlan, String> {
    match spec.workers {
        Spread::Count(n) if n != u32::from(pairs) => {
            return Err(format!(
                "workers={n} for {pairs} queue pairs; each has a worker of its own here, so leave it out"
            ));
        }
        _ => {}
    }
    let mut plan = NetPlan { tap: tap.clone(), pairs: Vec::new() };
    // The device is opened first. If it is missing, that is the reason to report, whatever the
    // state of the tap.
    let open = || Vhost::open(DEVICE).map_err(|e| e.to_string());
    let first = open()?;
    let queues = tap.queues(pairs).map_err(|e| e.to_string())?;
    let mut devices = vec![first];
    for _ in 1..pairs {
        devices.push(open()?);
    }
    plan.pairs.extend(devices.into_iter().zip(queues));
    Ok(plan)
}

/// One queue pair.
struct KernelPair {
    device: Vhost,
    queue: Arc<TapQueue>,
    worker: WorkerId,
    stats: Arc<QueueStats>,
}

/// A network that the kernel serves.
pub(super) struct ServedNet {
    export: String,
    tap: Arc<Tap>,
    pairs: Vec<KernelPair>,
}

/// The worker of a pair. It ends with its device, which the export keeps open.
struct PairWorker {
    export: String,
}

impl KernelWorker for PairWorker {
    fn export(&self) -> &str {
        &self.export
    }

    fn free(&self) -> Result<()> {
        Ok(())
    }

    /// The kernel does not count there.
    fn requests(&self) -> u64 {
        0
    }
}

impl ServedNet {
    /// Sets up the devices for an export, each with its worker.
    pub(super) fn new(export: &str, plan: NetPlan, workers: &Arc<Workers>) -> Result<Self> {
        let NetPlan { tap, pairs } = plan;
        let mut served = Self { export: export.to_owned(), tap, pairs: Vec::new() };
        for (at, (device, queue)) in pairs.into_iter().enumerate() {
            let owner = || workers::own(&device).map(|()| 0);
            let worker = |_, _| Arc::new(PairWorker { export: export.to_owned() }) as Arc<dyn KernelWorker>;
            let name = Some(format!("{export}/{at}"));
            let made = workers::adopt(export, workers, name, &Settings::default(), owner, drop, worker);
            let worker = made.inspect_err(|_| workers.forget(export))?;
            served.pairs.push(KernelPair { device, queue, worker, stats: Arc::default() });
        }
        Ok(served)
    }

    fn pair(&self, ring: u16) -> &KernelPair {
        &self.pairs[usize::from(ring / RINGS)]
    }

    pub(super) fn transmits(ring: u16) -> bool {
        !ring.is_multiple_of(RINGS)
    }

    pub(super) fn of(&self, ring: u16) -> (&Vhost, u32) {
        (&self.pair(ring).device, (ring % RINGS).into())
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &Vhost> {
        self.pairs.iter().map(|pair| &pair.device)
    }

    pub(super) fn features(&self) -> vhost_kernel::Result<u64> {
        self.devices().try_fold(PASSED_ON, |all, device| Ok(all & device.features()?))
    }

    /// Sets the headers and offloads that the guest accepted on the tap.
    pub(super) fn negotiated(&self, features: u64) -> std::result::Result<(), String> {
        negotiated::agree(&self.tap, features).map(drop)
    }

    pub(super) fn run(&self, ring: u16, on: bool) -> vhost_kernel::Result<()> {
        let pair = self.pair(ring);
        pair.device.net_set_backend((ring % RINGS).into(), on.then(|| pair.queue.as_fd()))
    }

    /// The tap sends frames to attached queues. A queue that is never emptied would lose its share
    /// of them.
    pub(super) fn open(&self, ring: u16, on: bool) -> Result<()> {
        let queue = &self.pair(ring).queue;
        match (ring % RINGS, on) {
            (0, true) => queue.attach(),
            (0, false) => queue.detach(),
            _ => Ok(()),
        }
    }

    pub(super) fn stats(&self, queue: u16) -> &Arc<QueueStats> {
        &self.pairs[usize::from(queue)].stats
    }

    pub(super) fn worker(&self, queue: u16) -> WorkerId {
        self.pairs[usize::from(queue)].worker
    }

    pub(super) fn attach(&self, queue: u16, worker: WorkerId) -> Result<()> {
        let own = self.worker(queue);
        if worker == own {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "queue {}:{queue} stays on worker {own}: {DEVICE} has no call to attach rings to workers; each queue pair \
             has a worker of its own, which 'worker set {own} --cpu LIST' keeps where you want it",
            self.export
        )))
    }

    pub(super) fn no_workers(&self) -> Error {
        Error::unsupported(format!(
            "export {} gets no more workers: {DEVICE} has no call to make them; each queue pair has one of its own, \
             which 'worker set ID --cpu LIST' keeps where you want it",
            self.export
        ))
    }
}
