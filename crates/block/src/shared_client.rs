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

/// Flushes a disk and waits. On a thread of its own, like [`Qcow2`](super::qcow2::Qcow2)'s.
///
/// # Errors
/// The flush's.
pub(super) fn flush_now<H: ClientHandle>(attach: impl FnOnce(&mut Uring) -> H + Send) -> io::Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("vshunt-flush".to_owned());
        thread.spawn_scoped(scope, || flush_here(attach))?.join().expect("it does not panic")
    })
}

fn flush_here<H: ClientHandle>(attach: impl FnOnce(&mut Uring) -> H) -> io::Result<()> {
    let (mut uring, mut io) = (Uring::new()?, Io::default());
    io.reset(Op::Flush, 0, true);
    let handle = attach(&mut uring);
    let res = match handle.start(&mut uring, &mut io, Token { index: 0, generation: 0, slot: 0, op: 0 }) {
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
    handle.detach(&mut uring);
    if res < 0 { Err(io::Error::from_raw_os_error(-res)) } else { Ok(()) }
}
