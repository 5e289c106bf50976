//! A tap with several queues.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::ioctl::{Setter, ioctl};

use super::{IfReq, failed};
use crate::error::{Error, Kind, Result};

const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
const TUNSETSTEERINGEBPF: u32 = 0x8004_54e0;
/// The command and the type of program of bpf(2).
const BPF_PROG_LOAD: libc::c_int = 5;
const PROG_TYPE_SOCKET_FILTER: u32 = 1;
/// IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_MULTI_QUEUE.
const TAP_FLAGS: i16 = 0x0002 | 0x1000 | 0x4000 | 0x0100;

/// Bytes of the header before each frame, with `num_buffers` (virtio 1.3, 5.1.6).
pub const VNET_HEADER: usize = 12;

/// Makes the tap, or opens it if it exists. Returns one file for each queue. A header of
/// [`VNET_HEADER`] bytes is before each frame. The tap is removed when all files are closed. A read
/// without a frame returns EAGAIN.
///
/// # Errors
/// There is no /dev/net/tun, the process has no permission, or the interface of this name is no
/// such tap.
pub fn open_tap(name: &str, queues: u16) -> Result<Vec<File>> {
    let request = IfReq::new(name, TAP_FLAGS)?;
    let one = |_| {
        let mut options = File::options();
        let file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun");
        let file = file.map_err(|e| {
            let what =
                "cannot open /dev/net/tun: the module tun is not loaded, or this is not root; modprobe tun";
            Error::with(Kind::Connect, what, e)
        })?;
        // SAFETY: TUNSETIFF reads and writes a struct ifreq, of which this is a copy.
        let join = unsafe { Setter::<TUNSETIFF, IfReq>::new(request) };
        // SAFETY: the setter holds the structure for the call, which accesses no other memory.
        unsafe { ioctl(&file, join) }.map_err(failed("TUNSETIFF"))?;
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        let header = unsafe { Setter::<TUNSETVNETHDRSZ, i32>::new(VNET_HEADER as i32) };
        // SAFETY: the setter holds the int for the call, which accesses no other memory.
        unsafe { ioctl(&file, header) }.map_err(failed("TUNSETVNETHDRSZ"))?;
        Ok(file)
    };
    (0..queues).map(one).collect()
}

/// Gives the tap of a queue a steering program, which sends all frames out of queue 0. With a
/// program, the kernel computes no hash for frames that are written to the queues.
///
/// # Errors
/// The process may not load programs (CAP_BPF), or the kernel has no bpf(2).
pub fn steer_to_first(queue: &File) -> Result<()> {
    let cannot = |e| Error::with(Kind::System, "a tap's steering program cannot be loaded (run as root)", e);
    let program = load_constant().map_err(cannot)?;
    // SAFETY: TUNSETSTEERINGEBPF reads an int, the descriptor of a program.
    let steer = unsafe { Setter::<TUNSETSTEERINGEBPF, i32>::new(program.as_raw_fd()) };
    // SAFETY: the setter holds the int for the call, which accesses no other memory.
    unsafe { ioctl(queue, steer) }.map_err(failed("TUNSETSTEERINGEBPF"))
}

/// The first fields of union bpf_attr, as BPF_PROG_LOAD uses them.
#[repr(C)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
}

/// Loads a program that returns 0.
fn load_constant() -> io::Result<OwnedFd> {
    // `r0 = 0; exit`, each as a struct bpf_insn.
    let code: [u64; 2] = [0xb7, 0x95].map(u64::to_le);
    let attr = LoadAttr {
        prog_type: PROG_TYPE_SOCKET_FILTER,
        insn_cnt: code.len() as u32,
        insns: code.as_ptr() as u64,
        license: c"MIT".as_ptr() as u64,
    };
    // SAFETY: the kernel reads the given number of bytes of `attr`, `insn_cnt` instructions and a
    // license that ends with a zero byte. All three outlive the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attr, size_of::<LoadAttr>()) };
    match libc::c_int::try_from(fd) {
        // SAFETY: the call returned a new descriptor, which nothing else owns.
        Ok(fd @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
