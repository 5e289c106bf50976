//! One front-end's connection: what it set up, and the rings that run by it.
//!
//! All of it belongs to the session thread. A ring runs when it has memory, addresses, a kick and is enabled;
//! it is then a queue on a worker and comes back, drained, before anything that it leans on goes away.

mod inflight;
mod log;
mod repeats;
mod rings;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use virtio::features::{VIRTIO_F_RING_PACKED, bit};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, Region};
use virtio::ring::MAX_QUEUE_SIZE;
use vshunt_engine::DRAIN_LIMIT;
use vshunt_engine::EventFd;
use vshunt_virtqueue::RingServer;

use self::inflight::InflightArea;
use self::repeats::Repeats;
use super::budget::Budget;
use super::channel::write_only;
use super::memory::{Mapping, Shared, is_eventfd, map_region};
use super::{ConfigChange, Device, Reports};

/// VHOST_F_LOG_ALL: writes to guest memory are to be logged.
const F_LOG_ALL: u64 = bit(virtio::features::VHOST_F_LOG_ALL);
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL: u64 = bit(virtio::features::VHOST_USER_F_PROTOCOL_FEATURES);
/// Page size of the dirty log, fixed by the specification: one bit each.
const LOG_PAGE_BYTES: u64 = 4096;

/// Bytes of the dirty log at most: bits for 32 TiB of guest-physical addresses.
const LOG_BYTES_MAX: u64 = 1 << 30;
/// What to do where a front end shares no memory.
const SHARE_MEMORY: &str = "Give the VMM memory that it can share; QEMU: -object memory-backend-memfd,id=mem,size=SIZE,\
     share=on -machine memory-backend=mem";

/// What the front-end told of one ring.
#[derive(Default)]
struct Vring {
    size: u16,
    addrs: Option<UserAddrs>,
    base: u32,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<EventFd>>,
    err: Option<EventFd>,
    enabled: bool,
    running: bool,
}

impl Vring {
    /// Whether it stands, and has all that it needs except for memory.
    fn may_start(&self) -> bool {
        !self.running && self.enabled && self.size > 0 && self.kick.is_some() && self.addrs.is_some()
    }
}

/// Ring addresses as the front-end has them: in its own address space.
#[derive(Clone, Copy)]
struct UserAddrs {
    desc: u64,
    driver: u64,
    device: u64,
    /// Guest address of the device area, if writes there are to be logged.
    log: Option<u64>,
}

/// See the module.
pub(super) struct Session {
    name: String,
    device: Arc<dyn Device>,
    server: Arc<dyn RingServer>,
    /// Features agreed on, for `status` to read.
    agreed: Arc<AtomicU64>,
    reports: Arc<Reports>,
    /// What it may map.
    budget: Arc<Budget>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    status: u64,
    regions: Vec<Region>,
    /// Regions that were added again.
    again: Repeats,
    mem: Arc<GuestMemory>,
    /// Whether a memory table with regions came, or the user was told that none did.
    had_memory: bool,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    /// Why this guest does not go on with its requests in flight, nor with others.
    cut_off: Option<String>,
    log: Option<Arc<DirtyLog>>,
    /// What it lies in.
    log_map: Option<Arc<Mapping>>,
}

impl Session {
    pub(super) fn new(
        name: &str,
        device: Arc<dyn Device>,
        server: Arc<dyn RingServer>,
        agreed: Arc<AtomicU64>,
        reports: Arc<Reports>,
        budget: Arc<Budget>,
    ) -> Self {
        let vrings = (0..server.rings()).map(|_| Vring::default()).collect();
        agreed.store(0, Relaxed);
        if let Err(why) = device.negotiated(0) {
            tracing::warn!("{name}: what a former front-end agreed on stays: {why}");
        }
        if let Some(network) = device.network() {
            network.set_notes(None);
        }
        device.connected();
        Self {
            name: name.to_owned(),
            device,
            server,
            agreed,
            reports,
            budget,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            status: 0,
            regions: Vec::new(),
            again: Repeats::default(),
            mem: Arc::new(GuestMemory::empty()),
            had_memory: false,
            vrings,
            inflight: None,
            cut_off: None,
            log: None,
            log_map: None,
        }
    }

