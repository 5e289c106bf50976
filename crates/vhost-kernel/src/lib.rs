//! The kernel's vhost devices, as their owner uses them: one file, and one method for each ioctl.
//!
//! The kernel engine of vshunt and `vshunt-bench kernel` use it. Threads of the owning process may
//! share a [`Vhost`], because the kernel serialises the calls. The calls that stop rings wait until
//! nothing of them is in flight. Structs and numbers are in [`virtio::vhost`].
//!
//! ```no_run
//! use vhost_kernel::Vhost;
//!
//! let device = Vhost::open("/dev/vhost-net")?;
//! device.set_owner()?;
//! println!("features: {:#x}", device.features()?);
//! # Ok::<(), vhost_kernel::Error>(())
//! ```

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::ioctl::{Getter, NoArg, Opcode, Setter, Updater, ioctl};
use virtio::vhost::*;

/// A call that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device could not be opened. The text contains the remedy.
    #[error("{}", explain_open(path, *errno))]
    Open {
        /// The path of the device.
        path: PathBuf,
        /// The kernel's reason.
        errno: Errno,
    },
    /// The kernel refused a call.
    #[error("{call} failed: {}", describe(call, *errno))]
    Call {
        /// The name of the ioctl, with the ring or worker if it has one.
        call: String,
        /// The kernel's reason.
        errno: Errno,
    },
}

impl Error {
    /// Returns the kernel's reason.
    pub fn errno(&self) -> Errno {
        match self {
            Error::Open { errno, .. } | Error::Call { errno, .. } => *errno,
        }
    }
}

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns why a device could not be opened, and the remedy.
fn explain_open(path: &Path, errno: Errno) -> String {
    let name = path.display();
    let module = path.file_name().map(|n| n.to_string_lossy().replace('-', "_")).unwrap_or_default();
    match errno {
        Errno::NOENT => format!(
            "there is no {name}: the module {module} is not loaded or not installed; as root: modprobe {module}"
        ),
        // udev made the node before the module was loaded.
        Errno::NODEV | Errno::NXIO => {
            format!("nothing stands behind {name}: load the module; as root: modprobe {module}")
        }
        Errno::ACCESS | Errno::PERM => format!(
            "no permission to open {name} for reading and writing: run as root, or as a member of the group that \
             owns it"
        ),
        _ => format!("cannot open {name}: {errno}"),
    }
}

/// Describes an errno of a call by what it means for that call.
fn describe(call: &str, errno: Errno) -> String {
    let call = call.split(' ').next().unwrap_or(call);
    let words = match (call, errno) {
        (_, Errno::NOTTY) => "the device does not offer it",
        (_, Errno::PERM) => "another process owns the device, or no process owns it yet",
        ("VHOST_SET_OWNER", Errno::BUSY) => "the device has an owner",
        ("VHOST_BLK_SET_BACKEND", Errno::BUSY) => "the device has a backend: take that away first",
        ("VHOST_BLK_SET_BACKEND", Errno::NOTBLK) => "the backend is not a block device",
        ("VHOST_BLK_SET_BACKEND", Errno::ACCESS) => "the block device is not open for writing",
        ("VHOST_BLK_SET_BACKEND", Errno::TOOBIG) => "this module does not know what is asked of the backend",
        ("VHOST_BLK_SET_VRING", Errno::NODEV) => "the device has no backend",
        ("VHOST_BLK_SET_VRING", Errno::FAULT) => "the ring's addresses are not in the memory table",
        ("VHOST_FREE_WORKER", Errno::BUSY) => "rings are attached to the worker",
        ("VHOST_FREE_WORKER" | "VHOST_ATTACH_VRING_WORKER", Errno::NODEV) => "there is no such worker",
        ("VHOST_NEW_WORKER", Errno::FAULT) => {
            "vhost runs in kthread mode (fork_from_owner_default=0), which has one worker"
        }
        ("VHOST_SET_VRING_NUM" | "VHOST_SET_VRING_BASE", Errno::BUSY) => "the ring runs: stop it first",
        _ => return errno.to_string(),
    };
    format!("{words} ({errno})")
}

