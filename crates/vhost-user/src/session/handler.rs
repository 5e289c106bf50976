//! Implements the trait of crate `vhost` for a session: one function for each message of a front
//! end.
//!
//! Called by [`dispatch`](super::super::dispatch), message by message, on the session thread.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};
use virtio::mem::Region;
use virtio::ring::MAX_QUEUE_SIZE;
use vshunt_engine::EventFd;

use super::super::ConfigChange;
use super::super::budget::check_descriptors;
use super::super::channel::write_only;
use super::super::memory::{Mapping, Shared, is_eventfd, map_region};
use super::{F_LOG_ALL, F_PROTOCOL, SHARE_MEMORY, Session, UserAddrs, refuse};
use vshunt_types::convert::copy_start;

/// Bytes of the dirty log at most: bits for 32 TiB of guest-physical addresses.
const LOG_BYTES_MAX: u64 = 1 << 30;

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.restart();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.restart();
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
            self.stop_all_discarding();
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
            // Without protocol features there is no SET_VRING_ENABLE, and rings are enabled from
            // the start.
            self.stop_all_discarding();
            for vring in &mut self.vrings {
                (vring.enabled, vring.switched_off) = (true, false);
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
        self.repeats.clear();
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let packed = self.packed();
        let ring = self.ring_index(index)?;
        self.stop_discarding(ring);
        let vring = self.vring(index)?;
        let size = u16::try_from(num).unwrap_or(0);
        // The size of a split ring is a power of two (Virtio 1.3, 2.7). The size of a packed ring
        // need not be (2.8).
        if size == 0 || size > MAX_QUEUE_SIZE || (!packed && !size.is_power_of_two()) {
            return Err(refuse(format!(
                "queue {index} cannot have {num} descriptors, but {MAX_QUEUE_SIZE} at most{}; limit them in \
                 the VMM (QEMU: queue-size, crosvm: max-queue-size, Cloud Hypervisor: queue_size)",
                if packed { "" } else { ", and a power of two" }
            )));
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
        let ring = self.ring_index(index)?;
        self.stop_discarding(ring);
        let vring = self.vring(index)?;
        let addrs = UserAddrs { desc: descriptor, driver: available, device: used, log };
        if vring.running {
            // Only the dirty log may change while a ring runs: live migration switches it on and
            // off.
            let old = vring.addrs.expect("a running ring has addresses");
            if (old.desc, old.driver, old.device) != (addrs.desc, addrs.driver, addrs.device) {
                return Err(refuse("ring addresses change while the ring runs"));
            }
            vring.addrs = Some(addrs);
            self.update_log();
            return Ok(());
        }
        vring.addrs = Some(addrs);
        self.start(ring)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.ring_index(index)?;
        self.stop_discarding(ring);
        let vring = self.vring(index)?;
        if vring.running {
            return Err(refuse("the base changes while the ring runs"));
        }
        vring.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let ring = self.ring_index(index)?;
        self.hand_over(ring);
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
        // A running ring is stopped and started, so that no kick on the old descriptor is lost.
        self.pause(index.into());
        self.vring(index.into())?.kick = Some(Arc::new(fd));
        let started = self.start(index.into());
        self.close_if_stopped(index.into());
        started
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let by_kernel = self.server.is_external();
        let fd = fd.map(|fd| call_fd(fd, by_kernel)).transpose()?;
        // The kernel signals the call descriptors of its rings.
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
        let index = self.ring_index(index)?;
        if enable { self.switch_on(index) } else { self.switch_off(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = self.device.config();
        let mut bytes = vec![0; size as usize];
        // Front ends read the configuration space as they know it, which may be longer than here.
        // The rest is zero.
        let from = config.get(offset as usize..).ok_or(Error::InvalidParam)?;
        copy_start(&mut bytes, from);
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
            return match self.repeats.add(key) {
                true => Ok(None),
                false => Err(refuse("a memory region is added again and again")),
            };
        }
        // A region with other memory at the same addresses is replaced: not every queue pair has
        // removed the old one yet.
        let region =
            map_region(&self.budget, region, &file, &self.regions).map_err(Error::ReqHandlerError)?;
        self.remap(false, |regions| {
            regions.retain(|r| (r.guest_addr, r.user_addr, r.size) != key);
            regions.push(region);
            Ok(())
        })?;
        self.repeats.forget(key);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let key = (region.guest_phys_addr, region.user_addr, region.memory_size);
        if self.repeats.remove(key) {
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

impl Session {
    /// Checks that the daemon can keep one more descriptor of a ring.
    ///
    /// # Errors
    /// It would leave too few for others.
    pub(in super::super) fn check_room(&self, file: &File) -> Result<()> {
        let of = |vring: &super::Vring| {
            [vring.kick.is_some(), vring.call.is_some(), vring.err.is_some()]
                .into_iter()
                .filter(|is| *is)
                .count()
        };
        check_descriptors(self.vrings.iter().map(of).sum(), file).map_err(refuse)
    }
}

/// Checks the kick or error descriptor of a ring.
fn eventfd(file: File) -> Result<OwnedFd> {
    if is_eventfd(&file) { Ok(file.into()) } else { Err(refuse("a ring's descriptor is no eventfd")) }
}

fn no_eventfd(e: std::io::Error) -> Error {
    refuse(format!(
        "a ring's call or error descriptor cannot be signalled: {e}; where a limit of open files or of locked memory is \
         reached, raise it (ulimit -n and -l, LimitNOFILE= and LimitMEMLOCK=); 'vshunt doctor' says whether io_uring is \
         refused, and by what"
    ))
}

/// Checks the call descriptor of a ring: an eventfd, or the socket that User-mode Linux uses
/// instead.
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
