//! `/dev/vhost-blk` as a VMM drives it: ioctls to one file, rings shared with a worker of the kernel.
//!
//! A [`Kernel`] belongs to the thread that owns the device; its [`Vhost`] may be shared with threads that move rings
//! between workers or switch the log while load runs. The kernel reads and writes guest memory by this process's
//! addresses until the file is closed, so [`Kernel`] keeps the memory.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use vhost_kernel::Vhost;
use virtio::vhost::{
    BlkVringStats, MemoryRegion, VHOST_BLK_BACKEND_READONLY, VHOST_BLK_VRING_NUM_MAX, VHOST_BLK_VRINGS_MAX,
    VHOST_VRING_F_LOG, VringAddr,
};

use super::config::{Config, feature};
use super::log::DirtyLog;
use super::memory::{Area, Memory};
use super::{Options, RingParts, RingSetup, SECTOR};
use crate::error::{Error, Kind, Result, fail};

/// How rings are given to the kernel's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// All to the one that comes with the owner.
    #[default]
    One,
    /// Each ring to its own.
    PerQueue,
    /// To so many, in turn.
    Count(u16),
}

/// What to open.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The vhost device.
    pub device: PathBuf,
    /// The block device behind it.
    pub backend: PathBuf,
    /// Nothing may be written.
    pub read_only: bool,
    /// What GET_ID is to answer.
    pub serial: String,
    /// Who serves which ring.
    pub workers: Workers,
}

/// A hold on a device for threads beside its owner: what may be called while load runs.
#[derive(Clone, Debug)]
pub struct KernelHandle {
    vhost: Arc<Vhost>,
    backend: Arc<File>,
    options: Arc<KernelOptions>,
}

impl KernelHandle {
    /// Sets the backend; the kernel's reason if it refused.
    pub fn set_backend(&self) -> Result<(), (Option<Errno>, Error)> {
        let flags = if self.options.read_only { VHOST_BLK_BACKEND_READONLY } else { 0 };
        self.vhost.blk_set_backend(self.backend.as_fd(), flags, &self.options.serial).map_err(|e| {
            let kind = if e.errno() == Errno::NOTBLK { Kind::Usage } else { Kind::System };
            let what = format!("cannot serve {}: {e}", self.options.backend.display());
            (Some(e.errno()), Error::new(kind, what))
        })
    }

    /// Takes the backend away, which stops all rings.
    pub fn clear_backend(&self) -> Result<()> {
        self.vhost.blk_clear_backend().map_err(oops)
    }

    /// Starts or stops a ring.
    pub fn run_ring(&self, ring: u16, run: bool) -> Result<()> {
        self.vhost.blk_set_vring(u32::from(ring), run).map_err(oops)
    }

    /// Where a stopped ring goes on.
    pub fn base(&self, ring: u16) -> Result<u32> {
        self.vhost.vring_base(u32::from(ring)).map_err(oops)
    }

    /// Sets that.
    pub fn set_base(&self, ring: u16, base: u32) -> Result<()> {
        self.vhost.set_vring_base(u32::from(ring), base).map_err(oops)
    }

    /// A ring's counters.
    pub fn stats(&self, ring: u16) -> Result<BlkVringStats> {
        self.vhost.blk_vring_stats(u32::from(ring)).map_err(oops)
    }
}

/// A device that this process owns.
#[derive(Debug)]
pub struct Kernel {
    vhost: Arc<Vhost>,
    handle: KernelHandle,
    features: u64,
    offered: u64,
    config: Config,
    /// By ring: signalled when the ring is broken.
    errors: Vec<OwnedFd>,
    /// What the kernel may write to, see the module.
    memory: Option<Arc<Memory>>,
    logs: LogSwitch,
}

/// An error of a call, with what it was about.
fn oops(e: vhost_kernel::Error) -> Error {
    let kind = match e {
        vhost_kernel::Error::Open { .. } => Kind::Connect,
        vhost_kernel::Error::Call { .. } => Kind::System,
    };
    Error::new(kind, e.to_string())
}

