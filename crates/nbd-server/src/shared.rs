//! What the thread of an export and its queues share.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ::nbd::server::{ALLOCATION, ALLOCATION_DEPTH, DIRTY_BITMAP, Offer, Rules};
use ::nbd::{BlockSizes, Headers, transmission_flag as flag};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vshunt_block::{Bitmap, Disk};
use vshunt_engine::{EventFd, LimitCell};
use vshunt_types::sync::Locked;

use crate::map::MapThread;
use crate::tls::Credentials;
use crate::{Bitmaps, Config};

/// The longest data of a read or write, bytes. Clients that do not ask for the block sizes assume
/// it (proto, "Block size constraints").
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Bytes of requests that need no read-modify-write on most storage.
const PREFERRED_BYTES: u32 = 4096;
/// The largest alignment that the protocol has, bytes.
pub(crate) const MINIMUM_MAX: u32 = 64 << 10;

/// A connection whose queue has nothing left to do.
pub(crate) struct Ended {
    /// Index of its queue.
    pub(crate) queue: u16,
    /// Why it ended, if the client did not end it as it should.
    pub(crate) why: Option<String>,
    /// The error of the flush of its last writes, an errno.
    pub(crate) flush_errno: Option<i32>,
}

/// A metadata context of a connection.
pub(crate) enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// The dirty blocks of a bitmap. None: it was removed before the connection began.
    Bitmap(Option<Arc<Bitmap>>),
}

/// See the module.
pub(crate) struct Shared {
    // Fixed.
    pub(crate) name: String,
    pub(crate) disk: Arc<Disk>,
    pub(crate) readonly: bool,
    pub(crate) limits: Arc<LimitCell>,
    pub(crate) map: MapThread,
    /// With TLS: what clients are shown, and how they are verified.
    pub(crate) tls: Option<Credentials>,
    bitmaps: Bitmaps,
    /// Connections that are possible at a time.
    queues: u16,
    // Any thread.
    /// Connections whose handshake is complete.
    pub(crate) connections: AtomicU32,
    /// Guards what the queues of these connections read and write. Held for a poll that does not
    /// wait, a push or a removal.
    sockets: Mutex<Vec<(u16, Arc<OwnedFd>)>>,
    /// A queue has ended whose last writes no flush covers.
    unflushed: AtomicBool,
    /// Guards the connections that have ended. Held for a push or a swap.
    ended: Mutex<Vec<Ended>>,
    /// The export ends.
    stopping: AtomicBool,
    /// Wakes the thread of the export.
    pub(crate) eventfd: Arc<EventFd>,
}

impl Shared {
    /// # Errors
    /// Those of eventfd(2).
    pub(crate) fn new(config: Config, map: MapThread, queues: u16) -> io::Result<Self> {
        let Config { name, disk, readonly, limits, bitmaps, tls } = config;
        Ok(Self {
            readonly: readonly || disk.readonly(),
            name,
            disk,
            limits,
            map,
            tls,
            bitmaps,
            queues,
            connections: AtomicU32::new(0),
            sockets: Mutex::default(),
            unflushed: AtomicBool::new(false),
            ended: Mutex::default(),
            stopping: AtomicBool::new(false),
            eventfd: Arc::new(EventFd::make()?),
        })
    }

    /// Returns the flags that clients are offered, without those that depend on the handshake.
    pub(crate) fn flags(&self) -> u16 {
        let several = if self.queues > 1 { flag::CAN_MULTI_CONN } else { 0 };
        let common = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | several;
        if self.readonly {
            return common | flag::READ_ONLY;
        }
        let limits = self.disk.limits();
        let mut flags = common;
        if limits.can_zero {
            flags |= flag::SEND_WRITE_ZEROES;
        }
        if limits.can_discard {
            flags |= flag::SEND_TRIM;
        }
        flags
    }

    /// Returns the block sizes, which clients rely on as long as they are connected: those of the
    /// disk, which do not change. Its alignment may change with a snapshot or a mirror, up to them.
    #[inline]
    pub(crate) fn blocks(&self) -> BlockSizes {
        block_sizes(self.disk.limits().block_size)
    }

    /// Returns the bitmaps that say what was written. Others would make incremental backups wrong.
    fn complete_bitmaps(&self) -> Vec<Arc<Bitmap>> {
        (self.bitmaps)().into_iter().filter(|bitmap| bitmap.complete_bits().is_some()).collect()
    }

