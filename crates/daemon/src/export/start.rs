//! The second step of an export: its queues get their first workers, and its front end is started.
//! There is one function for each kind of device.

use std::sync::Arc;
use std::time::Duration;

use vshunt_engine::{FIRST_WORKER, LimitCell, Observer, QueueSet, Settings, WorkerId, Workers};
use vshunt_fuse::Fuse;
use vshunt_kernel_engine::{DiskPlan, KernelQueues};
use vshunt_nbd_server::NbdServer;
use vshunt_net::Switch;
use vshunt_net::switch::{MACS_GUEST, MACS_UPLINK, PortGuard, PortOptions, Uplink, VlanConfig};
use vshunt_tap::MTU_DEFAULT;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Engine, ExportKind, ExportSpec, Workers as Spread};
use vshunt_virtqueue::RingServer;

use super::prepared::{
    DiskServer, NetServer, Prepared, PreparedBlk, PreparedMount, PreparedNbd, PreparedNet, PreparedPort,
    PreparedUplink, not_the_kernel,
};
use super::queues::ExportQueues;
use super::served::{Frontend, Served};
use vshunt_vhost_user::blk::BlkDevice;
use vshunt_vhost_user::net::{NetDevice, has_control};
use vshunt_vhost_user::{Device, Socket, VhostUser, WorkerRings};

/// What the start of an export needs, in addition to what was opened.
pub(super) struct Start<'a> {
    pub(super) spec: &'a ExportSpec,
    pub(super) workers: &'a Arc<Workers>,
    pub(super) observer: Arc<dyn Observer>,
    /// Called for a mount, see [`Fuse::start`].
    pub(super) prepare_image: &'a dyn Fn() -> Result<()>,
    /// The workers that were made for the export, even if the start fails.
    pub(super) own_workers: &'a mut Vec<WorkerId>,
    /// The limits of the export.
    pub(super) limits: &'a Arc<LimitCell>,
}

