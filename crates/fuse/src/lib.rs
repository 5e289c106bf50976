//! FUSE: a disk as a regular file of the host.
//!
//! `plan` decides how a mount is served, `mount` makes it, `session` answers the kernel's first
//! request, and then queues serve the mount on workers. The crate has no thread of its own but the
//! blocking thread of each mount. What must never happen: a mount is left behind, or a task waits
//! for a reply that never comes.
//!
//! A caller plans the mount, makes as many queues as the plan says, and starts it:
//!
//! ```no_run
//! use std::sync::Arc;
//! use vshunt_block::Disk;
//! use vshunt_engine::{Observer, QueueSet};
//! use vshunt_fuse::{Fuse, plan};
//! use vshunt_types::error::Result;
//! use vshunt_types::spec::ExportSpec;
//!
//! /// Serves `disk` on `queues`, which has as many queues as the plan of the same export.
//! fn serve(
//!     spec: &ExportSpec,
//!     disk: Arc<Disk>,
//!     queues: &Arc<QueueSet>,
//!     observer: Arc<dyn Observer>,
//! ) -> Result<()> {
//!     let plan = plan(spec, &disk, 1024, 4)?;
//!     let fuse = Fuse::start(spec, plan, disk, queues, observer, &|| Ok(()), Arc::default())?;
//!     println!("{} is mounted", fuse.below().0.display());
//!     fuse.release()?;
//!     fuse.stop();
//!     Ok(())
//! }
//! ```

#![deny(
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss
)]
#![cfg_attr(
    test,
    allow(clippy::indexing_slicing, clippy::cast_possible_truncation, reason = "a failed test may panic")
)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

pub mod abi;
pub mod mount;
mod plan;
mod queue;
mod session;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_block::own_mounts::{Making, OwnMount};
use vshunt_block::{Disk, SECTOR_BYTES};
use vshunt_engine::{EventFd, LimitCell, Observer, Queue, QueueSet};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, Transport};

use self::mount::{Mount, Mountpoint, Options, clone_channel};
pub use self::plan::{QueuePlan, check_uring, cpus_of, plan};
pub use crate::queue::TRANSFER_BYTES_MAX;
use crate::queue::{
    ChannelGroup, ChannelTransport, FuseQueue, FuseShared, MountConfig, MountEvent, QueueConfig, RingQueue,
};

/// A served mount.
pub struct Fuse {
    inner: Arc<Inner>,
    disk: Arc<Disk>,
    name: String,
    opens: Arc<AtomicU32>,
    shared: Arc<FuseShared>,
    /// For each ring queue: idle entries on io_urings of former workers.
    forwarded: Vec<Arc<AtomicU32>>,
    plan: QueuePlan,
    features: u64,
    allow_other: bool,
    /// None once the mount has ended.
    queues: Mutex<Option<Arc<QueueSet>>>,
}

struct Inner {
    mount: Mount,
    _own: OwnMount,
    session: Arc<OwnedFd>,
    backing: Option<i32>,
    /// The mount is ending, by a command or because an administrator unmounted it. The observer is
    /// told once.
    ending: AtomicBool,
    observer: Arc<dyn Observer>,
}

impl Inner {
    /// The kernel reports that the mount is gone. Called on a worker.
    fn note_gone(&self) {
        if !self.ending.swap(true, SeqCst) {
            self.observer.ended();
        }
    }
}