    /// The device status, as the guest set it.
    pub(super) fn status(&self) -> u64 {
        self.status
    }

    /// Whether refused messages are answered by a word, so that the front-end may go on.
    pub(super) fn acknowledges(&self) -> bool {
        self.has(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// Whether a protocol feature was agreed on.
    pub(super) fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol.contains(feature)
    }

    /// SET_STATUS; 0 resets the rings. Not what the guest chose in the configuration space: QEMU writes 0 whenever
    /// a virtual machine is paused, too, and tells nothing of that space when it goes on.
    pub(super) fn set_status(&mut self, status: u64) {
        self.status = status;
        if status == 0 {
            self.reset();
        }
    }

    fn reset(&mut self) {
        self.stop_all();
        self.status = 0;
        for vring in &mut self.vrings {
            vring.kick = None;
            vring.base = 0;
            vring.enabled = false;
        }
        if let Some(area) = &self.inflight {
            area.clear();
        }
        // A guest that begins anew knows of no completed writes.
        self.cut_off = None;
    }

    /// What we offer of the protocol. A module of before, and vhost-net, note nowhere what they have in flight; and a guest whose
    /// writes may be lost with us is to be reset, rather than to go on.
    fn offered(&self) -> VhostUserProtocolFeatures {
        let all = super::PROTOCOL_FEATURES.union(self.device.protocol());
        match self.server.tracks() && self.device.outlives_daemon() {
            true => all,
            false => all.difference(VhostUserProtocolFeatures::INFLIGHT_SHMFD),
        }
    }

    /// Makes a change of the configuration space whole while nothing is in flight.
    fn settle(&self) -> Result<()> {
        let mut settled = Ok(());
        loop {
            let until = Instant::now() + DRAIN_LIMIT;
            match self.server.with_all_drained(until, &mut || settled = self.device.settle()) {
                // The guest waits for its own requests, for as long as they take.
                Err(e) if e.kind() == vshunt_types::error::Kind::Busy => tracing::warn!("{}: {e}", self.name),
                drained => break drained.map_err(|e| refuse(e.to_string()))?,
            }
        }
        settled.map_err(refuse)
    }

    fn packed(&self) -> bool {
        self.features & bit(VIRTIO_F_RING_PACKED) != 0
    }

    fn logging(&self) -> bool {
        self.features & F_LOG_ALL != 0
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        let count = self.vrings.len();
        self.vrings
            .get_mut(index as usize)
            .ok_or_else(|| refuse(format!("there is no queue {index} of {count}")))
    }
}

/// Refuses a message: the front-end is told if it asked for acknowledgements and may go on then; else its
/// connection ends.
fn refuse(why: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(why.into()))
}

/// A ring's kick, call or error descriptor.
fn eventfd(file: File) -> Result<OwnedFd> {
    if is_eventfd(&file) { Ok(file.into()) } else { Err(refuse("a ring's descriptor is no eventfd")) }
}

fn no_eventfd(e: std::io::Error) -> Error {
    refuse(format!(
        "a ring's call or error descriptor cannot be signalled: {e}; where a limit of open files or of locked memory is \
         reached, raise it (ulimit -n and -l, LimitNOFILE= and LimitMEMLOCK=); where io_uring is switched off, allow it \
         (sysctl kernel.io_uring_disabled)"
    ))
}

/// A ring's call descriptor: an eventfd, or the socket that User-mode Linux has for it.
fn call_fd(file: File, by_kernel: bool) -> Result<OwnedFd> {
    if is_eventfd(&file) {
        return Ok(file.into());
    }
    let fd = OwnedFd::from(file);
    match write_only(&fd, None) {
        Ok(()) if by_kernel => Err(refuse(
            "the kernel cannot notify by a socket: add the export with engine=user, or use eventfds",
        )),
        Ok(()) => Ok(fd),
        Err(why) => {
            Err(refuse(format!("a ring's descriptor is no eventfd, nor a socket to notify by: {why}")))
        }
    }
}

