//! The interface of the kernel's vhost devices: structs and ioctl numbers of `<linux/vhost.h>`,
//! `<linux/vhost_types.h>` and of `/dev/vhost-blk`
//! (`kmod/vhost_blk/include/uapi/linux/vhost_blk.h`).
//!
//! This is plain data. Crate `vhost-kernel` makes the calls. Layouts are asserted here, and
//! `examples/vhost_layout.rs` prints them as C to compare them with the headers.

use core::mem::{offset_of, size_of};

use crate::bits::size_u32;

/// The type byte of all of vhost's ioctls (`VHOST_VIRTIO`).
pub const VHOST_VIRTIO: u32 = 0xAF;
/// Bit number in [`VringAddr::flags`]: `log_guest_addr` is valid, and writes to the used ring are
/// logged.
pub const VHOST_VRING_F_LOG: u32 = 0;
/// In [`VringFile::fd`]: no file.
pub const VHOST_FILE_UNBIND: i32 = -1;
/// Bytes of guest memory that one bit of the log stands for, and the alignment of regions.
pub const VHOST_PAGE_SIZE: u64 = 0x1000;

/// Rings of one `/dev/vhost-blk`.
pub const VHOST_BLK_VRINGS_MAX: u32 = 64;
/// Descriptors of one ring of `/dev/vhost-blk`.
pub const VHOST_BLK_VRING_NUM_MAX: u32 = 1024;
/// Bytes of the serial that `VIRTIO_BLK_T_GET_ID` returns.
pub const VHOST_BLK_SERIAL_BYTES: usize = 20;
/// In [`BlkBackend::flags`]: nothing is written to the backend.
pub const VHOST_BLK_BACKEND_READONLY: u32 = 1;

/// `struct vhost_vring_state`: a ring and a number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// Its size, base, or another value, depending on the call.
    pub num: u32,
}

/// `struct vhost_vring_file`: a ring and a file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFile {
    /// The ring.
    pub index: u32,
    /// An eventfd or a backend; [`VHOST_FILE_UNBIND`] for none.
    pub fd: i32,
}

/// `struct vhost_vring_addr`: the addresses of a ring's parts in the owner's address space.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringAddr {
    /// The ring.
    pub index: u32,
    /// `1 << VHOST_VRING_F_LOG` or 0.
    pub flags: u32,
    /// Descriptor table.
    pub desc_user_addr: u64,
    /// Used ring, aligned to 4.
    pub used_user_addr: u64,
    /// Available ring, aligned to 2.
    pub avail_user_addr: u64,
    /// Guest-physical address of the used ring, for the log.
    pub log_guest_addr: u64,
}

/// `struct vhost_worker_state`: a worker's id, from 1; 0 is the worker that comes with the owner.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerState {
    /// The id.
    pub worker_id: u32,
}

/// `struct vhost_vring_worker`: a ring and the worker that it is attached to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringWorker {
    /// The ring.
    pub index: u32,
    /// The worker.
    pub worker_id: u32,
}

/// `struct vhost_memory_region`: guest memory and its address in the owner's address space.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address, a multiple of [`VHOST_PAGE_SIZE`].
    pub guest_phys_addr: u64,
    /// Bytes, a multiple of [`VHOST_PAGE_SIZE`].
    pub memory_size: u64,
    /// Address in the owner's process.
    pub userspace_addr: u64,
    /// Zero.
    pub flags_padding: u64,
}

/// `struct vhost_memory` without its regions, which follow it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryHeader {
    /// How many regions follow.
    pub nregions: u32,
    /// Zero.
    pub padding: u32,
}

/// `struct vhost_blk_backend`: the block device that the rings use.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkBackend {
    /// Bytes of this struct.
    pub size: u32,
    /// [`VHOST_BLK_BACKEND_READONLY`] or 0.
    pub flags: u32,
    /// A block device; -1 removes the backend.
    pub fd: i32,
    /// Zero.
    pub reserved: u32,
    /// The serial that `VIRTIO_BLK_T_GET_ID` returns, padded with zeroes.
    pub serial: [u8; VHOST_BLK_SERIAL_BYTES],
    /// Zero.
    pub reserved2: u32,
}