impl Fuse {
    /// Mounts and serves an export. `queues` has as many queues as the plan says. `prepare` is
    /// called when the mountpoint is ready, and before anything is mounted: it may open the image
    /// by its name, even if the mount will cover that name. Requests wait for `limits`.
    ///
    /// # Errors
    /// Those of the mountpoint and the mount, see [`mount`]. Nothing is left behind.
    pub fn start(
        spec: &ExportSpec,
        mut plan: QueuePlan,
        disk: Arc<Disk>,
        queues: &Arc<QueueSet>,
        observer: Arc<dyn Observer>,
        prepare: &dyn Fn() -> Result<()>,
        limits: Arc<LimitCell>,
    ) -> Result<Self> {
        let Some(path) = &spec.mountpoint else {
            return Err(Error::invalid(format!("export {}: mountpoint=PATH is missing", spec.name)));
        };
        let writable = spec.writable.unwrap_or(false);
        let source = format!("vshunt:{}", spec.disk);
        let options = Options {
            source: &source,
            readonly: !writable,
            allow_other: spec.allow_other.unwrap_or_default(),
        };
        let at = Mountpoint::prepare(path)?;
        prepare()?;
        // Starts before the mount is visible: no thread asks the mount for anything before it is on
        // the list.
        let making = Making::begin();
        let (session, mount) = mount::mount(at, &options)?;
        let own = making.note(mount.device(), &spec.name, &spec.disk);
        let features = session::negotiate(&session, &plan)?;
        let backing = backing(&session, &mut plan, features, &disk, writable);
        let allow_other = mount.allow_other();
        if let (Transport::Dev, Some(why)) = (plan.transport, &plan.transport_reason) {
            tracing::info!("export {}: transport=auto chose dev: {why}", spec.name);
        }
        let session = Arc::new(session);
        let inner =
            Arc::new(Inner { mount, _own: own, session, backing, ending: AtomicBool::new(false), observer });
        let eventfds =
            (0..queues.len()).map(|_| EventFd::make().map(Arc::new)).collect::<std::io::Result<Vec<_>>>();
        let eventfds = eventfds.map_err(|e| Error::io(format_args!("cannot serve {}", spec.name), e))?;
        let weak = Arc::downgrade(&inner);
        let opens = Arc::<AtomicU32>::default();
        let config = MountConfig {
            name: spec.name.clone(),
            disk: disk.clone(),
            writable,
            growable: spec.growable.unwrap_or(false),
            limits,
            opens: opens.clone(),
            backing_id: backing,
            on_event: Box::new(move |event| match (weak.upgrade(), event) {
                (Some(inner), MountEvent::Resized(size_bytes)) => inner.observer.resized(size_bytes),
                (Some(inner), MountEvent::QueueBroken { queue, reason }) => {
                    inner.observer.queue_broken(queue, &reason);
                }
                (None, _) => {}
            }),
        };
        let shared = Arc::new(FuseShared::new(config, &eventfds)?);
        let made = make_queues(spec, &plan, &inner, &shared, &eventfds, queues);
        let (made, forwarded) = made.inspect_err(|_| inner.ending.store(true, SeqCst))?;
        for (index, queue) in made {
            queues.start(index, queue);
        }
        Ok(Self {
            inner,
            disk,
            name: spec.name.clone(),
            opens,
            shared,
            forwarded,
            plan,
            features,
            allow_other,
            queues: Mutex::new(Some(queues.clone())),
        })
    }

    /// How the mount is served.
    pub fn plan(&self) -> &QueuePlan {
        &self.plan
    }

    /// Whether other users than the daemon's may use the file.
    pub fn allow_other(&self) -> bool {
        self.allow_other
    }

    /// The path of the mount, and the device number and inode of the file below it.
    pub fn below(&self) -> (&Path, (u64, u64)) {
        (self.inner.mount.path(), self.inner.mount.below())
    }

    /// How often the file is open.
    pub fn open_files(&self) -> u32 {
        self.opens.load(SeqCst)
    }

    /// Idle entries of ring queues that are on io_urings of former workers, which forward their
    /// requests.
    pub fn forwarded_entries(&self) -> u32 {
        self.forwarded.iter().map(|n| n.load(Relaxed)).sum()
    }

    /// Flags of INIT that the kernel and the daemon both support.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Unmounts, if no process has the file open. [`stop`](Self::stop) ends the rest, also where
    /// this fails.
    ///
    /// # Errors
    /// `Busy` while files are open.
    pub fn release(&self) -> Result<()> {
        let before = self.inner.ending.swap(true, SeqCst);
        self.inner.mount.unmount(false).map_err(|e| {
            self.inner.ending.store(before, SeqCst);
            Error::new(e.kind(), format!("export {}: {e}", self.name))
        })
    }

    /// Ends the mount. Users of the file get errors. Waits for operations of the disk in flight. A
    /// second call does nothing.
    pub fn stop(&self) {
        let Some(queues) = self.queues.locked().take() else { return };
        self.inner.ending.store(true, SeqCst);
        if let Some(id) = self.inner.backing {
            session::close_backing(&self.inner.session, id);
        }
        let path = self.inner.mount.path().display();
        if self.inner.mount.was_ended() {
            tracing::debug!("export {}: {path} was let go of before", self.name);
        } else if !self.inner.mount.still_there() {
            tracing::warn!(
                "export {}: {path} was unmounted by another process, which ends the export",
                self.name
            );
        } else if self.inner.mount.unmount(false).is_err() {
            tracing::warn!("export {}: {path} is in use, and is taken from its users", self.name);
            if let Err(e) = self.inner.mount.unmount(true) {
                tracing::error!("{e}");
            }
        }
        // The connection may outlive the mount: where a process has the file open, and in other
        // mount namespaces. Idle entries of ring queues come back only when it ends.
        if self.inner.mount.sever(&self.inner.session) {
            self.shared.end();
        }
        for index in 0..queues.len() {
            drop(queues.stop(index));
        }
        if self.inner.backing.is_some() && !self.disk.readonly() {
            self.round_size();
        }
    }