impl Kernel {
    /// Opens device and backend, and takes what features both sides know; memory and rings come with
    /// [`Kernel::start`].
    pub fn open(options: &KernelOptions, shape: &Options) -> Result<Self> {
        if shape.packed {
            return Err(fail!(Usage, "the kernel's vhost has no packed rings: leave --packed out"));
        }
        if u32::from(shape.queues) > VHOST_BLK_VRINGS_MAX
            || u32::from(shape.queue_size) > VHOST_BLK_VRING_NUM_MAX
        {
            return Err(fail!(
                Usage,
                "/dev/vhost-blk takes {VHOST_BLK_VRINGS_MAX} queues of {VHOST_BLK_VRING_NUM_MAX} descriptors at most"
            ));
        }
        let vhost = Vhost::open(&options.device).map_err(oops)?;
        // For workers that can be made and moved, where the kernel can be asked.
        let _ = vhost.set_fork_from_owner();
        vhost.set_owner().map_err(oops)?;
        let offered = vhost.features().map_err(oops)?;
        let mut features = offered & shape.wanted_features();
        // Segment limits are the owner's to make up, and this one has none; so is what the guest is told of writing.
        features &= !(feature::BLK_SIZE_MAX | feature::BLK_SEG_MAX | feature::BLK_CONFIG_WCE);
        if !options.read_only {
            features &= !feature::BLK_RO;
        }
        if features & feature::VERSION_1 == 0 {
            return Err(fail!(
                Connect,
                "{} does not offer VIRTIO_F_VERSION_1: it is no vhost-blk, or one of another kind",
                options.device.display()
            ));
        }
        let (backend, config) = open_backend(options)?;
        let new_eventfd = |_| {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            fd.map_err(|e| Error::with(Kind::System, "cannot make an eventfd: raise ulimit -n", e))
        };
        let errors = (0..shape.queues).map(new_eventfd).collect::<Result<_>>()?;
        let vhost = Arc::new(vhost);
        let logs = LogSwitch { vhost: Arc::clone(&vhost), features, log: Arc::default() };
        let handle = KernelHandle {
            vhost: Arc::clone(&vhost),
            backend: Arc::new(backend),
            options: Arc::new(options.clone()),
        };
        Ok(Self { vhost, handle, features, offered, config, errors, memory: None, logs })
    }

    /// Sets memory, backend, workers and rings going.
    pub fn start(&mut self, memory: &Memory, rings: &[RingSetup<'_>]) -> Result<()> {
        self.vhost.set_features(self.features).map_err(oops)?;
        let regions: Vec<_> = memory.regions().iter().map(kernel_region).collect();
        // SAFETY: the regions are memfd mappings that this process touches by raw pointers alone; `keep` holds them
        // for as long as the device is open.
        unsafe { self.vhost.set_mem_table(&regions) }.map_err(oops)?;
        self.handle.set_backend().map_err(|(_, e)| e)?;
        if let Some(ring) = rings.first() {
            self.memory = Some(Arc::clone(ring.desc.memory()));
        }
        self.share_out(rings)?;
        rings.iter().try_for_each(|ring| self.start_ring(ring, false))
    }

    /// Makes the workers and attaches rings to them, before they run.
    fn share_out(&self, rings: &[RingSetup<'_>]) -> Result<()> {
        let count = match self.handle.options.workers {
            Workers::One => return Ok(()),
            Workers::PerQueue => rings.len(),
            Workers::Count(count) => usize::from(count),
        };
        // The first is there already.
        let mut ids = vec![match rings.first() {
            Some(ring) => self.vhost.vring_worker(u32::from(ring.index)).map_err(oops)?,
            None => return Ok(()),
        }];
        for _ in 1..count {
            ids.push(self.vhost.new_worker().map_err(oops)?);
        }
        for (ring, id) in rings.iter().zip(ids.iter().cycle()) {
            self.vhost.attach(u32::from(ring.index), *id).map_err(oops)?;
        }
        Ok(())
    }

    /// Says all about a ring and starts it. `log`: the device marks its writes to the used ring.
    pub fn start_ring(&self, ring: &RingSetup<'_>, log: bool) -> Result<()> {
        let index = u32::from(ring.index);
        self.vhost.set_vring_num(index, u32::from(ring.size)).map_err(oops)?;
        self.vhost.set_vring_base(index, ring.base).map_err(oops)?;
        // SAFETY: the parts have the lengths of `ring_sizes` and are shared memory that this process touches by raw
        // pointers alone; `memory` keeps them for as long as the device is open.
        unsafe { self.vhost.set_vring_addr(&kernel_vring_addr(ring, log)) }.map_err(oops)?;
        self.vhost.set_vring_call(index, Some(ring.call.as_fd())).map_err(oops)?;
        self.vhost.set_vring_err(index, Some(self.errors[index as usize].as_fd())).map_err(oops)?;
        self.vhost.set_vring_kick(index, Some(ring.kick.as_fd())).map_err(oops)?;
        self.vhost.blk_set_vring(index, true).map_err(oops)
    }

    /// Stops a ring once nothing of it is in flight; where it stands.
    pub fn stop_ring(&self, ring: u16) -> Result<u32> {
        self.vhost.blk_set_vring(u32::from(ring), false).map_err(oops)?;
        self.vhost.vring_base(u32::from(ring)).map_err(oops)
    }

    /// Shares a log.
    pub fn set_log(&self, log: &DirtyLog) -> Result<()> {
        self.logs.share(log)
    }

    /// Who switches logging, from any thread.
    pub fn logger(&self) -> &LogSwitch {
        &self.logs
    }

    /// By ring: readable when the ring is broken.
    pub fn error_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.errors.iter().map(AsFd::as_fd)
    }

    /// One ring's.
    pub fn error_fd(&self, ring: u16) -> BorrowedFd<'_> {
        self.errors[usize::from(ring)].as_fd()
    }

