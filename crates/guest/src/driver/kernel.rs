//! `/dev/vhost-blk` as a VMM uses it: ioctls on one file, and rings that are shared with a kernel
//! worker.
//!
//! A [`Kernel`] belongs to the thread that owns the device. Its [`Vhost`] may be shared with
//! threads that move rings between workers or switch the log under load. The kernel reads and
//! writes guest memory at this process's addresses until the file is closed. So [`Kernel`] keeps
//! the memory mapped.

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

/// How rings are assigned to the kernel's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// All rings to the worker that is created with the owner.
    #[default]
    One,
    /// Each ring to its own worker.
    PerQueue,
    /// To this many workers, round robin.
    Count(u16),
}

/// How to open the device.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The vhost device.
    pub device: PathBuf,
    /// The block device that the kernel serves.
    pub backend: PathBuf,
    /// Whether the device is read-only.
    pub read_only: bool,
    /// The answer to GET_ID.
    pub serial: String,
    /// Which worker serves which ring.
    pub workers: Workers,
}

/// A handle for threads that do not own the device. It has the calls that are allowed under load.
#[derive(Clone, Debug)]
pub struct KernelHandle {
    vhost: Arc<Vhost>,
    backend: Arc<File>,
    options: Arc<KernelOptions>,
}

impl KernelHandle {
    /// Sets the backend. Returns the kernel's error number if it refused.
    pub fn set_backend(&self) -> Result<(), (Option<Errno>, Error)> {
        let flags = if self.options.read_only { VHOST_BLK_BACKEND_READONLY } else { 0 };
        self.vhost.blk_set_backend(self.backend.as_fd(), flags, &self.options.serial).map_err(|e| {
            let kind = if e.errno() == Errno::NOTBLK { Kind::Usage } else { Kind::System };
            let what = format!("cannot serve {}: {e}", self.options.backend.display());
            (Some(e.errno()), Error::new(kind, what))
        })
    }

    /// Removes the backend, which stops all rings.
    pub fn clear_backend(&self) -> Result<()> {
        self.vhost.blk_clear_backend().map_err(vhost_error)
    }

    /// Starts or stops a ring.
    pub fn run_ring(&self, ring: u16, run: bool) -> Result<()> {
        self.vhost.blk_set_vring(u32::from(ring), run).map_err(vhost_error)
    }

    /// Returns the base from which a stopped ring continues.
    pub fn base(&self, ring: u16) -> Result<u32> {
        self.vhost.vring_base(u32::from(ring)).map_err(vhost_error)
    }

    /// Sets the base from which a stopped ring continues.
    pub fn set_base(&self, ring: u16, base: u32) -> Result<()> {
        self.vhost.set_vring_base(u32::from(ring), base).map_err(vhost_error)
    }

    /// Returns the counters of a ring.
    pub fn stats(&self, ring: u16) -> Result<BlkVringStats> {
        self.vhost.blk_vring_stats(u32::from(ring)).map_err(vhost_error)
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
    /// An eventfd for each ring. The kernel signals it when the ring is broken.
    errors: Vec<OwnedFd>,
    /// The memory that the kernel may write to. See the module's documentation.
    memory: Option<Arc<Memory>>,
    logs: LogSwitch,
}

/// Makes an error from one of a call, with its context.
fn vhost_error(e: vhost_kernel::Error) -> Error {
    let kind = match e {
        vhost_kernel::Error::Open { .. } => Kind::Connect,
        vhost_kernel::Error::Call { .. } => Kind::System,
    };
    Error::new(kind, e.to_string())
}

impl Kernel {
    /// Opens the device and the backend, and takes the features that both sides support.
    /// [`Kernel::start`] sets memory and rings.
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
        let vhost = Vhost::open(&options.device).map_err(vhost_error)?;
        // Lets workers be created and moved. Older kernels do not have the call.
        let _ = vhost.set_fork_from_owner();
        vhost.set_owner().map_err(vhost_error)?;
        let offered = vhost.features().map_err(vhost_error)?;
        let mut features = offered & shape.wanted_features();
        // The VMM sets the segment limits, and this one sets none. It also decides whether the
        // guest can change the write cache.
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

