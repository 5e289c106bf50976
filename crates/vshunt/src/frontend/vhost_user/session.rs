//! One front-end's connection: what it set up, and the rings that run by it.
//!
//! All of it belongs to the session thread. A ring runs when it has memory, addresses, a kick and is enabled;
//! it is then a queue on a worker and comes back, drained, before anything that it leans on goes away.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use virtio::features::{VIRTIO_F_RING_PACKED, bit};
use virtio::inflight::{Inflight, inflight_queue_size};
use virtio::log::DirtyLog;
use virtio::mem::{GuestMemory, MAX_REGIONS, Region};
use virtio::ring::{DeviceRing, MAX_QUEUE_SIZE, RingAddrs, RingFeatures, UsedLog, ring_sizes};

use super::memory::{Mapping, is_eventfd, map_region, shared_file};
use super::{Device, Observer, VringParts};
use crate::queue::{self, Bell};
use crate::worker::{QueueSet, State};

/// VHOST_F_LOG_ALL: writes to guest memory are to be logged.
const F_LOG_ALL: u64 = bit(virtio::features::VHOST_F_LOG_ALL);
/// VHOST_USER_F_PROTOCOL_FEATURES.
const F_PROTOCOL: u64 = bit(virtio::features::VHOST_USER_F_PROTOCOL_FEATURES);
/// Page size of the dirty log, fixed by the specification: one bit each.
const LOG_PAGE_BYTES: u64 = 4096;

/// What the front-end told of one ring.
#[derive(Default)]
struct Vring {
    size: u16,
    addrs: Option<UserAddrs>,
    base: u32,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    enabled: bool,
    running: bool,
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

struct InflightArea {
    map: Arc<Mapping>,
    offset: usize,
    queues: u16,
    queue_size: u16,
}

impl InflightArea {
    /// Forgets all that the region says. Only while no ring runs: nothing is in flight then, and where packed rings
    /// stood is not to outlive a reset.
    fn clear(&self) {
        let len = self.map.len() - self.offset;
        // SAFETY: inside of the mapping, since the offset is (`set_inflight_fd`); rings, which alone use it, are gone.
        unsafe { self.map.at(self.offset).write_bytes(0, len) };
    }
}

/// See the module.
pub(super) struct Session {
    name: String,
    device: Arc<dyn Device>,
    queues: Arc<QueueSet>,
    /// Features agreed on, for `status` to read.
    agreed: Arc<AtomicU64>,
    observer: Arc<dyn Observer>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    status: u64,
    regions: Vec<Region>,
    mem: Arc<GuestMemory>,
    vrings: Vec<Vring>,
    inflight: Option<InflightArea>,
    log: Option<Arc<DirtyLog>>,
}

impl Session {
    pub(super) fn new(
        name: &str,
        device: Arc<dyn Device>,
        queues: Arc<QueueSet>,
        agreed: Arc<AtomicU64>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let vrings = (0..queues.len()).map(|_| Vring::default()).collect();
        agreed.store(0, Relaxed);
        device.negotiated(0);
        Self {
            name: name.to_owned(),
            device,
            queues,
            agreed,
            observer,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            status: 0,
            regions: Vec::new(),
            mem: Arc::new(GuestMemory::empty()),
            vrings,
            inflight: None,
            log: None,
        }
    }

    /// The device status, as the guest set it.
    pub(super) fn status(&self) -> u64 {
        self.status
    }

    /// Whether refused messages are answered by a word, so that the front-end may go on.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK)
    }

    /// SET_STATUS; 0 resets the rings. Not what the guest chose in the configuration space: QEMU writes 0 whenever
    /// a virtual machine is paused, too, and tells nothing of that space when it goes on.
    pub(super) fn set_status(&mut self, status: u64) {
        self.status = status;
        if status == 0 {
            self.reset();
        }
    }

