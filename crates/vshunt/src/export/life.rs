//! One export's life: create, serve, remove.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use virtio::features::{VIRTIO_F_RING_PACKED, bit};

use super::spec::{ExportInfo, ExportSpec, QueueInfo, Workers as Spread};
use crate::backend::block::Disk;
use crate::error::{Error, Result};
use crate::frontend::vhost_user::blk::BlkDevice;
use crate::frontend::vhost_user::{Observer, Socket, VhostUser, adopt, listen};
use crate::queue::blk::SERIAL_MAX;
use crate::worker::{QueueSet, Settings, State, WorkerId, Workers};

/// Virtqueues of one export: what QEMU's virtio devices can have less their own needs, and a VMM's usual most.
pub const MAX_QUEUES: u16 = 256;

/// An export that is served.
pub(super) struct Export {
    pub(super) spec: ExportSpec,
    pub(super) readonly: bool,
    frontend: VhostUser,
    queues: Arc<QueueSet>,
    /// Made for it, and freed with it.
    own_workers: Vec<WorkerId>,
    workers: Arc<Workers>,
}

impl Export {
    /// Checks the whole request before anything is made; what was made is unmade on an error.
    pub(super) fn create(
        mut spec: ExportSpec,
        disk: Arc<Disk>,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let queues = spec.queues.unwrap_or_else(online_cpus);
        spec.queues = Some(queues);
        check(&spec, queues, &disk)?;
        let socket = open_socket(&spec)?;
        let mut own_workers = Vec::new();
        let made = Self::serve(&spec, socket, disk, workers, observer, &mut own_workers);
        match made {
            Ok((frontend, queues, readonly)) => {
                Ok(Self { spec, readonly, frontend, queues, own_workers, workers: workers.clone() })
            }
            Err(e) => {
                for id in own_workers {
                    let _ = workers.free(id);
                }
                Err(e)
            }
        }
    }

    fn serve(
        spec: &ExportSpec,
        socket: Socket,
        disk: Arc<Disk>,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
        own_workers: &mut Vec<WorkerId>,
    ) -> Result<(VhostUser, Arc<QueueSet>, bool)> {
        let count = spec.queues.unwrap_or(1);
        let homes = homes(spec, count, workers, own_workers)?;
        let set = Arc::new(QueueSet::new(&spec.name, workers, &homes)?);
        let serial = spec.serial.as_deref().unwrap_or(&spec.disk);
        let device = BlkDevice::new(disk, count, spec.block_size.unwrap_or(0), serial, spec.readonly);
        let readonly = device.readonly();
        let frontend = VhostUser::start(&spec.name, socket, Arc::new(device), set.clone(), observer)?;
        Ok((frontend, set, readonly))
    }

    pub(super) fn connected(&self) -> bool {
        self.frontend.connected()
    }

    pub(super) fn config_changed(&self) {
        self.frontend.config_changed();
    }

    pub(super) fn queue_set(&self) -> &Arc<QueueSet> {
        &self.queues
    }

    pub(super) fn info(&self) -> ExportInfo {
        ExportInfo {
            spec: self.spec.clone(),
            engine: "user".to_owned(),
            connected: self.connected(),
            features: feature_names(self.frontend.features()),
            queue_list: self.queue_infos(),
        }
    }

    pub(super) fn queue_infos(&self) -> Vec<QueueInfo> {
        let packed = self.frontend.features() & bit(VIRTIO_F_RING_PACKED) != 0;
        (0..self.queues.len())
            .map(|index| {
                let stats = self.queues.stats(index);
                let (worker, generation) = self.queues.home(index);
                let state = match stats.state() {
                    State::Stopped => "stopped",
                    State::Running => "running",
                    State::Broken => "broken",
                };
                QueueInfo {
                    export: self.spec.name.clone(),
                    index,
                    worker,
                    state: state.to_owned(),
                    size: stats.size.load(Relaxed),
                    packed,
                    in_flight: stats.in_flight.load(Relaxed),
                    generation,
                    requests: stats.requests.load(Relaxed),
                    errors: stats.errors.load(Relaxed),
                    read_bytes: stats.read_bytes.load(Relaxed),
                    write_bytes: stats.write_bytes.load(Relaxed),
                    kicks: stats.kicks.load(Relaxed),
                    notifications: stats.notifications.load(Relaxed),
                }
            })
            .collect()
    }

