//! FUSE: a disk as a regular file of the host.
//!
//! `plan` decides what a mount is going to be, `mount` makes it, `session` speaks the first words with the kernel, then
//! queues serve it on workers. No thread of its own: what comes later comes to the queues. What must never happen: a
//! mount left behind, or a caller left waiting.
//!
//! ```no_run
//! use vshunt_block::Disk;
//! use vshunt_types::spec::{DiskSpec, ExportSpec, Format};
//!
//! let disk = Disk::open(&DiskSpec { name: "d0".into(), format: Some(Format::Ram), size: Some(1 << 20), ..Default::default() })?;
//! let spec = ExportSpec { name: "f0".into(), disk: "d0".into(), ..Default::default() };
//! let plan = vshunt_fuse::plan(&spec, &disk, 64, 2)?;
//! println!("{} queues over {:?}", plan.queues, plan.transport);
//! # Ok::<(), vshunt_types::error::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests make threads of their own"))]

pub mod mount;
mod plan;
pub mod queue;
mod session;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_block::own_mounts::{Making, OwnMount};
use vshunt_block::{Disk, SECTOR_BYTES};
use vshunt_engine::{EventFd, Observer, Queue, QueueSet};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{ExportSpec, Transport};

use self::mount::{Mount, Mountpoint, Options, clone_channel};
pub use self::plan::{Plan, plan};
use crate::queue::{FuseQueue, FuseShared, Herd, News, Parts, Setup, Source, abi};

/// A served mount.
pub struct Fuse {
    inner: Arc<Inner>,
    disk: Arc<Disk>,
    name: String,
    opens: Arc<AtomicU32>,
    shared: Arc<FuseShared>,
    /// Of each ring queue, entries on io_urings of former workers.
    away: Arc<[Arc<AtomicU32>]>,
    plan: Plan,
    features: u64,
    allow_other: bool,
    /// Locked over the end, so that it comes once.
    queues: Mutex<Option<Arc<QueueSet>>>,
}

struct Inner {
    mount: Mount,
    _own: OwnMount,
    session: Arc<OwnedFd>,
    backing: Option<i32>,
    /// Its end has begun, by us or by an administrator's umount: told once.
    ending: AtomicBool,
    observer: Arc<dyn Observer>,
}

impl Inner {
    /// The kernel says that the mount is gone; on a worker.
    fn gone(&self) {
        if !self.ending.swap(true, SeqCst) {
            self.observer.ended();
        }
    }
}

