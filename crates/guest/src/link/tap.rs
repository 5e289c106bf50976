//! A tap with several queues.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::ioctl::{Setter, ioctl};

use super::{IfReq, failed};
use crate::error::{Error, Kind, Result};

const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
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
