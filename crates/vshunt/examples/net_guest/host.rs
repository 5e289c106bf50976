//! The host's side: a packet socket on the tap, and frames that say which they are.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test, in which one block has one purpose")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::{Outcome, text};

/// The guest's address, as the export was told.
pub(crate) const GUEST: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
/// Of the host's frames: nobody's.
pub(crate) const HOST: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// The first bytes of the UDP payload of a frame of the test.
const MAGIC: u32 = 0x7673_6E74;
/// Ethernet, IPv4 and UDP headers.
pub(crate) const HEADERS: usize = 14 + 20 + 8;
/// The shortest frame that has room for all that it says.
pub(crate) const FRAME_MIN: usize = HEADERS + 12;

/// What a frame of the test says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark {
    /// Its UDP source port.
    pub(crate) flow: u16,
    /// Its number among all frames of a case.
    pub(crate) number: u32,
    /// A number that the case chose, so that none is taken for another's.
    pub(crate) case: u32,
}

/// A UDP frame of `len` bytes that says `mark`, its remaining bytes a function of that.
pub(crate) fn frame(from: [u8; 6], to: [u8; 6], mark: Mark, len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(len);
    frame.extend_from_slice(&to);
    frame.extend_from_slice(&from);
    frame.extend_from_slice(&[8, 0]);
    let ip_len = (len - 14) as u16;
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2];
    ip[2..4].copy_from_slice(&ip_len.to_be_bytes());
    let sum = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum::<u32>();
    let sum = !((sum & 0xFFFF) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend_from_slice(&ip);
    frame.extend_from_slice(&mark.flow.to_be_bytes());
    frame.extend_from_slice(&9u16.to_be_bytes());
    frame.extend_from_slice(&(ip_len - 20).to_be_bytes());
    frame.extend_from_slice(&[0, 0]);
    frame.extend_from_slice(&MAGIC.to_be_bytes());
    frame.extend_from_slice(&mark.number.to_be_bytes());
    frame.extend_from_slice(&mark.case.to_be_bytes());
    let seed = mark.number.wrapping_mul(31).wrapping_add(mark.case) as usize;
    frame.extend((frame.len()..len).map(|at| (seed + at * 7) as u8));
    frame
}

/// What a frame says, if it is a frame of the test; an error where it is not as it was sent.
pub(crate) fn read_mark(frame: &[u8]) -> Option<Outcome<Mark>> {
    let word = |at: usize| frame.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    if frame.get(12..14) != Some(&[8, 0]) || word(HEADERS) != Some(MAGIC) {
        return None;
    }
    let flow = u16::from_be_bytes([frame[34], frame[35]]);
    let mark = Mark { flow, number: word(HEADERS + 4)?, case: word(HEADERS + 8)? };
    let (to, from) = (frame[..6].try_into().ok()?, frame[6..12].try_into().ok()?);
    let want = self::frame(from, to, mark, frame.len());
    Some(match want == frame {
        true => Ok(mark),
        false => Err(format!("a frame of {} bytes, {mark:?}, is not as it was sent", frame.len())),
    })
}

/// A packet socket on the tap.
pub(crate) struct Host(OwnedFd);

impl Host {
    pub(crate) fn open(ifname: &str) -> Outcome<Self> {
        let name = std::ffi::CString::new(ifname).map_err(text)?;
        let all = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: plain calls; the name ends, and the address is as long as it says.
        unsafe {
            let index = libc::if_nametoindex(name.as_ptr());
            let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            let fd = libc::socket(libc::AF_PACKET, kind, all.into());
            if index == 0 || fd < 0 {
                return Err(format!("no packet socket on {ifname}: {}", io::Error::last_os_error()));
            }
            let fd = OwnedFd::from_raw_fd(fd);
            let bytes: libc::c_int = 16 << 20;
            let size = size_of::<libc::c_int>() as u32;
            let buf = (&raw const bytes).cast();
            libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, buf, size);
            let mut at: libc::sockaddr_ll = std::mem::zeroed();
            (at.sll_family, at.sll_protocol, at.sll_ifindex) = (libc::AF_PACKET as u16, all, index as i32);
            let size = size_of::<libc::sockaddr_ll>() as u32;
            match libc::bind(fd.as_raw_fd(), (&raw const at).cast(), size) {
                0 => Ok(Self(fd)),
                _ => Err(format!("no packet socket on {ifname}: {}", io::Error::last_os_error())),
            }
        }
    }

    /// Sends a frame into the tap, to the guest.
    pub(crate) fn send(&self, frame: &[u8]) -> Outcome {
        // SAFETY: the frame lives over the call.
        match unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) } {
            n if n as usize == frame.len() => Ok(()),
            _ => Err(format!("a frame of {} bytes is not sent: {}", frame.len(), io::Error::last_os_error())),
        }
    }

    /// The next frame that came from the guest's address; none within `wait`.
    pub(crate) fn receive(&self, wait: Duration) -> Option<Vec<u8>> {
        let end = Instant::now() + wait;
        let mut frame = vec![0; 70_000];
        loop {
            // SAFETY: the kernel writes at most as many bytes as there are.
            let n = unsafe { libc::recv(self.0.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len(), 0) };
            if n >= 14 && frame[6..12] == GUEST {
                frame.truncate(n as usize);
                return Some(frame);
            }
            if n < 0 {
                if Instant::now() > end {
                    return None;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }
}