impl Fuse {
    /// Mounts and serves; the queues' homes are in `queues`, as many as the plan says. `prepare` is called when the mountpoint
    /// is ready, and before anything is mounted: it may open the disk's image by its name, over which the mount may lie.
    ///
    /// # Errors
    /// The mountpoint's and the mount's, see [`mount`]; nothing is left behind then.
    pub fn start(
        spec: &ExportSpec,
        mut plan: Plan,
        disk: Arc<Disk>,
        queues: &Arc<QueueSet>,
        observer: Arc<dyn Observer>,
        prepare: &dyn Fn() -> Result<()>,
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
        // Begun before the mount is visible: no thread asks it before it is on the list.
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
        let watch = Arc::downgrade(&inner);
        let opens = Arc::<AtomicU32>::default();
        let setup = Setup {
            name: spec.name.clone(),
            disk: disk.clone(),
            writable,
            growable: spec.growable.unwrap_or(false),
            opens: opens.clone(),
            backing_id: backing,
            tell: Box::new(move |news| match (watch.upgrade(), news) {
                (Some(inner), News::Resized(size_bytes)) => inner.observer.resized(size_bytes),
                (Some(inner), News::Broken { queue, why }) => inner.observer.queue_broken(queue, &why),
                (None, _) => {}
            }),
        };
        let shared = Arc::new(FuseShared::new(setup, &eventfds)?);
        let made = make_queues(spec, &plan, &inner, &shared, &eventfds, queues);
        let (boxes, away) = made.inspect_err(|_| inner.ending.store(true, SeqCst))?;
        for (index, queue) in boxes {
            queues.start(index, queue);
        }
        Ok(Self {
            inner,
            disk,
            name: spec.name.clone(),
            opens,
            shared,
            away,
            plan,
            features,
            allow_other,
            queues: Mutex::new(Some(queues.clone())),
        })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether other users may use the file.
    pub fn allow_other(&self) -> bool {
        self.allow_other
    }

    /// Where it is mounted, and the device number and inode of the file below.
    pub fn below(&self) -> (&Path, (u64, u64)) {
        (self.inner.mount.path(), self.inner.mount.below())
    }

    /// Times that the file is open.
    pub fn open_files(&self) -> u32 {
        self.opens.load(SeqCst)
    }

    /// Idle entries of ring queues that are still on io_urings of former workers, which forward the requests.
    pub fn forwarded_entries(&self) -> u32 {
        self.away.iter().map(|n| n.load(Relaxed)).sum()
    }

    /// Flags of INIT that were agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Unmounts, if nobody has the file open. Then, or by force, [`stop`](Self::stop) ends the rest.
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

    /// Ends it: callers get errors, requests of the disk that are under way are waited for. Idempotent.
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
                "export {}: {path} was unmounted by somebody else, which ends the export",
                self.name
            );
        } else if self.inner.mount.unmount(false).is_err() {
            tracing::warn!("export {}: {path} is in use, and is taken from its users", self.name);
            if let Err(e) = self.inner.mount.unmount(true) {
                tracing::error!("{e}");
            }
        }
        // Without its mount it may live on, for those who have the file open or in another mount namespace.
        // Idle entries of ring queues come back when it ends, and not before.
        if self.inner.mount.sever(&self.inner.session) {
            self.shared.end();
        }
        for index in 0..queues.len() {
            drop(queues.stop(index));
        }
        if self.inner.backing.is_some() && !self.disk.readonly() {
            self.settle_size();
        }
    }

    /// The kernel wrote to the image by itself and may have made it longer, by any number of bytes.
    fn settle_size(&self) {
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

/// Opens the image for the kernel where the plan has passthrough, and takes it out of the plan where that fails.
fn backing(session: &OwnedFd, plan: &mut Plan, features: u64, disk: &Disk, writable: bool) -> Option<i32> {
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
        plan.transport_reason = Some("passthrough was reckoned with; ask for transport=io_uring".to_owned());
    }
    None
}

type Made = (Vec<(u16, Box<dyn Queue>)>, Arc<[Arc<AtomicU32>]>);

/// The queues, and of ring queues the counts of entries on io_urings of former workers.
fn make_queues(
    spec: &ExportSpec,
    plan: &Plan,
    inner: &Arc<Inner>,
    shared: &Arc<FuseShared>,
    eventfds: &[Arc<EventFd>],
    queues: &QueueSet,
) -> Result<Made> {
    let count = queues.len();
    let rings = if plan.transport == Transport::IoUring { count - 1 } else { 0 };
    let away: Arc<[Arc<AtomicU32>]> = (0..rings).map(|_| Arc::default()).collect();
    // The channels are those from `rings` on: their places in the herd are their places in the export.
    let herd = Arc::new(Herd::new(eventfds.to_vec()));
    let mut made: Vec<(u16, Box<dyn Queue>)> = Vec::new();
    for index in 0..count {
        let source = if index < rings {
            Source::Ring(inner.session.clone(), index, away[usize::from(index)].clone())
        } else {
            let fd =
                if index == rings { inner.session.clone() } else { Arc::new(clone_channel(&inner.session)?) };
            Source::Channel(fd, herd.clone())
        };
        let watch = Arc::downgrade(inner);
        let parts = Parts {
            index,
            source,
            eventfd: eventfds[usize::from(index)].clone(),
            stats: queues.stats(index).clone(),
            on_gone: Box::new(move || {
                if let Some(inner) = watch.upgrade() {
                    inner.gone();
                }
            }),
        };
        let queue = FuseQueue::new(parts, shared.clone())
            .map_err(|e| Error::io(format_args!("export {}: no memory for queue {index}", spec.name), e))?;
        made.push((index, Box::new(queue)));
    }
    Ok((made, away))
}
