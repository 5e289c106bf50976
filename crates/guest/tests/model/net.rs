//! The network device of the model: it gives frames to every receive ring, and checks the frames of
//! the transmit rings.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio::ring::{Chain, DeviceRing, Head, Seg};
use vshunt_guest::driver::feature;
use vshunt_guest::net::frame::{self, Direction, Mark, MarkedFrame, Sizes};
use vshunt_guest::net::{Flows, Tally};

use super::serve::{QueueThread, counts_down};

/// MAC, status, queue pairs, MTU.
pub(crate) const CONFIG: [u8; 12] = [2, 0, 0, 0, 0, 9, 1, 0, 2, 0, 0xDC, 5];
const HEADER: usize = 12;
/// Number of flows of each receive ring.
const FLOWS: u16 = 8;
const OFFER: u64 = feature::VERSION_1
    | feature::PROTOCOL_FEATURES
    | feature::RING_PACKED
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::NET_MQ
    | feature::NET_MAC
    | feature::NET_MRG_RXBUF
    | feature::NET_CSUM
    | feature::NET_GUEST_CSUM
    | feature::NET_HOST_USO
    | feature::NET_GUEST_USO4
    | feature::NET_GUEST_USO6;

/// The settings and results of the device.
#[derive(Default)]
pub(crate) struct Net {
    /// Frames that are left for the guest, over all rings.
    pub(crate) to_guest: AtomicI64,
    /// Lengths of the frames. `None`: 60 to 1514 bytes.
    pub(crate) sizes: Mutex<Option<Sizes>>,
    /// Whether the frames have no checksums.
    pub(crate) partial: std::sync::atomic::AtomicBool,
    /// Damages, omits, repeats this frame. Each counts down; 0: none.
    pub(crate) damage_in: AtomicI64,
    pub(crate) lose_in: AtomicI64,
    pub(crate) twice_in: AtomicI64,
    /// Sets the number of buffers in the header of this frame to 0. Counts down; 0: none.
    pub(crate) wrong_count_in: AtomicI64,
    /// Features that are not offered.
    pub(crate) refuse: AtomicU64,
    /// Frames that the guest sent.
    pub(crate) got: Mutex<Tally>,
    flows: Flows,
    /// Next numbers of the flows of each ring.
    next: Mutex<Vec<u64>>,
}

impl Net {
    pub(crate) fn offer(&self) -> u64 {
        OFFER & !self.refuse.load(Ordering::Acquire)
    }

    /// Returns the next frame for ring `index`, with its header, for iteration `iteration` of its
    /// flows.
    fn next_frame(&self, index: usize, iteration: u64) -> Vec<u8> {
        let flow = (iteration % u64::from(FLOWS)) as u16 + (index / 2) as u16 * FLOWS;
        let number = {
            let mut next = self.next.lock().expect("numbers");
            next.resize(usize::from(frame::FLOWS_MAX), 0);
            next[usize::from(flow)] += 1 + u64::from(counts_down(&self.lose_in));
            if counts_down(&self.twice_in) {
                next[usize::from(flow)] -= 1;
            }
            next[usize::from(flow)] - 1
        };
        let sizes = self.sizes.lock().expect("sizes").unwrap_or(Sizes::Range(60, 1514));
        let (len, partial) = (sizes.len(number), self.partial.load(Ordering::Acquire));
        let mut bytes = vec![0; HEADER + len];
        MarkedFrame::new(Direction::In, Mark { run: 5, flow, number }, len, partial)
            .write(&mut bytes[HEADER..]);
        bytes[0] = u8::from(partial);
        if counts_down(&self.damage_in) {
            bytes[HEADER + 59] ^= 0x10;
        }
        bytes
    }

    /// Takes a frame from the guest on ring `index`.
    fn take(&self, index: usize, bytes: &[u8]) {
        let (header, frame) = bytes.split_at(HEADER);
        let mut tally = self.got.lock().expect("tally");
        let Some(mark) = frame::read_mark(frame) else {
            tally.other += 1;
            return;
        };
        tally.frames += 1;
        tally.bytes += frame.len() as u64;
        self.flows.note(mark, index as u32, &mut tally);
        if frame::check(frame, mark, header[0] & 1 != 0).is_err() {
            tally.damaged += 1;
        }
    }
}