    /// Sets memory, backend and workers, and starts the rings.
    pub fn start(&mut self, memory: &Memory, rings: &[RingSetup<'_>]) -> Result<()> {
        self.vhost.set_features(self.features).map_err(vhost_error)?;
        let regions: Vec<_> = memory.regions().iter().map(kernel_region).collect();
        // SAFETY: the regions are memfd mappings that this process accesses only by raw pointers.
        // `memory` keeps them mapped as long as the device is open.
        unsafe { self.vhost.set_mem_table(&regions) }.map_err(vhost_error)?;
        self.handle.set_backend().map_err(|(_, e)| e)?;
        if let Some(ring) = rings.first() {
            self.memory = Some(Arc::clone(ring.desc.memory()));
        }
        self.attach_rings(rings)?;
        rings.iter().try_for_each(|ring| self.start_ring(ring, false))
    }

    /// Creates the workers and attaches rings to them, before the rings run.
    fn attach_rings(&self, rings: &[RingSetup<'_>]) -> Result<()> {
        let count = match self.handle.options.workers {
            Workers::One => return Ok(()),
            Workers::PerQueue => rings.len(),
            Workers::Count(count) => usize::from(count),
        };
        // The first worker exists already.
        let mut ids = vec![match rings.first() {
            Some(ring) => self.vhost.vring_worker(u32::from(ring.index)).map_err(vhost_error)?,
            None => return Ok(()),
        }];
        for _ in 1..count {
            ids.push(self.vhost.new_worker().map_err(vhost_error)?);
        }
        for (ring, id) in rings.iter().zip(ids.iter().cycle()) {
            self.vhost.attach(u32::from(ring.index), *id).map_err(vhost_error)?;
        }
        Ok(())
    }

    /// Configures a ring and starts it. `log`: the device logs its writes to the used ring.
    pub fn start_ring(&self, ring: &RingSetup<'_>, log: bool) -> Result<()> {
        let index = u32::from(ring.index);
        self.vhost.set_vring_num(index, u32::from(ring.size)).map_err(vhost_error)?;
        self.vhost.set_vring_base(index, ring.base).map_err(vhost_error)?;
        // SAFETY: the parts have the lengths of `ring_sizes`, and this process accesses the shared
        // memory only by raw pointers. `memory` keeps it mapped as long as the device is open.
        unsafe { self.vhost.set_vring_addr(&kernel_vring_addr(ring, log)) }.map_err(vhost_error)?;
        self.vhost.set_vring_call(index, Some(ring.call.as_fd())).map_err(vhost_error)?;
        self.vhost.set_vring_err(index, Some(self.errors[index as usize].as_fd())).map_err(vhost_error)?;
        self.vhost.set_vring_kick(index, Some(ring.kick.as_fd())).map_err(vhost_error)?;
        self.vhost.blk_set_vring(index, true).map_err(vhost_error)
    }

    /// Stops a ring after its last request in flight. Returns its base.
    pub fn stop_ring(&self, ring: u16) -> Result<u32> {
        self.vhost.blk_set_vring(u32::from(ring), false).map_err(vhost_error)?;
        self.vhost.vring_base(u32::from(ring)).map_err(vhost_error)
    }

    /// Gives the log to the kernel.
    pub fn set_log(&self, log: &DirtyLog) -> Result<()> {
        self.logs.share(log)
    }

    /// Returns the switch of the log, which any thread may use.
    pub fn logger(&self) -> &LogSwitch {
        &self.logs
    }

    /// Returns the eventfd of each ring, which is readable when the ring is broken.
    pub fn error_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.errors.iter().map(AsFd::as_fd)
    }

    /// Returns the eventfd of one ring, which is readable when the ring is broken.
    pub fn error_fd(&self, ring: u16) -> BorrowedFd<'_> {
        self.errors[usize::from(ring)].as_fd()
    }