impl Start<'_> {
    /// Makes queues, workers and front end, and starts them.
    ///
    /// # Errors
    /// Something cannot be made.
    pub(super) fn run(mut self, prepared: Prepared) -> Result<Served> {
        match prepared {
            Prepared::Blk(blk) => self.blk(blk),
            Prepared::Net(net) => self.net(net),
            Prepared::Port(port) => self.port(port),
            Prepared::Uplink(uplink) => self.uplink(uplink),
            Prepared::Mount(mount) => self.mount(mount),
            Prepared::Nbd(nbd) => self.nbd(nbd),
        }
    }

    /// Starts a disk for a VMM.
    fn blk(&mut self, prepared: PreparedBlk) -> Result<Served> {
        let PreparedBlk { socket, server, disk } = prepared;
        let spec = self.spec;
        let count = spec.queues.unwrap_or(1);
        let serial = spec.serial.as_deref().unwrap_or(&spec.disk);
        let block_size = spec.block_size.unwrap_or(0);
        let limits = self.limits.clone();
        let device = BlkDevice::limited(disk, count, block_size, serial, spec.readonly, limits);
        let reason = match server {
            DiskServer::User { reason } => reason,
            DiskServer::Kernel(plan) => match kernel_queues(spec, plan, count, serial, self.workers) {
                Ok(set) => {
                    let device = device.served_by_kernel(set.features());
                    return self.kernel_socket(socket, Arc::new(device), set);
                }
                // Only the start shows that the kernel refuses.
                Err(e) if spec.engine == Some(Engine::Auto) => Some(not_the_kernel(spec, e.to_string())),
                Err(e) => return Err(e),
            },
        };
        let set = self.measured_queues(count)?;
        self.user_socket(socket, Arc::new(device), set, reason)
    }

    /// Starts a network device for a VMM, on a tap.
    fn net(&mut self, prepared: PreparedNet) -> Result<Served> {
        let PreparedNet { socket, server, tap } = prepared;
        let spec = self.spec;
        if let Some(mtu) = spec.mtu {
            tap.set_mtu(mtu)?;
        }
        let mac = spec.mac.map(|mac| mac.0);
        match server {
            NetServer::User { queues, reason } => {
                let pairs = queues.len() as u16;
                let set = self.queues(pairs, has_control(pairs))?;
                let device = NetDevice::of_tap(&spec.name, tap, queues, set.clone(), mac);
                let device = device.map_err(|e| self.no_control(e))?.limited(self.limits.clone());
                self.user_socket(socket, Arc::new(device), set, reason)
            }
            NetServer::Kernel(plan) => {
                let set = KernelQueues::new_net(&spec.name, plan, self.workers)?;
                if spec.workers == Spread::PerCpu {
                    pin_each(&set)?;
                }
                let device = NetDevice::of_kernel(&spec.name, tap, set.len(), mac, set.features());
                self.kernel_socket(socket, Arc::new(device), set)
            }
        }
    }

    /// Starts a network device for a VMM, on a port of a switch.
    fn port(&mut self, prepared: PreparedPort) -> Result<Served> {
        let PreparedPort { socket, switch } = prepared;
        let spec = self.spec;
        let auto = spec.engine == Some(Engine::Auto);
        let reason =
            auto.then(|| not_the_kernel(spec, "the kernel cannot serve a port of a switch".to_owned()));
        let pairs = spec.queues.unwrap_or(1);
        let set = self.queues(pairs, has_control(pairs))?;
        let guard = join(spec, switch, pairs)?;
        let mac = spec.mac.map(|mac| mac.0);
        let device = NetDevice::of_switch(&spec.name, guard, set.clone(), mac, spec.mtu);
        let device = device.map_err(|e| self.no_control(e))?.limited(self.limits.clone());
        self.user_socket(socket, Arc::new(device), set, reason)
    }

    /// Starts a tap as a port of a switch.
    fn uplink(&mut self, prepared: PreparedUplink) -> Result<Served> {
        let PreparedUplink { tap, switch } = prepared;
        let spec = self.spec;
        if let Some(mtu) = spec.mtu {
            tap.set_mtu(mtu)?;
        }
        let set = self.queues(spec.queues.unwrap_or(1), false)?;
        let uplink = Uplink::start(&spec.name, tap, switch, port_options(spec), &set, &self.observer)?;
        Ok(Served {
            frontend: Frontend::Uplink(uplink),
            queues: ExportQueues::User(set),
            engine_reason: None,
        })
    }

    /// Starts a disk as a file of the host.
    fn mount(&mut self, prepared: PreparedMount) -> Result<Served> {
        let PreparedMount { plan, disk } = prepared;
        let set = self.measured_queues(plan.queues)?;
        let (observer, limits) = (self.observer.clone(), self.limits.clone());
        let mount = Fuse::start(self.spec, plan, disk, &set, observer, self.prepare_image, limits)?;
        Ok(Served { frontend: Frontend::Fuse(mount), queues: ExportQueues::User(set), engine_reason: None })
    }

    /// Starts a disk for NBD clients.
    fn nbd(&mut self, prepared: PreparedNbd) -> Result<Served> {
        let PreparedNbd { listening, tls, disk, bitmaps } = prepared;
        let set = self.measured_queues(self.spec.queues.unwrap_or(1))?;
        let config = vshunt_nbd_server::Config {
            name: self.spec.name.clone(),
            disk,
            readonly: self.spec.refuses_writes(),
            limits: self.limits.clone(),
            bitmaps,
            tls,
        };
        let server = NbdServer::start(config, listening, set.clone(), self.observer.clone())?;
        Ok(Served { frontend: Frontend::Nbd(server), queues: ExportQueues::User(set), engine_reason: None })
    }

    /// Makes queues on their first workers. With `control`, there is one more queue for a control
    /// virtqueue.
    fn queues(&mut self, count: u16, control: bool) -> Result<Arc<QueueSet>> {
        let mut workers_of = first_workers(self.spec, count, self.workers, self.own_workers)?;
        // A control queue is mostly idle, and must not keep a worker from being freed.
        workers_of.extend(control.then_some(FIRST_WORKER));
        Ok(Arc::new(QueueSet::new(&self.spec.name, self.workers, &workers_of)?))
    }

    /// Makes queues of a disk, whose service times are measured.
    fn measured_queues(&mut self, count: u16) -> Result<Arc<QueueSet>> {
        let set = self.queues(count, false)?;
        let mode = self.spec.latency.unwrap_or_default();
        (0..count).for_each(|index| set.stats(index).latency.set_mode(mode));
        Ok(set)
    }

    /// Starts a device whose rings workers of this process serve. `reason`: why the kernel does not
    /// serve them.
    fn user_socket(
        &self,
        socket: Socket,
        device: Arc<dyn Device>,
        set: Arc<QueueSet>,
        reason: Option<String>,
    ) -> Result<Served> {
        let rings = Arc::new(WorkerRings::new(set.clone(), device.clone()));
        self.socket(socket, device, rings, ExportQueues::User(set), reason)
    }

    /// Starts a device whose rings the kernel serves.
    fn kernel_socket(
        &self,
        socket: Socket,
        device: Arc<dyn Device>,
        set: Arc<KernelQueues>,
    ) -> Result<Served> {
        self.socket(socket, device, set.clone(), ExportQueues::Kernel(set), None)
    }

    fn socket(
        &self,
        socket: Socket,
        device: Arc<dyn Device>,
        server: Arc<dyn RingServer>,
        queues: ExportQueues,
        engine_reason: Option<String>,
    ) -> Result<Served> {
        let may_block = self.spec.memory_may_block == Some(true);
        let socket =
            VhostUser::start(&self.spec.name, socket, device, server, self.observer.clone(), may_block)?;
        Ok(Served { frontend: Frontend::VhostUser(socket), queues, engine_reason })
    }

    fn no_control(&self, e: std::io::Error) -> Error {
        Error::io(format!("export {} can have no control queue", self.spec.name), e)
    }
}