impl BlkBackend {
    /// Makes a backend. At most [`VHOST_BLK_SERIAL_BYTES`] of `serial` are used.
    pub fn new(fd: i32, flags: u32, serial: &str) -> Self {
        let mut bytes = [0; VHOST_BLK_SERIAL_BYTES];
        for (to, from) in bytes.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        Self { size: size_u32::<Self>(), flags, fd, reserved: 0, serial: bytes, reserved2: 0 }
    }
}

/// `struct vhost_blk_vring_stats`: the counters of one ring since the device was opened.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkVringStats {
    /// Bytes of this struct.
    pub size: u32,
    /// The ring.
    pub index: u32,
    /// Requests taken from the ring and not returned.
    pub in_flight: u32,
    /// 1 while the ring runs.
    pub running: u32,
    /// Requests returned, with any status.
    pub requests: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Requests that are not supported.
    pub unsupported: u64,
    /// Bytes that reads took from the backend.
    pub read_bytes: u64,
    /// Bytes that writes stored on it.
    pub written_bytes: u64,
    /// Runs of the ring's work that a kick of the guest started.
    pub kicks: u64,
    /// How often the guest was notified.
    pub signals: u64,
}

/// `struct vhost_blk_vring_inflight`: where a ring records its requests in flight.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkVringInflight {
    /// Bytes of this struct.
    pub size: u32,
    /// The ring.
    pub index: u32,
    /// Its part of a vhost-user in-flight region for split rings, in the owner's process. 0:
    /// nothing is recorded.
    pub region_user_addr: u64,
    /// The number of the next request that is taken.
    pub counter: u64,
    /// A `struct vring_avail` in the owner's process, whose ring has the heads of requests that a
    /// former owner took.
    pub replay_user_addr: u64,
    /// Descriptors that the region has room for.
    pub num: u16,
    /// The region's field of that name.
    pub last_batch_head: u16,
    /// The number of heads.
    pub replay_num: u16,
    /// Zero.
    pub reserved: u16,
}

/// Returns an ioctl's number, as `_IOC` makes it on x86, Arm, RISC-V and s390: direction, size,
/// type, number.
const fn ioc(direction: u32, nr: u32, size: u32) -> u32 {
    direction << 30 | size << 16 | VHOST_VIRTIO << 8 | nr
}

const fn io(nr: u32) -> u32 {
    ioc(0, nr, 0)
}

const fn iow<T>(nr: u32) -> u32 {
    ioc(1, nr, size_u32::<T>())
}

const fn ior<T>(nr: u32) -> u32 {
    ioc(2, nr, size_u32::<T>())
}

const fn iowr<T>(nr: u32) -> u32 {
    ioc(3, nr, size_u32::<T>())
}