    /// Returns whether the device reported this ring as broken since the last call.
    pub fn take_broken(&self, ring: u16) -> bool {
        rustix::io::read(&self.errors[usize::from(ring)], &mut [0; 8]).is_ok()
    }

    /// Returns the error of a broken ring.
    pub fn broken(&self, ring: u16) -> Error {
        fail!(
            Io,
            "queue {ring} is broken: the device says so by its error eventfd, the kernel's log may say why"
        )
    }

    /// Waits up to `wait` for completions of a ring, or until it is broken.
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

    /// Returns the device, to make calls on.
    pub fn vhost(&self) -> &Arc<Vhost> {
        &self.vhost
    }

    /// Returns the negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the offered features.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Returns the configuration that a VMM would give to the guest.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns a handle for other threads.
    pub fn handle(&self) -> &KernelHandle {
        &self.handle
    }
}

/// Returns a region in the form of the kernel's memory table.
pub(crate) fn kernel_region(region: &super::memory::Region) -> MemoryRegion {
    MemoryRegion {
        guest_phys_addr: region.guest_addr,
        memory_size: region.size,
        userspace_addr: region.user_addr(),
        flags_padding: 0,
    }
}

/// Returns a ring's addresses in the form of the kernel.
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

/// Switches the dirty log while rings run. Any thread may use it.
#[derive(Clone, Debug)]
pub struct LogSwitch {
    vhost: Arc<Vhost>,
    features: u64,
    /// The log that the kernel writes to.
    log: Arc<Mutex<Option<DirtyLog>>>,
}

impl LogSwitch {
    /// Gives `log` to the kernel, which writes to it once logging is on.
    pub fn share(&self, log: &DirtyLog) -> Result<()> {
        // SAFETY: this process accesses the log's mapping only by atomics and raw copies. The field
        // `log` keeps it mapped until the kernel has another one, or the device is closed.
        unsafe { self.vhost.set_log_base(log.user_addr()) }.map_err(vhost_error)?;
        *self.log.lock().unwrap_or_else(|e| e.into_inner()) = Some(log.share_memory());
        Ok(())
    }

    /// Sets the feature, then each ring's address again, as a VMM does.
    pub fn switch(&self, parts: &[RingParts], on: bool) -> Result<()> {
        let log = if on { feature::LOG_ALL } else { 0 };
        self.vhost.set_features(self.features | log).map_err(vhost_error)?;
        for parts in parts {
            // SAFETY: the parts have the lengths of `ring_sizes`, and this process accesses the
            // shared memory only by raw pointers. `Kernel::memory` keeps it mapped as long as the
            // device is open.
            unsafe { self.vhost.set_vring_addr(&kernel_vring_addr(parts, on)) }.map_err(vhost_error)?;
        }
        Ok(())
    }
}

/// Opens the block device. Returns it with the configuration that a VMM would give to the guest.
fn open_backend(options: &KernelOptions) -> Result<(File, Config)> {
    let path: &Path = &options.backend;
    let explain = |e: std::io::Error| {
        Error::with(Kind::Usage, format!("cannot open the block device {}", path.display()), e)
    };
    let mut file = File::options().read(true).write(!options.read_only).open(path).map_err(explain)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(explain)?;
    // If it is no block device, the kernel refuses it later with its own error.
    let blk_size = rustix::fs::ioctl_blksszget(&file).unwrap_or(SECTOR as u32);
    let config = Config {
        capacity: bytes / SECTOR,
        blk_size,
        num_queues: VHOST_BLK_VRINGS_MAX as u16,
        // The VMM chooses this limit. The kernel splits discards as the device needs.
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
