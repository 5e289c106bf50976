//! A tap with several queues.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::ioctl::{Setter, ioctl};

use super::{IfReq, oops};
use crate::error::{Error, Kind, Result};

const TUNSETIFF: u32 = 0x4004_54ca;
const TUNSETVNETHDRSZ: u32 = 0x4004_54d8;
/// IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_MULTI_QUEUE.
const TAP_FLAGS: i16 = 0x0002 | 0x1000 | 0x4000 | 0x0100;

/// Bytes of the header before each frame: virtio 1.3, 5.1.6, with `num_buffers`.
pub const VNET_HEADER: usize = 12;

/// Makes the tap, or joins it if it is there: a file a queue, each frame behind a header of [`VNET_HEADER`] bytes. It is
/// gone when they are closed. A read where nothing is, is EAGAIN.
///
/// # Errors
/// No /dev/net/tun, no right to it, or an interface of this name that is no such tap.
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
        unsafe { ioctl(&file, Setter::<TUNSETIFF, IfReq>::new(request)) }.map_err(oops("TUNSETIFF"))?;
        // SAFETY: TUNSETVNETHDRSZ reads an int.
        unsafe { ioctl(&file, Setter::<TUNSETVNETHDRSZ, i32>::new(VNET_HEADER as i32)) }
            .map_err(oops("TUNSETVNETHDRSZ"))?;
        Ok(file)
    };
    (0..queues).map(one).collect()
}