fn copy_out(segs: &[Seg]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for seg in segs {
        let at = bytes.len();
        bytes.resize(at + seg.len as usize, 0);
        // SAFETY: the ring checked that the segment is in guest memory. `bytes` is this function's
        // own vector.
        unsafe { seg.ptr.copy_to(bytes[at..].as_mut_ptr(), seg.len as usize) };
    }
    bytes
}

fn wait(ring: &mut DeviceRing, kick: &OwnedFd) {
    if !ring.enable_kick() {
        let mut fds = [PollFd::new(kick, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 5_000_000 }));
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(kick, &mut [0; 8]);
        }
    }
}

impl QueueThread {
    pub(super) fn run_nic(&mut self) {
        if self.index.is_multiple_of(2) { self.give_frames() } else { self.take_frames() }
    }

    /// Handles a chain that the previous model had taken: a receive buffer still needs its frame.
    pub(super) fn carry_on(&mut self) {
        if self.index.is_multiple_of(2) {
            self.spare.push((self.chain.head, self.chain.segs[0]));
            return;
        }
        let shared = self.shared.clone();
        let bytes = copy_out(&self.chain.segs[..self.chain.readable]);
        shared.net.as_ref().expect("a device").take(self.index, &bytes);
        self.ring.push(self.chain.head, 0);
    }

    fn tell(&mut self) {
        if !self.ended() && self.ring.publish() {
            let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
        }
    }

    fn take_frames(&mut self) {
        let (memory, shared) = (self.memory.clone(), self.shared.clone());
        let net = shared.net.as_ref().expect("a device");
        while !self.ended() {
            let mut taken = 0;
            while taken < 64 && self.ring.pop(&memory, &mut self.chain).expect("a sound ring") {
                taken += 1;
                net.take(self.index, &copy_out(&self.chain.segs[..self.chain.readable]));
                self.ring.push(self.chain.head, 0);
                if counts_down(&shared.behaviour.die_after) {
                    shared.dying.store(true, Ordering::Release);
                    return;
                }
            }
            self.tell();
            if taken == 0 {
                wait(&mut self.ring, &self.kick);
            }
        }
    }

    fn give_frames(&mut self) {
        let (memory, shared) = (self.memory.clone(), self.shared.clone());
        let net = shared.net.as_ref().expect("a device");
        let (mut iteration, mut left) = (0, Vec::new());
        while !self.ended() {
            let mut given = 0;
            while given < 32 {
                if left.is_empty() {
                    if net.to_guest.fetch_sub(1, Ordering::AcqRel) <= 0 {
                        net.to_guest.fetch_add(1, Ordering::AcqRel);
                        break;
                    }
                    left = net.next_frame(self.index, iteration);
                    iteration += 1;
                }
                if !self.give(&memory, &mut left, net) {
                    break;
                }
                given += 1;
            }
            self.tell();
            match given {
                0 if left.is_empty() => std::thread::sleep(Duration::from_millis(1)),
                0 => wait(&mut self.ring, &self.kick),
                _ => {}
            }
        }
    }

    /// Puts a frame into as many buffers as it needs. Returns false if there are not enough yet.
    /// Buffers that were taken are kept.
    fn give(&mut self, memory: &virtio::mem::GuestMemory, frame: &mut Vec<u8>, net: &Net) -> bool {
        // Buffers of the previous model come first.
        let room = |spare: &[(Head, Seg)]| spare.iter().map(|b| b.1.len as usize).sum::<usize>();
        while room(&self.spare) < frame.len() {
            let mut chain = Chain::new();
            if !self.ring.pop(memory, &mut chain).expect("a sound ring") {
                return false;
            }
            assert_eq!((chain.segs.len(), chain.readable), (1, 0), "a receive buffer is one descriptor");
            self.spare.push((chain.head, chain.segs[0]));
        }
        let needed = (1..).find(|&n| room(&self.spare[..n]) >= frame.len()).expect("there is room");
        let buffers: Vec<_> = self.spare.drain(..needed).collect();
        let count = if counts_down(&net.wrong_count_in) { 0 } else { buffers.len() as u16 };
        frame[10..12].copy_from_slice(&count.to_le_bytes());
        let mut rest = &frame[..];
        for (head, seg) in buffers {
            let (now, later) = rest.split_at(rest.len().min(seg.len as usize));
            // SAFETY: the ring checked that the segment is in guest memory and has its length.
            unsafe { seg.ptr.copy_from(now.as_ptr(), now.len()) };
            self.ring.push(head, now.len() as u32);
            rest = later;
        }
        frame.clear();
        true
    }
}
