//! An export begins: its queues get their first workers, and its frontend is made.

use std::sync::Arc;
use std::time::Duration;

use vshunt_engine::Observer;
use vshunt_engine::{FIRST_WORKER, QueueSet, Settings, WorkerId, Workers};
use vshunt_fuse::Fuse;
use vshunt_net::switch::{Lan, MACS_GUEST, MACS_UPLINK, PortOptions};
use vshunt_net::tap::MTU_DEFAULT;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Engine, ExportKind, ExportSpec, Workers as Spread};

use super::opened::{CardServer, Opened, Server, not_the_kernel};
use super::served::{Frontend, Served};
use crate::frontend::Queues;
use crate::frontend::kernel::{self, KernelQueues};
use crate::frontend::uplink::Uplink;
use crate::frontend::vhost_user::blk::BlkDevice;
use crate::frontend::vhost_user::net::{NetDevice, has_control};
use crate::frontend::vhost_user::{Device, VhostUser};
use crate::queue::net::switch::Plug;

impl Opened {
    /// Makes queues, workers and frontend, and lets them begin; workers that were made are in `own_workers` even if that fails.
    /// `prepare` is for a mount; see [`Fuse::start`].
    ///
    /// # Errors
    /// What cannot be made.
    pub(super) fn begin(
        self,
        spec: &ExportSpec,
        workers: &Arc<Workers>,
        observer: Arc<dyn Observer>,
        prepare: &dyn Fn() -> Result<()>,
        own_workers: &mut Vec<WorkerId>,
    ) -> Result<Served> {
        let mut queues = |count, control: bool| -> Result<Arc<QueueSet>> {
            let mut workers_of = first_workers(spec, count, workers, own_workers)?;
            // It seldom has work, and keeps no worker from being freed.
            workers_of.extend(control.then_some(FIRST_WORKER));
            Ok(Arc::new(QueueSet::new(&spec.name, workers, &workers_of)?))
        };
        let no_control = |e| Error::io(format!("export {} can have no control queue", spec.name), e);
        let start = |socket, device: Arc<dyn Device>, queues: Queues, engine_reason| {
            let may_block = spec.memory_may_block == Some(true);
            let (name, observer) = (&spec.name, observer.clone());
            let socket = VhostUser::start(name, socket, device, queues.clone(), observer, may_block)?;
            Ok(Served { frontend: Frontend::VhostUser(socket), queues, engine_reason })
        };
        match self {
            Self::Socket(socket, server, disk) => {
                let count = spec.queues.unwrap_or(1);
                let serial = spec.serial.as_deref().unwrap_or(&spec.disk);
                let device = BlkDevice::new(disk, count, spec.block_size.unwrap_or(0), serial, spec.readonly);
                match server {
                    Server::User { why } => {
                        let set = queues(count, false)?;
                        start(socket, Arc::new(device), Queues::user(set, 1), why)
                    }
                    Server::Kernel(plan) => match kernel_queues(spec, plan, count, serial, workers) {
                        Ok(set) => {
                            let device = device.served_by_kernel(set.features());
                            start(socket, Arc::new(device), Queues::Kernel(set), None)
                        }
                        // It was not to be seen before that it would refuse.
                        Err(e) if spec.engine == Some(Engine::Auto) => {
                            let set = queues(count, false)?;
                            let queues = Queues::user(set, 1);
                            start(socket, Arc::new(device), queues, Some(not_the_kernel(spec, e.to_string())))
                        }
                        Err(e) => Err(e),
                    },
                }
            }
            Self::Card(socket, server, tap) => {
                if let Some(mtu) = spec.mtu {
                    tap.set_mtu(mtu)?;
                }
                let mac = spec.mac.map(|mac| mac.0);
                match server {
                    CardServer::User { queues: of_tap, why } => {
                        let pairs = of_tap.len() as u16;
                        let set = queues(pairs, has_control(pairs))?;
                        let device = NetDevice::of_tap(&spec.name, tap, of_tap, set.clone(), mac);
                        let device = device.map_err(no_control)?;
                        start(socket, Arc::new(device), Queues::card(set, has_control(pairs)), why)
                    }
                    CardServer::Kernel(plan) => {
                        let set = KernelQueues::new_net(&spec.name, plan, workers)?;
                        if spec.workers == Spread::PerCpu {
                            pin_each(&set)?;
                        }
                        let device = NetDevice::of_kernel(&spec.name, tap, set.len(), mac, set.features());
                        start(socket, Arc::new(device), Queues::Kernel(set), None)
                    }
                }
            }
            Self::Port(socket, switch) => {
                let auto = spec.engine == Some(Engine::Auto);
                let why = auto.then(|| not_the_kernel(spec, "a switch is ours".to_owned()));
                let pairs = spec.queues.unwrap_or(1);
                let set = queues(pairs, has_control(pairs))?;
                let port = switch.join(pairs, port_options(spec))?;
                let mac = spec.mac.map(|mac| mac.0);
                let plug = Plug { switch, port };
                let device = NetDevice::of_switch(&spec.name, plug, set.clone(), mac, spec.mtu);
                let device = device.map_err(no_control)?;
                start(socket, Arc::new(device), Queues::card(set, has_control(pairs)), why)
            }
            Self::Uplink(tap, switch) => {
                if let Some(mtu) = spec.mtu {
                    tap.set_mtu(mtu)?;
                }
                let set = queues(spec.queues.unwrap_or(1), false)?;
                let uplink = Uplink::start(&spec.name, tap, switch, port_options(spec), &set, &observer)?;
                Ok(Served {
                    frontend: Frontend::Uplink(uplink),
                    queues: Queues::user(set, 1),
                    engine_reason: None,
                })
            }
            Self::Mount(plan, disk) => {
                let set = queues(plan.queues, false)?;
                let mount = Fuse::start(spec, plan, disk, &set, observer, prepare)?;
                Ok(Served {
                    frontend: Frontend::Fuse(mount),
                    queues: Queues::user(set, 1),
                    engine_reason: None,
                })
            }
        }
    }
}