    /// Drains and stops every ring; called when the front-end goes, too.
    pub(super) fn stop_all(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
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

    /// Stops a ring; its base is where it came to.
    fn stop(&mut self, index: usize) {
        if !std::mem::take(&mut self.vrings[index].running) {
            return;
        }
        if let Some(mut queue) = self.queues.stop(index as u16) {
            self.vrings[index].base = queue::vring(queue.as_mut()).map_or(0, |v| v.base());
        }
        tracing::debug!("{}:{index} stopped", self.name);
    }

    /// Starts a ring if all that it needs is there.
    fn start(&mut self, index: usize) -> Result<()> {
        let vring = &self.vrings[index];
        if vring.running || !vring.enabled || vring.size == 0 || self.mem.regions().is_empty() {
            return Ok(());
        }
        let (Some(kick), Some(addrs)) = (&vring.kick, vring.addrs) else { return Ok(()) };
        let kick = kick.try_clone().map_err(Error::ReqHandlerError)?;
        let call = clone_fd(vring.call.as_ref())?;
        let err = clone_fd(vring.err.as_ref())?;
        let mut ring = match self.map_ring(vring, addrs) {
            Ok(ring) => ring,
            Err(reason) => {
                self.observer.queue_broken(index as u16, &reason);
                self.queues.stats(index as u16).set_state(State::Broken);
                if let Some(err) = err {
                    Bell::new(err).ring();
                }
                return Err(refuse(format!("queue {index} cannot start: {reason}")));
            }
        };
        let mut replays = Vec::new();
        let inflight = self.inflight_of(index)?;
        let tracked = inflight.is_some();
        if let Some(inflight) = inflight {
            replays = ring.set_inflight(inflight).map_err(|e| self.bad_inflight(index, &e))?;
            if !replays.is_empty() {
                tracing::info!("{}:{index}: {} requests in flight are replayed", self.name, replays.len());
            }
        }
        let (log, used) = self.logs(addrs);
        ring.set_used_log(used);
        let bell = clone_fd(call.as_ref())?.filter(|_| tracked);
        let observer = self.observer.clone();
        let queue = self.device.queue(VringParts {
            vring: ring,
            mem: self.mem.clone(),
            replays,
            kick,
            call,
            err,
            log,
            stats: self.queues.stats(index as u16).clone(),
            name: format!("{}:{index}", self.name),
            on_broken: Box::new(move |reason| observer.queue_broken(index as u16, reason)),
        });
        self.vrings[index].running = true;
        self.queues.stats(index as u16).size.store(self.vrings[index].size, Relaxed);
        self.queues.start(index as u16, queue);
        if let Some(bell) = bell {
            // The daemon before us may have died between publishing and notifying.
            Bell::new(bell).ring();
        }
        tracing::debug!("{}:{index} started", self.name);
        Ok(())
    }

    /// The error says what is wrong with the ring.
    fn map_ring(&self, vring: &Vring, addrs: UserAddrs) -> std::result::Result<DeviceRing, String> {
        let features = RingFeatures::from_bits(self.features);
        let sizes = ring_sizes(vring.size, features);
        let at = |addr, len: usize| {
            self.mem.user_to_host(addr, len as u64).ok_or_else(|| {
                format!("{len} bytes of the ring at {addr:#x} lie outside of the guest's memory")
            })
        };
        let areas = RingAddrs {
            desc: at(addrs.desc, sizes.desc)?,
            driver: at(addrs.driver, sizes.driver)?,
            device: at(addrs.device, sizes.device)?,
        };
        // SAFETY: the areas lie in regions that the memory table keeps mapped; the queue holds that table for
        // as long as it has the ring, and one ring index runs at most once.
        unsafe { DeviceRing::new(vring.size, features, areas, vring.base) }.map_err(|e| e.to_string())
    }

    fn inflight_of(&self, index: usize) -> Result<Option<Inflight>> {
        let Some(area) = &self.inflight else { return Ok(None) };
        if index >= usize::from(area.queues) || self.vrings[index].size > area.queue_size {
            return Ok(None);
        }
        let len = inflight_queue_size(area.queue_size, self.packed());
        let offset = area.offset + index * len;
        if offset + len > area.map.len() {
            return Err(self.bad_inflight(index, &"it ends before this queue's part"));
        }
        // SAFETY: inside the mapping, which is kept by the Inflight itself.
        let inflight = unsafe {
            Inflight::new(area.map.at(offset), len, area.queue_size, self.packed(), area.map.clone())
        };
        inflight.map(Some).map_err(|e| self.bad_inflight(index, &e))
    }

    fn bad_inflight(&self, index: usize, e: &dyn std::fmt::Display) -> Error {
        refuse(format!("queue {index} cannot start: {e}"))
    }

    /// Where a ring's writes are to be marked now, buffers and its own areas.
    fn logs(&self, addrs: UserAddrs) -> (Option<Arc<DirtyLog>>, Option<UsedLog>) {
        let Some(log) = self.log.clone().filter(|_| self.logging()) else { return (None, None) };
        let used = addrs
            .log
            .zip(self.mem.user_to_guest(addrs.desc))
            .map(|(device_addr, desc_addr)| UsedLog { log: log.clone(), device_addr, desc_addr });
        (Some(log), used)
    }

    /// Changes the memory table between a stop and a start of the rings that run: whole, or not at all.
    ///
    /// Rings that wait for memory start, too. With `strict`, one that ran and lies outside of the new table is an
    /// error; without, it waits: front-ends replace a region by removing it and adding another.
    fn remap(&mut self, strict: bool, change: impl FnOnce(&mut Vec<Region>) -> Result<()>) -> Result<()> {
        let mut regions = self.regions.clone();
        change(&mut regions)?;
        // SAFETY: each region's `keep` is the mapping that `host` points into.
        let mem = unsafe { GuestMemory::new(regions.clone()) };
        let mem = Arc::new(mem.map_err(|e| refuse(format!("the memory table is not usable: {e}")))?);
        let running: Vec<bool> = self.vrings.iter().map(|v| v.running).collect();
        self.stop_all();
        (self.regions, self.mem) = (regions, mem);
        let mut result = Ok(());
        for (index, ran) in running.into_iter().enumerate() {
            let vring = &self.vrings[index];
            let lies_within = vring.addrs.is_some_and(|addrs| self.map_ring(vring, addrs).is_ok());
            if lies_within || (ran && strict) {
                result = result.and(self.start(index));
            } else if ran {
                tracing::info!("{}:{index} waits for the memory that it lies in", self.name);
            }
        }
        result
    }

    /// Tells running queues whether and where to log, between two requests.
    fn update_log(&mut self) {
        for (index, vring) in self.vrings.iter().enumerate() {
            if let (true, Some(addrs)) = (vring.running, vring.addrs) {
                let (log, used) = self.logs(addrs);
                self.queues.with_drained(index as u16, |q| {
                    if let Some(v) = queue::vring(q) {
                        v.set_log(log, used);
                    }
                });
            }
        }
    }
}

fn clone_fd(fd: Option<&OwnedFd>) -> Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose().map_err(Error::ReqHandlerError)
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
            self.device.negotiated(features);
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
        let mut mapped = Vec::with_capacity(table.len());
        for (region, file) in table.iter().zip(&files) {
            mapped.push(map_region(region, file).map_err(Error::ReqHandlerError)?);
        }
        self.remap(true, |regions| {
            *regions = mapped;
            Ok(())
        })?;
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
        self.stop(index as usize);
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
        self.stop(index.into());
        self.vring(index.into())?.kick = Some(fd);
        self.start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(eventfd).transpose()?;
        let vring = self.vring(index.into())?;
        vring.call = fd;
        if vring.running {
            let call = clone_fd(vring.call.as_ref())?;
            self.queues.visit(index.into(), move |q| {
                if let Some(v) = queue::vring(q) {
                    v.set_call(call);
                }
            });
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.map(eventfd).transpose()?;
        let vring = self.vring(index.into())?;
        vring.err = fd;
        if vring.running {
            let err = clone_fd(vring.err.as_ref())?;
            self.queues.visit(index.into(), move |q| {
                if let Some(v) = queue::vring(q) {
                    v.set_err(err);
                }
            });
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(super::PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match VhostUserProtocolFeatures::from_bits(features) {
            Some(bits) if super::PROTOCOL_FEATURES.contains(bits) => {
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
            self.stop(index as usize);
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
        self.device.set_config(offset, bytes).map_err(refuse)
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        Err(NOT_OURS)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(NOT_OURS)
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (asked.num_queues, asked.queue_size);
        if queues == 0 || usize::from(queues) > self.vrings.len() || size == 0 || size > MAX_QUEUE_SIZE {
            return Err(refuse(format!("there is no in-flight region for {queues} queues of {size}")));
        }
        let len = inflight_queue_size(asked.queue_size, self.packed()) * usize::from(asked.num_queues);
        let file = shared_file("vshunt-inflight", len as u64).map_err(Error::ReqHandlerError)?;
        let reply = VhostUserInflight::new(len as u64, 0, asked.num_queues, asked.queue_size);
        self.set_inflight_fd(&reply, file.try_clone().map_err(Error::ReqHandlerError)?)?;
        Ok((reply, file))
    }

    fn set_inflight_fd(&mut self, area: &VhostUserInflight, file: File) -> Result<()> {
        if self.vrings.iter().any(|v| v.running) {
            return Err(refuse("the in-flight region changes while rings run"));
        }
        let end = area.mmap_offset.checked_add(area.mmap_size).filter(|_| area.mmap_size > 0);
        let end = end.ok_or_else(|| refuse("the in-flight region has no end or no bytes"))?;
        let map = Mapping::new(&file, end).map_err(Error::ReqHandlerError)?;
        self.inflight = Some(InflightArea {
            map,
            offset: area.mmap_offset as usize,
            queues: area.num_queues,
            queue_size: area.queue_size,
        });
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        let region = map_region(region, &file).map_err(Error::ReqHandlerError)?;
        self.remap(false, |regions| {
            regions.push(region);
            Ok(())
        })?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, user, size) = (region.guest_phys_addr, region.user_addr, region.memory_size);
        self.remap(false, |regions| {
            let before = regions.len();
            regions.retain(|r| (r.guest_addr, r.user_addr, r.size) != (guest, user, size));
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
        let end = log.mmap_offset.checked_add(log.mmap_size).filter(|_| log.mmap_size > 0);
        let end = end.ok_or_else(|| refuse("the dirty log has no end or no bytes"))?;
        let map = Mapping::new(&file, end).map_err(Error::ReqHandlerError)?;
        let covered = log.mmap_size.saturating_mul(8 * LOG_PAGE_BYTES);
        if let Some(last) = self.regions.iter().map(|r| r.guest_addr + r.size).max()
            && covered < last
        {
            return Err(refuse(format!("the dirty log covers {covered:#x} of {last:#x} bytes of memory")));
        }
        // SAFETY: inside the mapping, which the log keeps.
        let log =
            unsafe { DirtyLog::new(map.at(log.mmap_offset as usize), log.mmap_size as usize, map.clone()) };
        self.log = Some(Arc::new(log));
        self.update_log();
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop_all();
        self.agreed.store(0, Relaxed);
    }
}