    /// With passthrough the kernel may have made the image longer by any number of bytes: makes it
    /// whole sectors.
    fn round_size(&self) {
        let Some(Ok(meta)) = self.disk.image().map(|image| image.metadata()) else { return };
        let size = meta.size().next_multiple_of(SECTOR_BYTES);
        if (size != self.disk.size_bytes() || size != meta.size())
            && let Err(e) = self.disk.truncate(size)
        {
            tracing::warn!("export {}: its image cannot be given {size} bytes: {e}", self.name);
        }
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Registers the image for passthrough if the plan has it. If that fails, the plan has no
/// passthrough any more.
fn backing(
    session: &OwnedFd,
    plan: &mut QueuePlan,
    features: u64,
    disk: &Disk,
    writable: bool,
) -> Option<i32> {
    if !plan.passthrough {
        return None;
    }
    let why = match disk.passthrough_fd(writable) {
        _ if features & abi::init::PASSTHROUGH == 0 => "this kernel has none (Linux 6.9)".to_owned(),
        Ok(None) => "there is no image".to_owned(),
        Ok(Some(image)) => match session::open_backing(session, &image) {
            Ok(id) => return Some(id),
            Err(e) => format!("the kernel refused the image: {e}"),
        },
        Err(e) => format!("the image cannot be opened for the kernel: {e}"),
    };
    plan.passthrough = false;
    plan.passthrough_reason = Some(why);
    if plan.transport_reason.is_some() {
        plan.transport_reason =
            Some("the transport was chosen for passthrough; ask for transport=io_uring".to_owned());
    }
    None
}

/// Queues by index, and for each ring queue its count of forwarded entries.
type MadeQueues = (Vec<(u16, Box<dyn Queue>)>, Vec<Arc<AtomicU32>>);

/// Makes the queues. Over io_uring all of them but the last one are ring queues; the others are
/// channels.
fn make_queues(
    spec: &ExportSpec,
    plan: &QueuePlan,
    inner: &Arc<Inner>,
    shared: &Arc<FuseShared>,
    eventfds: &[Arc<EventFd>],
    queues: &QueueSet,
) -> Result<MadeQueues> {
    let rings = if plan.transport == Transport::IoUring { queues.len().saturating_sub(1) } else { 0 };
    let group = Arc::new(ChannelGroup::new(eventfds.to_vec()));
    let (mut made, mut forwarded) = (Vec::<(u16, Box<dyn Queue>)>::new(), Vec::new());
    for (index, eventfd) in (0..queues.len()).zip(eventfds) {
        let weak = Arc::downgrade(inner);
        let config = QueueConfig {
            index,
            eventfd: eventfd.clone(),
            stats: queues.stats(index).clone(),
            on_gone: Box::new(move || {
                if let Some(inner) = weak.upgrade() {
                    inner.note_gone();
                }
            }),
            shared: shared.clone(),
        };
        let queue = if index < rings {
            let count = Arc::<AtomicU32>::default();
            forwarded.push(count.clone());
            let (fd, eventfd) = (inner.session.clone(), eventfd.clone());
            let ring = RingQueue { fd, cpu: index, eventfd, forwarded: count };
            FuseQueue::over_uring(config, ring).map(|queue| Box::new(queue) as Box<dyn Queue>)
        } else {
            let fd =
                if index == rings { inner.session.clone() } else { Arc::new(clone_channel(&inner.session)?) };
            let transport = ChannelTransport::new(fd, group.clone(), index, config.stats.clone());
            FuseQueue::over_channel(config, transport).map(|queue| Box::new(queue) as Box<dyn Queue>)
        };
        let queue = queue
            .map_err(|e| Error::io(format_args!("export {}: no memory for queue {index}", spec.name), e))?;
        made.push((index, queue));
    }
    Ok((made, forwarded))
}