/// What an export's port is to be, with what is not said.
fn port_options(spec: &ExportSpec) -> PortOptions {
    let macs = if spec.kind == ExportKind::Uplink { MACS_UPLINK } else { MACS_GUEST };
    PortOptions {
        name: spec.name.clone(),
        mac: spec.mac.map(|mac| mac.0),
        mac_filter: spec.mac_filter.unwrap_or(spec.mac.is_some()),
        mac_limit: spec.mac_limit.unwrap_or(macs),
        lan: Lan::new(spec.vlan, spec.trunk.as_ref()),
        isolated: spec.isolated.unwrap_or(false),
        reserved: spec.reserved.unwrap_or(false),
        mtu: spec.mtu.unwrap_or(MTU_DEFAULT),
        tap: None,
    }
}

/// The queues of a disk in the kernel's hands, with their workers.
fn kernel_queues(
    spec: &ExportSpec,
    plan: kernel::Plan,
    count: u16,
    serial: &str,
    workers: &Arc<Workers>,
) -> Result<Arc<KernelQueues>> {
    let set = KernelQueues::new(&spec.name, plan, count, serial, workers)?;
    spread_kernel(spec, &set)?;
    Ok(set)
}

/// Keeps the worker of each queue on a CPU, in turn.
fn pin_each(set: &KernelQueues) -> Result<()> {
    let cpus = vshunt_engine::allowed_cpus();
    (0..set.len()).try_for_each(|i| set.pin(set.first_worker(i), cpus[usize::from(i) % cpus.len()]))
}

/// Nothing runs yet when queues are dealt out, so that nothing is waited for.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(1);

/// Deals the queues out to new workers of the kernel, as the spec asks. The first is there; all go with the device.
fn spread_kernel(spec: &ExportSpec, set: &KernelQueues) -> Result<()> {
    let queues = set.len();
    let count = match spec.workers {
        Spread::Default => return Ok(()),
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

/// Which worker each queue starts on; new ones are made as the spec asks.
fn first_workers(
    spec: &ExportSpec,
    queues: u16,
    workers: &Workers,
    own: &mut Vec<WorkerId>,
) -> Result<Vec<WorkerId>> {
    let count = match spec.workers {
        Spread::Default => return Ok(vec![FIRST_WORKER; queues.into()]),
        Spread::PerQueue | Spread::PerCpu => u32::from(queues),
        Spread::Count(n) => n,
    };
    let mut settings = Settings { poll_us: spec.poll_us, ..Settings::default() };
    if spec.workers == Spread::PerCpu {
        // A worker beside the task that it serves, on the same CPU: woken at once it takes the CPU for each request, as a
        // batch it takes what gathered until the task waits.
        settings.batch = spec.kind == ExportKind::Fuse;
        // Who polls on the CPU of the one whom it serves keeps it from running.
        settings.poll_us = Some(spec.poll_us.unwrap_or(0));
    }
    let cpus = vshunt_engine::allowed_cpus();
    for i in 0..count {
        if spec.workers == Spread::PerCpu {
            // That of the ring queue, if we may run there.
            let own = Some(i as usize).filter(|cpu| cpus.contains(cpu));
            settings.cpu = Some(vec![own.unwrap_or(cpus[i as usize % cpus.len()])]);
        }
        own.push(workers.create(Some(format!("{}/{i}", spec.name)), &settings)?);
    }
    Ok(own.iter().copied().cycle().take(queues.into()).collect())
}