/// Makes a port of a switch for an export.
fn join(spec: &ExportSpec, switch: Arc<Switch>, pairs: u16) -> Result<PortGuard> {
    let port = switch.join(pairs, port_options(spec))?;
    Ok(PortGuard { switch, port })
}

/// Returns the options of the port, with defaults for those that are not given.
fn port_options(spec: &ExportSpec) -> PortOptions {
    let macs = if spec.kind == ExportKind::Uplink { MACS_UPLINK } else { MACS_GUEST };
    PortOptions {
        name: spec.name.clone(),
        mac: spec.mac.map(|mac| mac.0),
        mac_filter: spec.mac_filter.unwrap_or(spec.mac.is_some()),
        mac_limit: spec.mac_limit.unwrap_or(macs),
        vlans: VlanConfig::new(spec.vlan, spec.trunk.as_ref()),
        isolated: spec.isolated.unwrap_or(false),
        reserved: spec.reserved.unwrap_or(false),
        mtu: spec.mtu.unwrap_or(MTU_DEFAULT),
        tap: None,
    }
}

/// Makes the queues of a disk that the kernel serves, with their workers.
fn kernel_queues(
    spec: &ExportSpec,
    plan: DiskPlan,
    count: u16,
    serial: &str,
    workers: &Arc<Workers>,
) -> Result<Arc<KernelQueues>> {
    let set = KernelQueues::new(&spec.name, plan, count, serial, workers)?;
    spread_kernel(spec, &set)?;
    Ok(set)
}

/// Pins the worker of each queue to a CPU, in turn.
fn pin_each(set: &KernelQueues) -> Result<()> {
    let cpus = vshunt_engine::allowed_cpus();
    (0..set.len()).try_for_each(|i| set.pin(set.first_worker(i), cpus[usize::from(i) % cpus.len()]))
}

/// Queues are distributed before any of them runs, so there is nothing to wait for.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(1);

/// Distributes the queues over new workers of the kernel, as the request says. The first worker
/// exists already. All of them end with the device.
fn spread_kernel(spec: &ExportSpec, set: &KernelQueues) -> Result<()> {
    let queues = set.len();
    let count = match spec.workers {
        // The kernel's workers do not follow load.
        Spread::Default | Spread::Auto => return Ok(()),
        Spread::PerQueue | Spread::PerCpu => u32::from(queues),
        Spread::Count(n) => n,
    };
    let mut ids = vec![set.first_worker(0)];
    for i in 1..count {
        ids.push(set.new_worker(Some(format!("{}/{i}", spec.name)), &Settings::default())?);
    }
    if spec.workers == Spread::PerCpu {
        let cpus = vshunt_engine::allowed_cpus();
        for (i, &id) in ids.iter().enumerate() {
            set.pin(id, cpus[i % cpus.len()])?;
        }
    }
    for (index, &id) in (0..queues).zip(ids.iter().cycle()) {
        set.attach(index, id, ATTACH_TIMEOUT)?;
    }
    Ok(())
}

/// Returns the first worker of each queue. New workers are made as the request says.
fn first_workers(
    spec: &ExportSpec,
    queues: u16,
    workers: &Workers,
    own: &mut Vec<WorkerId>,
) -> Result<Vec<WorkerId>> {
    let count = match spec.workers {
        Spread::Default => return Ok(vec![FIRST_WORKER; queues.into()]),
        Spread::Auto => 1,
        Spread::PerQueue | Spread::PerCpu => u32::from(queues),
        Spread::Count(n) => n,
    };
    let mut settings = Settings { poll_us: spec.poll_us, ..Settings::default() };
    if spec.workers == Spread::PerCpu {
        // The worker shares a CPU with the task that it serves. As a normal task it would take the
        // CPU for each request. As a batch task it takes all waiting requests when the other task
        // sleeps.
        settings.batch = spec.kind == ExportKind::Fuse;
        // A worker that polls would keep the task that it serves from running on their CPU.
        settings.poll_us = Some(spec.poll_us.unwrap_or(0));
    }
    let cpus = vshunt_engine::allowed_cpus();
    for i in 0..count {
        if spec.workers == Spread::PerCpu {
            // The CPU of the ring queue, if this process may run on it.
            let own = Some(i as usize).filter(|cpu| cpus.contains(cpu));
            settings.cpu = Some(vec![own.unwrap_or(cpus[i as usize % cpus.len()])]);
        }
        own.push(workers.create(Some(format!("{}/{i}", spec.name)), &settings)?);
    }
    Ok(own.iter().copied().cycle().take(queues.into()).collect())
}