    /// Returns what is offered to a client. `refusal`: why no connection can begin now.
    pub(crate) fn offer(&self, refusal: Option<String>) -> Offer {
        let bitmaps = self.complete_bitmaps();
        let names = bitmaps.iter().map(|bitmap| format!("{DIRTY_BITMAP}{}", bitmap.name));
        Offer {
            name: self.name.clone(),
            size: self.disk.size_bytes(),
            flags: self.flags(),
            blocks: self.blocks(),
            contexts: [ALLOCATION, ALLOCATION_DEPTH].map(str::to_owned).into_iter().chain(names).collect(),
            refusal,
        }
    }

    /// Returns the contexts with these names.
    pub(crate) fn contexts(&self, names: &[String]) -> Vec<Context> {
        let bitmaps = self.complete_bitmaps();
        let context = |name: &String| match name.strip_prefix(DIRTY_BITMAP) {
            Some(name) => Context::Bitmap(bitmaps.iter().find(|bitmap| bitmap.name == name).cloned()),
            None if name == ALLOCATION_DEPTH => Context::Depth,
            None => Context::Allocation,
        };
        names.iter().map(context).collect()
    }

    /// Returns what requests of a connection are compared with.
    #[inline]
    pub(crate) fn rules(&self, headers: Headers, contexts: bool) -> Rules {
        Rules {
            size: self.disk.size_bytes(),
            readonly: self.readonly,
            trims: self.disk.limits().can_discard,
            contexts,
            headers,
            blocks: self.blocks(),
        }
    }

    /// Counts a connection whose handshake is complete.
    pub(crate) fn connected(&self, queue: u16, socket: Arc<OwnedFd>) {
        self.sockets.locked().push((queue, socket));
        self.connections.fetch_add(1, SeqCst);
    }

    /// Counts a connection that has ended.
    pub(crate) fn disconnected(&self, queue: u16) {
        self.sockets.locked().retain(|(index, _)| *index != queue);
        self.connections.fetch_sub(1, SeqCst);
    }

    /// Returns whether there are connections, and all clients have closed their ends.
    pub(crate) fn leaving(&self) -> bool {
        self.closed().is_some_and(|(closed, connections)| closed > 0 && closed == connections)
    }

    /// Returns whether a client has closed its end, so that its queue will be free.
    pub(crate) fn one_leaves(&self) -> bool {
        self.closed().is_some_and(|(closed, _)| closed > 0)
    }

    /// Returns how many clients have closed their ends, and the number of connections. None: the
    /// system does not say.
    fn closed(&self) -> Option<(usize, usize)> {
        let sockets = self.sockets.locked();
        let mut fds: Vec<_> =
            sockets.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::RDHUP)).collect();
        poll(&mut fds, Some(&Timespec::default())).ok()?;
        Some((fds.iter().filter(|fd| !fd.revents().is_empty()).count(), fds.len()))
    }

    /// Takes note of a queue whose last writes no flush covers.
    pub(crate) fn note_unflushed(&self) {
        self.unflushed.store(true, SeqCst);
    }

    /// Returns whether the writes of a queue that has ended may not be on stable storage.
    pub(crate) fn take_unflushed(&self) -> bool {
        self.unflushed.swap(false, SeqCst)
    }

    /// Reports that the queue of a connection has nothing left to do. Called by workers.
    pub(crate) fn ended(&self, ended: Ended) {
        self.ended.locked().push(ended);
        self.eventfd.signal();
    }

    /// Takes the connections that have ended.
    pub(crate) fn take_ended(&self) -> Vec<Ended> {
        std::mem::take(&mut *self.ended.locked())
    }

    /// Ends the thread of the export.
    pub(crate) fn end(&self) {
        self.stopping.store(true, SeqCst);
        self.eventfd.signal();
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(SeqCst)
    }
}

/// Returns the block sizes of a disk whose blocks have `block_size` bytes, of which its size is a
/// multiple. If its storage needs more than [`MINIMUM_MAX`], the disk does the rest itself.
#[inline]
fn block_sizes(block_size: u32) -> BlockSizes {
    let minimum = block_size.clamp(1, MINIMUM_MAX);
    BlockSizes { minimum, preferred: PREFERRED_BYTES.max(minimum), maximum: PAYLOAD_BYTES_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_block_is_that_of_the_disk_as_far_as_the_protocol_has_it() {
        let minimum = |block_size| block_sizes(block_size).minimum;
        assert_eq!([minimum(512), minimum(4096), minimum(1 << 20)], [512, 4096, MINIMUM_MAX]);
        assert_eq!([block_sizes(512).preferred, block_sizes(1 << 16).preferred], [4096, 1 << 16]);
    }
}