/// A vhost device that this process has open.
#[derive(Debug)]
pub struct Vhost {
    file: File,
}

impl AsFd for Vhost {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<File> for Vhost {
    fn from(file: File) -> Self {
        Self { file }
    }
}

fn failed(call: &str, ring: Option<u32>) -> impl FnOnce(Errno) -> Error {
    let call = match ring {
        Some(ring) => format!("{call} (ring {ring})"),
        None => call.to_owned(),
    };
    move |errno| Error::Call { call, errno }
}

/// Returns the number for an eventfd, or for its absence, in a [`VringFile`].
fn number(fd: Option<BorrowedFd<'_>>) -> i32 {
    fd.map_or(VHOST_FILE_UNBIND, |fd| fd.as_raw_fd())
}

impl Vhost {
    /// Opens a device such as `/dev/vhost-blk`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| {
            let errno = Errno::from_io_error(&e).unwrap_or(Errno::IO);
            Error::Open { path: path.to_owned(), errno }
        })?;
        Ok(Self { file })
    }

    fn none<const CODE: Opcode>(&self, call: &str) -> Result<()> {
        // SAFETY: a private constructor for codes of `virtio::vhost` that take no argument.
        let argument = unsafe { NoArg::<CODE>::new() };
        // SAFETY: the kernel reads and writes no memory of this process for such a code.
        unsafe { ioctl(&self.file, argument) }.map_err(failed(call, None))
    }

    /// Makes a call that reads a `T`.
    ///
    /// # Safety
    /// `T` is the type that `CODE` reads, and the memory accesses that the kernel makes later
    /// because of this call are allowed.
    unsafe fn set<const CODE: Opcode, T>(&self, call: &str, ring: Option<u32>, value: T) -> Result<()> {
        // SAFETY: `T` is what `CODE` reads, by the contract of this function.
        let argument = unsafe { Setter::<CODE, T>::new(value) };
        // SAFETY: the kernel reads `value`. By the contract of this function, its later memory
        // accesses are allowed.
        unsafe { ioctl(&self.file, argument) }.map_err(failed(call, ring))
    }

    fn get<const CODE: Opcode, T: Copy>(&self, call: &str) -> Result<T> {
        // SAFETY: used with codes of `virtio::vhost`, which contain the size of `T`, a struct of
        // plain numbers.
        let argument = unsafe { Getter::<CODE, T>::new() };
        // SAFETY: the kernel writes one `T` to the memory of `argument`.
        unsafe { ioctl(&self.file, argument) }.map_err(failed(call, None))
    }

    fn ask<const CODE: Opcode, T: Copy>(&self, call: &str, ring: u32, mut value: T) -> Result<T> {
        // SAFETY: used with codes of `virtio::vhost`, which contain the size of `T`, a struct of
        // plain numbers.
        let argument = unsafe { Updater::<CODE, T>::new(&mut value) };
        // SAFETY: the kernel reads and writes `value` only, which lives during the call.
        unsafe { ioctl(&self.file, argument) }.map_err(failed(call, Some(ring)))?;
        Ok(value)
    }

    /// VHOST_SET_FORK_FROM_OWNER: makes the device's workers threads of this process, whatever
    /// vhost's parameter `fork_from_owner_default` says. To be called before [`Vhost::set_owner`].
    ///
    /// # Errors
    /// A kernel without this call refuses it, with an errno that is not always ENOTTY. Such a
    /// kernel has no such parameter either, or one that cannot be overridden.
    pub fn set_fork_from_owner(&self) -> Result<()> {
        // A kernel without this call takes the argument for one that begins with the number of a
        // ring.
        #[repr(C, align(4))]
        #[derive(Clone, Copy)]
        struct Argument([u8; 4]);
        let argument = Argument([1, 0, 0, 0]);
        // SAFETY: the kernel reads one byte, or four.
        unsafe { self.set::<VHOST_SET_FORK_FROM_OWNER, _>("VHOST_SET_FORK_FROM_OWNER", None, argument) }
    }

    /// VHOST_SET_OWNER: makes this process the owner. All later addresses are in its memory.
    pub fn set_owner(&self) -> Result<()> {
        self.none::<VHOST_SET_OWNER>("VHOST_SET_OWNER")
    }

    /// VHOST_RESET_OWNER: resets the device.
    pub fn reset_owner(&self) -> Result<()> {
        self.none::<VHOST_RESET_OWNER>("VHOST_RESET_OWNER")
    }

    /// VHOST_GET_FEATURES: returns the feature bits that the device offers.
    pub fn features(&self) -> Result<u64> {
        self.get::<VHOST_GET_FEATURES, u64>("VHOST_GET_FEATURES")
    }

    /// VHOST_SET_FEATURES: sets the feature bits in use. `VHOST_F_LOG_ALL` may change while rings
    /// run.
    pub fn set_features(&self, bits: u64) -> Result<()> {
        // SAFETY: the argument is a number. The caller of `set_log_base` has promised that the log
        // may be written.
        unsafe { self.set::<VHOST_SET_FEATURES, _>("VHOST_SET_FEATURES", None, bits) }
    }

    /// VHOST_SET_MEM_TABLE: sets the memory table.
    ///
    /// # Safety
    /// Until another table is set or the file is closed, the kernel reads and writes the regions as
    /// the guest's requests demand. They are shared memory to which no references exist. They need
    /// not stay mapped, because the kernel checks that.
    pub unsafe fn set_mem_table(&self, regions: &[MemoryRegion]) -> Result<()> {
        /// The header and the regions as the kernel reads them. 64 regions are its default limit;
        /// an administrator can raise it.
        #[repr(C)]
        struct Table {
            header: MemoryHeader,
            regions: [MemoryRegion; virtio::mem::MAX_REGIONS],
        }
        let call = "VHOST_SET_MEM_TABLE";
        let mut table = Box::new(Table {
            header: MemoryHeader { nregions: regions.len() as u32, padding: 0 },
            regions: [MemoryRegion::default(); virtio::mem::MAX_REGIONS],
        });
        let Some(room) = table.regions.get_mut(..regions.len()) else {
            return Err(failed(call, None)(Errno::TOOBIG));
        };
        room.copy_from_slice(regions);
        // SAFETY: a table of plain numbers, with the header that this code reads at its start.
        let argument = unsafe { Updater::<VHOST_SET_MEM_TABLE, Table>::new(&mut table) };
        // SAFETY: the kernel reads as many regions as the header says, which follow it. The caller
        // promises that this process does not use the memory as Rust objects.
        unsafe { ioctl(&self.file, argument) }.map_err(failed(call, None))
    }

    /// VHOST_SET_LOG_BASE: sets the address of the log in this process, which has a bit for each
    /// page of guest memory from address 0.
    ///
    /// # Safety
    /// That of [`Vhost::set_mem_table`], for the log up to the bit of the last page of guest
    /// memory.
    pub unsafe fn set_log_base(&self, user_addr: u64) -> Result<()> {
        // SAFETY: the argument is a number of 64 bits. The caller promises that the log is mapped
        // as long as the kernel writes it.
        unsafe { self.set::<VHOST_SET_LOG_BASE, _>("VHOST_SET_LOG_BASE", None, user_addr) }
    }

    /// VHOST_SET_VRING_NUM: sets the number of descriptors. EBUSY while the ring runs.
    pub fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        let state = VringState { index, num };
        // SAFETY: plain numbers; addresses are set by `set_vring_addr`, and checked with the size
        // when the ring starts.
        unsafe { self.set::<VHOST_SET_VRING_NUM, _>("VHOST_SET_VRING_NUM", Some(index), state) }
    }

    /// VHOST_SET_VRING_BASE: sets the position at which the ring continues. EBUSY while the ring
    /// runs.
    pub fn set_vring_base(&self, index: u32, num: u32) -> Result<()> {
        let state = VringState { index, num };
        // SAFETY: plain numbers.
        unsafe { self.set::<VHOST_SET_VRING_BASE, _>("VHOST_SET_VRING_BASE", Some(index), state) }
    }

    /// VHOST_GET_VRING_BASE: returns the position at which a stopped ring continues. It does not
    /// stop the ring.
    pub fn vring_base(&self, index: u32) -> Result<u32> {
        let state = VringState { index, num: 0 };
        Ok(self.ask::<VHOST_GET_VRING_BASE, _>("VHOST_GET_VRING_BASE", index, state)?.num)
    }

    /// VHOST_SET_VRING_ADDR: sets the addresses of the ring's parts. The log bit may change while
    /// the ring runs.
    ///
    /// # Safety
    /// That of [`Vhost::set_mem_table`], for the ring's parts, whose lengths follow from the ring's
    /// size.
    pub unsafe fn set_vring_addr(&self, addr: &VringAddr) -> Result<()> {
        // SAFETY: this is the struct that the code reads. The caller promises that the ring's parts
        // contain no Rust object.
        unsafe { self.set::<VHOST_SET_VRING_ADDR, _>("VHOST_SET_VRING_ADDR", Some(addr.index), *addr) }
    }

    /// VHOST_SET_VRING_KICK: sets the guest's eventfd. Without one the ring is not served.
    pub fn set_vring_kick(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let file = VringFile { index, fd: number(fd) };
        // SAFETY: the argument is a file number. The kernel takes a reference to the file.
        unsafe { self.set::<VHOST_SET_VRING_KICK, _>("VHOST_SET_VRING_KICK", Some(index), file) }
    }

    /// VHOST_SET_VRING_CALL: sets the eventfd that notifies the guest. It may change at any time.
    pub fn set_vring_call(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let file = VringFile { index, fd: number(fd) };
        // SAFETY: the argument is a file number. The kernel takes a reference to the file.
        unsafe { self.set::<VHOST_SET_VRING_CALL, _>("VHOST_SET_VRING_CALL", Some(index), file) }
    }

    /// VHOST_SET_VRING_ERR: sets an eventfd that is signalled when the ring is broken.
    pub fn set_vring_err(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let file = VringFile { index, fd: number(fd) };
        // SAFETY: the argument is a file number. The kernel takes a reference to the file.
        unsafe { self.set::<VHOST_SET_VRING_ERR, _>("VHOST_SET_VRING_ERR", Some(index), file) }
    }

    /// VHOST_NEW_WORKER: makes a worker and returns its id. To be called after
    /// [`Vhost::set_owner`].
    pub fn new_worker(&self) -> Result<u32> {
        Ok(self.get::<VHOST_NEW_WORKER, WorkerState>("VHOST_NEW_WORKER")?.worker_id)
    }

    /// VHOST_FREE_WORKER: frees a worker. EBUSY while rings are attached to it.
    pub fn free_worker(&self, worker_id: u32) -> Result<()> {
        // SAFETY: the argument is a number.
        unsafe { self.set::<VHOST_FREE_WORKER, _>("VHOST_FREE_WORKER", None, WorkerState { worker_id }) }
    }

    /// VHOST_ATTACH_VRING_WORKER: attaches a ring to a worker, also while the ring runs.
    pub fn attach(&self, index: u32, worker_id: u32) -> Result<()> {
        let value = VringWorker { index, worker_id };
        // SAFETY: the argument consists of plain numbers.
        unsafe { self.set::<VHOST_ATTACH_VRING_WORKER, _>("VHOST_ATTACH_VRING_WORKER", Some(index), value) }
    }

    /// VHOST_GET_VRING_WORKER: returns the worker that a ring is attached to.
    pub fn vring_worker(&self, index: u32) -> Result<u32> {
        let value = VringWorker { index, worker_id: 0 };
        Ok(self.ask::<VHOST_GET_VRING_WORKER, _>("VHOST_GET_VRING_WORKER", index, value)?.worker_id)
    }

    /// VHOST_NET_SET_BACKEND: sets the tap or socket of a ring of `/dev/vhost-net`. None stops the
    /// ring.
    pub fn net_set_backend(&self, index: u32, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let file = VringFile { index, fd: number(fd) };
        // SAFETY: the argument is a file number. The kernel takes a reference to the file.
        unsafe { self.set::<VHOST_NET_SET_BACKEND, _>("VHOST_NET_SET_BACKEND", Some(index), file) }
    }

    /// VHOST_BLK_SET_BACKEND: sets the block device. EBUSY if there is one already.
    pub fn blk_set_backend(&self, disk: BorrowedFd<'_>, flags: u32, serial: &str) -> Result<()> {
        self.blk_backend(&BlkBackend::new(disk.as_raw_fd(), flags, serial))
    }

    /// VHOST_BLK_SET_BACKEND with -1: removes the backend. All rings are stopped first.
    pub fn blk_clear_backend(&self) -> Result<()> {
        self.blk_backend(&BlkBackend::new(-1, 0, ""))
    }

    /// VHOST_BLK_SET_BACKEND: passes `backend` unchanged.
    pub fn blk_backend(&self, backend: &BlkBackend) -> Result<()> {
        // SAFETY: the argument consists of plain numbers and a file. The kernel takes a reference
        // to the file.
        unsafe { self.set::<VHOST_BLK_SET_BACKEND, _>("VHOST_BLK_SET_BACKEND", None, *backend) }
    }

    /// VHOST_BLK_SET_VRING: starts a ring, or stops it and waits until nothing of it is in flight.
    pub fn blk_set_vring(&self, index: u32, run: bool) -> Result<()> {
        let state = VringState { index, num: u32::from(run) };
        // SAFETY: plain numbers. The memory was promised in `set_mem_table` and `set_vring_addr`.
        unsafe { self.set::<VHOST_BLK_SET_VRING, _>("VHOST_BLK_SET_VRING", Some(index), state) }
    }

    /// VHOST_BLK_SET_VRING_INFLIGHT: sets where a stopped ring records its requests in flight, and
    /// the requests that it starts with. ENOTTY: the module is older than this call.
    ///
    /// # Safety
    /// That of [`Vhost::set_mem_table`], for the region: the ring's part, whose length follows from
    /// `num`. Nothing else writes there while the ring runs.
    pub unsafe fn blk_set_vring_inflight(&self, inflight: &BlkVringInflight) -> Result<()> {
        let (call, ring) = ("VHOST_BLK_SET_VRING_INFLIGHT", Some(inflight.index));
        // SAFETY: this is the struct that the code reads. The caller promises that only the kernel
        // writes the region. The kernel only reads the heads, and checks them.
        unsafe { self.set::<VHOST_BLK_SET_VRING_INFLIGHT, _>(call, ring, *inflight) }
    }

    /// VHOST_BLK_GET_VRING_STATS: returns the counters of a ring.
    pub fn blk_vring_stats(&self, index: u32) -> Result<BlkVringStats> {
        let size = size_of::<BlkVringStats>() as u32;
        let stats = BlkVringStats { size, index, ..BlkVringStats::default() };
        self.ask::<VHOST_BLK_GET_VRING_STATS, _>("VHOST_BLK_GET_VRING_STATS", index, stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let missing = Vhost::open("/nowhere/vhost-blk").unwrap_err().to_string();
        assert!(missing.contains("modprobe vhost_blk"), "{missing}");
        let second = failed("VHOST_BLK_SET_BACKEND", None)(Errno::BUSY).to_string();
        assert!(second.contains("has a backend"), "{second}");
        let worker = failed("VHOST_ATTACH_VRING_WORKER", Some(3))(Errno::NODEV).to_string();
        assert!(worker.contains("ring 3") && worker.contains("no such worker"), "{worker}");
    }

    #[test]
    fn a_file_that_is_no_vhost_device_is_refused() {
        let null = Vhost::open("/dev/null").unwrap();
        // SAFETY: /dev/null accesses no memory.
        let inflight = unsafe { null.blk_set_vring_inflight(&BlkVringInflight::default()) };
        for e in [
            null.set_owner().unwrap_err(),
            null.features().unwrap_err(),
            null.new_worker().unwrap_err(),
            null.set_fork_from_owner().unwrap_err(),
            inflight.unwrap_err(),
        ] {
            assert_eq!(e.errno(), Errno::NOTTY, "{e}");
        }
        let too_many = vec![MemoryRegion::default(); virtio::mem::MAX_REGIONS + 1];
        // SAFETY: /dev/null accesses no memory.
        assert_eq!(unsafe { null.set_mem_table(&too_many) }.unwrap_err().errno(), Errno::TOOBIG);
    }
}