const NOT_OURS: Error = Error::InvalidOperation("this device has no such thing");

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        self.device.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.device.features() | F_PROTOCOL | F_LOG_ALL)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.get_features()?;
        if unknown != 0 {
            return Err(refuse(format!("features {unknown:#x} were never offered")));
        }
        let changed = features ^ self.features;
        if changed & !(F_LOG_ALL | F_PROTOCOL) != 0 {
            if self.vrings.iter().any(|v| v.running) {
                return Err(refuse("features change while rings run"));
            }
            self.device.negotiated(features).map_err(refuse)?;
        }
        if changed & !F_PROTOCOL != 0 {
            self.server.set_features(self.server_features(features)).map_err(refuse)?;
        }
        self.features = features;
        self.agreed.store(features, Relaxed);
        if features & F_PROTOCOL == 0 {
            // Without protocol features there is no SET_VRING_ENABLE: rings are enabled from the start.
            for vring in &mut self.vrings {
                vring.enabled = true;
            }
        }
        if changed & F_LOG_ALL != 0 {
            self.update_log();
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        if table.is_empty() {
            return Err(refuse(format!(
                "the front end's memory table has no region: it shares no memory. {SHARE_MEMORY}; SPDK and DPDK: give them huge \
                 pages"
            )));
        }
        let mut mapped = Vec::with_capacity(table.len());
        for (region, file) in table.iter().zip(&files) {
            let region = map_region(&self.budget, region, file, &self.regions);
            mapped.push(region.map_err(Error::ReqHandlerError)?);
        }
        self.remap(true, |regions| {
            *regions = mapped;
            Ok(())
        })?;
        self.again.clear();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let packed = self.packed();
        let vring = self.vring(index)?;
        let size = u16::try_from(num).unwrap_or(0);
        // Virtio 1.3, 2.7: split ring sizes are powers of two; packed ones are not bound to that (2.8).
        if size == 0 || size > MAX_QUEUE_SIZE || (!packed && !size.is_power_of_two()) {
            return Err(refuse(format!("queue {index} cannot have {num} descriptors")));
        }
        if vring.running {
            return Err(refuse("the ring's size changes while the ring runs"));
        }
        vring.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let vring = self.vring(index)?;
        let addrs = UserAddrs { desc: descriptor, driver: available, device: used, log };
        if vring.running {
            // Only the log may change under a running ring (live migration switches it on and off).
            let old = vring.addrs.expect("a running ring has addresses");
            if (old.desc, old.driver, old.device) != (addrs.desc, addrs.driver, addrs.device) {
                return Err(refuse("ring addresses change while the ring runs"));
            }
            vring.addrs = Some(addrs);
            self.update_log();
            return Ok(());
        }
        vring.addrs = Some(addrs);
        self.start(index as usize)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let vring = self.vring(index)?;
        if vring.running {
            return Err(refuse("the base changes while the ring runs"));
        }
        vring.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.vring(index)?;
        self.hand_over(index as usize);
        let vring = self.vring(index)?;
        vring.kick = None;
        let base = vring.base;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let Some(fd) = fd else {
            return Err(refuse("a ring without a kick would have to be polled for ever"));
        };
        self.vring(index.into())?;
        let fd = eventfd(fd)?;
        // A running ring gets a new kick: stopped and started, so that none is lost on the old one.
        self.pause(index.into());
        self.vring(index.into())?.kick = Some(Arc::new(fd));
        let started = self.start(index.into());
        self.close_if_stopped(index.into());
        started
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let by_kernel = self.server.is_external();
        let fd = fd.map(|fd| call_fd(fd, by_kernel)).transpose()?;
        // The kernel engine signals its descriptors by itself.
        let make = if by_kernel { EventFd::rare } else { EventFd::new };
        let call = fd.map(make).transpose().map_err(no_eventfd)?;
        let vring = self.vring(index.into())?;
        vring.call = call.map(Arc::new);
        if !vring.running {
            return Ok(());
        }
        let call = vring.call.clone();
        self.server.set_call(index.into(), call).map_err(refuse)
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let err = fd.map(eventfd).transpose()?.map(EventFd::rare).transpose().map_err(no_eventfd)?;
        self.vring(index.into())?.err = err;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.offered())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match VhostUserProtocolFeatures::from_bits(features) {
            Some(bits) if self.offered().contains(bits) => {
                self.protocol = bits;
                Ok(())
            }
            _ => Err(refuse(format!("not all of the protocol features {features:#x} were offered"))),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.enabled = enable;
        if enable {
            self.start(index as usize)
        } else {
            self.switch_off(index as usize);
            Ok(())
        }
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = self.device.config();
        let mut bytes = vec![0; size as usize];
        // Front-ends ask for the space as they know it, which may be longer than ours: the rest is zero.
        let from = config.get(offset as usize..).ok_or(Error::InvalidParam)?;
        let n = from.len().min(bytes.len());
        bytes[..n].copy_from_slice(&from[..n]);
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        if self.device.set_config(offset, bytes).map_err(refuse)? == ConfigChange::Settle {
            self.settle()?;
        }
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(NOT_OURS)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(NOT_OURS)
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.make_inflight(asked)
    }

    fn set_inflight_fd(&mut self, area: &VhostUserInflight, file: File) -> Result<()> {
        self.take_inflight(area, &file)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(self.server.regions_max())
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let key = (region.guest_phys_addr, region.user_addr, region.memory_size);
        let shared = Shared::new(&self.budget, &file).map_err(Error::ReqHandlerError)?;
        let known = self.regions.iter().find(|r| (r.guest_addr, r.user_addr, r.size) == key);
        let same = |r: &Region| {
            let is_there = |map: &Mapping| map.is_of(&shared, region.mmap_offset, region.memory_size);
            r.keep.downcast_ref::<Mapping>().is_some_and(is_there)
        };
        if known.is_some_and(same) {
            return match self.again.add(key) {
                true => Ok(None),
                false => Err(refuse("a memory region is added again and again")),
            };
        }
        // Other memory at the same place: it was replaced, and not every pair has said so yet.
        let region =
            map_region(&self.budget, region, &file, &self.regions).map_err(Error::ReqHandlerError)?;
        self.remap(false, |regions| {
            regions.retain(|r| (r.guest_addr, r.user_addr, r.size) != key);
            regions.push(region);
            Ok(())
        })?;
        self.again.forget(key);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let key = (region.guest_phys_addr, region.user_addr, region.memory_size);
        if self.again.remove(key) {
            return Ok(());
        }
        self.remap(false, |regions| {
            let before = regions.len();
            regions.retain(|r| (r.guest_addr, r.user_addr, r.size) != key);
            if regions.len() == before { Err(refuse("there is no such memory region")) } else { Ok(()) }
        })
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(NOT_OURS)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(NOT_OURS)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(NOT_OURS)
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        if log.mmap_size > LOG_BYTES_MAX {
            return Err(refuse(format!(
                "the dirty log has {} bytes, and {LOG_BYTES_MAX} is the limit",
                log.mmap_size
            )));
        }
        let map = Mapping::new(&self.budget, &file, log.mmap_offset, log.mmap_size);
        self.go_over_to(&map.map_err(Error::ReqHandlerError)?)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
        // They lie in the front end's memory, which keeps its connection open.
        if let Some(network) = self.device.network() {
            network.set_notes(None);
        }
        self.agreed.store(0, Relaxed);
        let forgotten = self
            .server
            .set_features(0)
            .and_then(|()| self.server.set_memory(&GuestMemory::empty(), &self.mem));
        if let Err(e) = forgotten {
            tracing::warn!("{}: the kernel still knows of a guest that went: {e}", self.name);
        }
    }
}