    /// Whether the device said since the last call that this ring is broken.
    pub fn take_broken(&self, ring: u16) -> bool {
        rustix::io::read(&self.errors[usize::from(ring)], &mut [0; 8]).is_ok()
    }

    /// The same as an error.
    pub fn broken(&self, ring: u16) -> Error {
        fail!(
            Io,
            "queue {ring} is broken: the device says so by its error eventfd, the kernel's log may say why"
        )
    }

    /// Waits up to `wait` for completions of a ring or for its end.
    pub fn wait(&self, parts: &RingParts, wait: std::time::Duration) {
        let limit = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut fds = [
            PollFd::new(&*parts.call, PollFlags::IN),
            PollFd::from_borrowed_fd(self.error_fd(parts.index), PollFlags::IN),
        ];
        let _ = poll(&mut fds, Some(&limit));
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&*parts.call, &mut [0; 8]);
        }
    }

    /// The file to make calls on.
    pub fn vhost(&self) -> &Arc<Vhost> {
        &self.vhost
    }

    /// Features taken.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Features offered.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// What a VMM would tell the guest of the block device.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// For threads beside this one.
    pub fn handle(&self) -> &KernelHandle {
        &self.handle
    }
}

/// A region as the kernel's memory table has it.
pub(crate) fn kernel_region(region: &super::memory::Region) -> MemoryRegion {
    MemoryRegion {
        guest_phys_addr: region.guest_addr,
        memory_size: region.size,
        userspace_addr: region.user_addr(),
        flags_padding: 0,
    }
}

/// A ring's addresses as the kernel is told them.
pub(crate) fn kernel_vring_addr(parts: &RingParts, log: bool) -> VringAddr {
    let user = |area: &Area| area.host() as u64;
    VringAddr {
        index: u32::from(parts.index),
        flags: u32::from(log) << VHOST_VRING_F_LOG,
        desc_user_addr: user(&parts.desc),
        used_user_addr: user(&parts.device),
        avail_user_addr: user(&parts.driver),
        log_guest_addr: parts.device.guest(),
    }
}

/// Switches the dirty log while rings run; from any thread.
#[derive(Clone, Debug)]
pub struct LogSwitch {
    vhost: Arc<Vhost>,
    features: u64,
    /// The log that the kernel writes to.
    log: Arc<Mutex<Option<DirtyLog>>>,
}

impl LogSwitch {
    /// Has the kernel log to `log`, once logging is switched on.
    pub fn share(&self, log: &DirtyLog) -> Result<()> {
        // SAFETY: the log's mapping is touched by atomics and raw copies alone. It is kept in `log` until another one
        // has taken its place in the kernel, or the device is closed.
        unsafe { self.vhost.set_log_base(log.user_addr()) }.map_err(oops)?;
        *self.log.lock().unwrap_or_else(|e| e.into_inner()) = Some(log.share_memory());
        Ok(())
    }

    /// The feature, then each ring's address again, as a VMM does.
    pub fn switch(&self, parts: &[RingParts], on: bool) -> Result<()> {
        let log = if on { feature::LOG_ALL } else { 0 };
        self.vhost.set_features(self.features | log).map_err(oops)?;
        for parts in parts {
            // SAFETY: as in `Kernel::start_ring`.
            unsafe { self.vhost.set_vring_addr(&kernel_vring_addr(parts, on)) }.map_err(oops)?;
        }
        Ok(())
    }
}

/// The block device, and what a VMM would say of it.
fn open_backend(options: &KernelOptions) -> Result<(File, Config)> {
    let path: &Path = &options.backend;
    let explain = |e: std::io::Error| {
        Error::with(Kind::Usage, format!("cannot open the block device {}", path.display()), e)
    };
    let mut file = File::options().read(true).write(!options.read_only).open(path).map_err(explain)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(explain)?;
    // Not a block device: the kernel refuses it later, and with its own words.
    let blk_size = rustix::fs::ioctl_blksszget(&file).unwrap_or(SECTOR as u32);
    let config = Config {
        capacity: bytes / SECTOR,
        blk_size,
        num_queues: VHOST_BLK_VRINGS_MAX as u16,
        // Ours to choose: the kernel cuts them as the device needs.
        max_discard_sectors: 1 << 22,
        max_discard_seg: 16,
        discard_sector_alignment: blk_size / SECTOR as u32,
        max_write_zeroes_sectors: 1 << 22,
        max_write_zeroes_seg: 16,
        write_zeroes_may_unmap: 1,
        ..Config::default()
    };
    Ok((file, config))
}