    /// Disconnects, drains, removes the socket, frees the workers made for it that have no other queue.
    pub(super) fn remove(self: Arc<Self>) {
        self.frontend.stop();
        let (workers, own) = (self.workers.clone(), self.own_workers.clone());
        // The queue set goes with the last holder; a status that is being read may be one for a moment.
        let mut export = self;
        loop {
            match Arc::try_unwrap(export) {
                Ok(last) => break drop(last),
                Err(shared) => {
                    export = shared;
                    std::thread::yield_now();
                }
            }
        }
        for id in own {
            if let Err(e) = workers.free(id) {
                tracing::debug!("worker {id} stays: {e}");
            }
        }
    }
}

fn check(spec: &ExportSpec, queues: u16, disk: &Disk) -> Result<()> {
    let name = &spec.name;
    if queues == 0 || queues > MAX_QUEUES {
        return Err(Error::invalid(format!(
            "export {name}: queues={queues} is out of range; 1 to {MAX_QUEUES} is possible"
        )));
    }
    if spec.workers == Spread::Count(0) {
        return Err(Error::invalid(format!(
            "export {name}: workers=0 would serve nothing; give 1 or more, or per-queue"
        )));
    }
    if let Some(serial) = &spec.serial
        && serial.len() > SERIAL_MAX
    {
        return Err(Error::invalid(format!(
            "export {name}: the serial has {} bytes; {SERIAL_MAX} is the most",
            serial.len()
        )));
    }
    if let Some(size) = spec.block_size {
        let least = disk.limits().block_size;
        if !size.is_power_of_two() || !(512..=4096).contains(&size) {
            return Err(Error::invalid(format!(
                "export {name}: block-size={size} is not one of 512, 1024, 2048, 4096"
            )));
        }
        if size < least {
            return Err(Error::invalid(format!("export {name}: the disk needs block-size={least} at least")));
        }
        if !disk.size_bytes().is_multiple_of(u64::from(size)) {
            return Err(Error::invalid(format!(
                "export {name}: the disk's size is no multiple of block-size={size}"
            )));
        }
    }
    Ok(())
}

fn open_socket(spec: &ExportSpec) -> Result<Socket> {
    match (&spec.socket, spec.fd) {
        (Some(path), None) => listen(path),
        (None, Some(fd)) => adopt(fd),
        _ => Err(Error::invalid(format!("export {}: give either socket=PATH or fd=N", spec.name))),
    }
}

/// Which worker each queue starts on; new ones are made as the spec asks.
fn homes(
    spec: &ExportSpec,
    queues: u16,
    workers: &Workers,
    own: &mut Vec<WorkerId>,
) -> Result<Vec<WorkerId>> {
    let count = match spec.workers {
        Spread::Default => return Ok(vec![0; queues.into()]),
        Spread::PerQueue => u32::from(queues),
        Spread::Count(n) => n,
    };
    let settings = Settings { poll_us: spec.poll_us, ..Settings::default() };
    for i in 0..count {
        own.push(workers.create(Some(format!("{}/{i}", spec.name)), &settings)?);
    }
    Ok(own.iter().copied().cycle().take(queues.into()).collect())
}

fn online_cpus() -> u16 {
    let n = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(n).unwrap_or(MAX_QUEUES).min(MAX_QUEUES)
}

/// Names of the virtio and vhost-user feature bits that this device may have.
fn feature_names(bits: u64) -> Vec<String> {
    const NAMES: [(u32, &str); 16] = [
        (2, "SEG_MAX"),
        (5, "RO"),
        (6, "BLK_SIZE"),
        (9, "FLUSH"),
        (10, "TOPOLOGY"),
        (11, "CONFIG_WCE"),
        (12, "MQ"),
        (13, "DISCARD"),
        (14, "WRITE_ZEROES"),
        (26, "LOG_ALL"),
        (28, "INDIRECT_DESC"),
        (29, "EVENT_IDX"),
        (30, "PROTOCOL_FEATURES"),
        (32, "VERSION_1"),
        (34, "RING_PACKED"),
        (35, "IN_ORDER"),
    ];
    NAMES.iter().filter(|(bit, _)| bits & (1 << bit) != 0).map(|(_, name)| (*name).to_owned()).collect()
}
