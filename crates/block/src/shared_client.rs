//! Disks whose requests a client of the worker's io_uring carries out: one client for all queues
//! of the worker (`nbd`).

use std::io;
use std::sync::Arc;

use vshunt_engine::{ClientId, RingClient, Token, Uring};

use super::{Io, Op, Step};

/// A client of an io_uring that the queues of one worker share.
pub(super) trait SharedClient: RingClient {
    /// The disk.
    type Disk;

    /// Adds a client of a disk, without users, to a ring.
    fn add(disk: &Arc<Self::Disk>, uring: &mut Uring) -> ClientId;

    /// Returns the disk that this is a client of.
    fn disk(&self) -> &Arc<Self::Disk>;

    /// Returns the number of handles that use it.
    fn users(&mut self) -> &mut u32;
}

/// Counts a handle as a user of the ring's client for `disk`, which is added if there is none.
pub(super) fn join<C: SharedClient>(disk: &Arc<C::Disk>, uring: &mut Uring) -> ClientId {
    let is_ours = |client: &C| Arc::ptr_eq(client.disk(), disk);
    let id = uring.find_client(is_ours).unwrap_or_else(|| C::add(disk, uring));
    uring.with_client(id, |client: &mut C, _| *client.users() += 1);
    id
}

/// Undoes [`join`]. The last user removes the client.
pub(super) fn part<C: SharedClient>(id: ClientId, uring: &mut Uring) {
    let left = uring.with_client(id, |client: &mut C, _| {
        *client.users() -= 1;
        *client.users()
    });
    if left == 0 {
        uring.remove_client(id);
    }
}

/// Such a disk, as one queue uses it. The functions are those of [`DiskHandle`](super::DiskHandle).
pub(super) trait ClientHandle {
    /// See [`DiskHandle::start`](super::DiskHandle::start).
    fn start(&self, uring: &mut Uring, io: &mut Io, token: Token) -> Step;

    /// See [`DiskHandle::detach`](super::DiskHandle::detach).
    fn detach(self, uring: &mut Uring);
}

/// Flushes a disk and waits, on a thread for it: when an io_uring is closed, it interrupts the next
/// wait of its thread.
///
/// # Errors
/// The flush's.
pub(super) fn flush_here<H: ClientHandle>(attach: impl FnOnce(&mut Uring) -> H) -> io::Result<()> {
    let (mut uring, mut io) = (Uring::new()?, Io::default());
    io.reset(Op::Flush, 0, true);
    run_here(attach, &mut uring, &mut io)
}

/// Carries out a request with a handle of its own, and waits. On a thread for it, as
/// [`flush_here`].
///
/// # Errors
/// The request's.
pub(super) fn run_here<H: ClientHandle>(
    attach: impl FnOnce(&mut Uring) -> H,
    uring: &mut Uring,
    io: &mut Io,
) -> io::Result<()> {
    let handle = attach(uring);
    let res = match handle.start(uring, io, Token { index: 0, generation: 0, slot: 0, op: 0 }) {
        Step::Done(res) => res,
        Step::Wait => {
            let Ok(res) = uring.next_result() else {
                // The kernel may still write to the memory of the client.
                tracing::error!("an io_uring failed; ending at once");
                std::process::abort();
            };
            res
        }
    };
    handle.detach(uring);
    if res < 0 { Err(io::Error::from_raw_os_error(-res)) } else { Ok(()) }
}