/// Feature bits offered, of the device and of vhost.
pub const VHOST_GET_FEATURES: u32 = ior::<u64>(0x00);
/// Feature bits that the guest accepted.
pub const VHOST_SET_FEATURES: u32 = iow::<u64>(0x00);
/// Makes the calling process the owner.
pub const VHOST_SET_OWNER: u32 = io(0x01);
/// Removes the owner and resets the device.
pub const VHOST_RESET_OWNER: u32 = io(0x02);
/// Sets the memory table.
pub const VHOST_SET_MEM_TABLE: u32 = iow::<MemoryHeader>(0x03);
/// Address of the dirty log in the owner's process.
pub const VHOST_SET_LOG_BASE: u32 = iow::<u64>(0x04);
/// Eventfd signalled when something was logged.
pub const VHOST_SET_LOG_FD: u32 = iow::<i32>(0x07);
/// Makes a worker.
pub const VHOST_NEW_WORKER: u32 = ior::<WorkerState>(0x08);
/// Frees a worker that no ring is attached to.
pub const VHOST_FREE_WORKER: u32 = iow::<WorkerState>(0x09);
/// Descriptors of a ring.
pub const VHOST_SET_VRING_NUM: u32 = iow::<VringState>(0x10);
/// Addresses of a ring.
pub const VHOST_SET_VRING_ADDR: u32 = iow::<VringAddr>(0x11);
/// Position at which a ring starts.
pub const VHOST_SET_VRING_BASE: u32 = iow::<VringState>(0x12);
/// Position at which a ring continues.
pub const VHOST_GET_VRING_BASE: u32 = iowr::<VringState>(0x12);
/// Attaches a ring to a worker.
pub const VHOST_ATTACH_VRING_WORKER: u32 = iow::<VringWorker>(0x15);
/// The worker that a ring is attached to.
pub const VHOST_GET_VRING_WORKER: u32 = iowr::<VringWorker>(0x16);
/// Eventfd with which the guest kicks.
pub const VHOST_SET_VRING_KICK: u32 = iow::<VringFile>(0x20);
/// Eventfd with which the guest is notified.
pub const VHOST_SET_VRING_CALL: u32 = iow::<VringFile>(0x21);
/// Eventfd that is signalled when a ring is broken.
pub const VHOST_SET_VRING_ERR: u32 = iow::<VringFile>(0x22);
/// Microseconds that a device polls a ring before it sleeps.
pub const VHOST_SET_VRING_BUSYLOOP_TIMEOUT: u32 = iow::<VringState>(0x23);
/// Whether workers are threads of the owner (1) or of the kernel (0). To be set before the device
/// has an owner. Linux 6.17 and stable kernels have it, depending on their configuration.
pub const VHOST_SET_FORK_FROM_OWNER: u32 = iow::<u8>(0x84);
/// `/dev/vhost-net`: the socket or tap of a ring; none stops it.
pub const VHOST_NET_SET_BACKEND: u32 = iow::<VringFile>(0x30);
/// `/dev/vhost-blk`: sets or removes the backend.
pub const VHOST_BLK_SET_BACKEND: u32 = iow::<BlkBackend>(0xE0);
/// `/dev/vhost-blk`: starts or stops a ring.
pub const VHOST_BLK_SET_VRING: u32 = iow::<VringState>(0xE1);
/// `/dev/vhost-blk`: reads a ring's counters.
pub const VHOST_BLK_GET_VRING_STATS: u32 = iowr::<BlkVringStats>(0xE2);
/// `/dev/vhost-blk`: sets where a ring records its requests in flight.
pub const VHOST_BLK_SET_VRING_INFLIGHT: u32 = iow::<BlkVringInflight>(0xE3);

// No struct has padding that the compiler chose: each size is the sum of the sizes of the fields.
const _: () = assert!(size_of::<VringState>() == 8 && size_of::<VringFile>() == 8);
const _: () = assert!(size_of::<VringAddr>() == 40 && offset_of!(VringAddr, desc_user_addr) == 8);
const _: () = assert!(size_of::<WorkerState>() == 4 && size_of::<VringWorker>() == 8);
const _: () = assert!(size_of::<MemoryRegion>() == 32 && size_of::<MemoryHeader>() == 8);
const _: () = assert!(size_of::<BlkBackend>() == 40 && offset_of!(BlkBackend, reserved2) == 36);
const _: () = assert!(size_of::<BlkVringStats>() == 72 && offset_of!(BlkVringStats, requests) == 16);
const _: () = assert!(size_of::<BlkVringInflight>() == 40 && offset_of!(BlkVringInflight, num) == 32);

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that a C compiler computes from the headers. `examples/vhost_layout.rs` lets a
    /// compiler check the others.
    #[test]
    fn numbers_are_those_of_the_headers() {
        assert_eq!(VHOST_GET_FEATURES, 0x8008_af00);
        assert_eq!(VHOST_SET_OWNER, 0x0000_af01);
        assert_eq!(VHOST_SET_MEM_TABLE, 0x4008_af03);
        assert_eq!(VHOST_SET_LOG_FD, 0x4004_af07);
        assert_eq!(VHOST_SET_VRING_ADDR, 0x4028_af11);
        assert_eq!(VHOST_GET_VRING_BASE, 0xc008_af12);
        assert_eq!(VHOST_NEW_WORKER, 0x8004_af08);
        assert_eq!(VHOST_ATTACH_VRING_WORKER, 0x4008_af15);
        assert_eq!(VHOST_BLK_SET_BACKEND, 0x4028_afe0);
        assert_eq!(VHOST_BLK_GET_VRING_STATS, 0xc048_afe2);
        assert_eq!(VHOST_BLK_SET_VRING_INFLIGHT, 0x4028_afe3);
        assert_eq!(VHOST_SET_FORK_FROM_OWNER, 0x4001_af84);
    }

    #[test]
    fn a_long_serial_is_cut() {
        let backend = BlkBackend::new(3, 0, "0123456789abcdefghijklm");
        assert_eq!(&backend.serial, b"0123456789abcdefghij");
        assert_eq!(backend.size, 40);
    }
}
