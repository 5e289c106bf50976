//! What has operations of its own on an io_uring, beside those of queues: a connection to a server,
//! which the queues of one worker share.
//!
//! A [`RingClient`] belongs to one ring and stays on its thread. It completes a request of a queue
//! by [`Uring::done`]. Its operations do not count as pending: a connection that waits for nothing
//! but its server keeps no queue and no control thread waiting.
//!
//! What must never happen: a client is dropped while the kernel has an operation of it. So the ring
//! keeps a removed client until its last completion.

use std::any::Any;
use std::io;
use std::time::{Duration, Instant};

use io_uring::{opcode, squeue};

use super::{Completion, IGNORE, Token, Uring};

/// Token index of clients. Queues have the lower ones.
pub(crate) const CLIENT_INDEX: u16 = u16::MAX - 1;
/// How long a ring that is dropped waits for the operations of its clients. They are cancelled, and
/// complete at once unless the kernel has a fault.
const LEAVE: Duration = Duration::from_secs(5);

/// Names a client of one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientId(u16);

/// Something that has operations of its own on a ring. All methods run on the thread of the ring
/// and return at once.
pub trait RingClient: Any + Send {
    /// Pushes operations for what has gathered. Called before the next enter after
    /// [`Uring::submit_client`].
    fn submit(&mut self, uring: &mut Uring, id: ClientId);

    /// Handles a completion of one of its operations, which has more completions if `more`.
    fn complete(&mut self, uring: &mut Uring, id: ClientId, op: u8, result: i32, more: bool);

    /// Cancels its operations, because it was removed or the ring is dropped. Their completions
    /// still arrive.
    fn leave(&mut self, uring: &mut Uring, id: ClientId);
}

/// The clients of a ring.
#[derive(Default)]
pub(super) struct Clients {
    places: Vec<Place>,
    /// The clients whose `submit` is to be called.
    asked: Vec<u16>,
    /// Completions that were taken and not passed on yet.
    arrived: Vec<Completion>,
}

/// The place of a client.
#[derive(Default)]
struct Place {
    /// None: the place is free, or a method of the client runs.
    client: Option<Box<dyn RingClient>>,
    used: bool,
    removed: bool,
    asked: bool,
    /// Operations that are pushed and not completed.
    in_flight: u32,
}

impl Clients {
    /// Returns whether clients have something to push.
    #[inline]
    pub(super) fn have_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Keeps a completion until [`Uring::complete_clients`].
    #[inline]
    pub(super) fn arrive(&mut self, completion: Completion) {
        self.arrived.push(completion);
    }

    /// Returns whether completions wait for [`Uring::complete_clients`].
    #[inline]
    pub(super) fn have_arrived(&self) -> bool {
        !self.arrived.is_empty()
    }

    fn in_flight(&self) -> u32 {
        self.places.iter().map(|place| place.in_flight).sum()
    }
}

impl Uring {
    /// Adds a client.
    pub fn add_client(&mut self, client: Box<dyn RingClient>) -> ClientId {
        let places = &mut self.clients.places;
        let at = places.iter().position(|place| !place.used).unwrap_or_else(|| {
            places.push(Place::default());
            places.len() - 1
        });
        places[at] = Place { client: Some(client), used: true, ..Place::default() };
        // A ring has a client for each of some hundred disks at most.
        ClientId(u16::try_from(at).expect("fewer clients than token slots"))
    }

    /// Returns the client of type `C` for which `is` returns true. Removed clients are not found.
    pub fn find_client<C: RingClient>(&self, is: impl Fn(&C) -> bool) -> Option<ClientId> {
        let is = |place: &Place| {
            let client = place.client.as_deref().filter(|_| !place.removed);
            client.is_some_and(|client| (client as &dyn Any).downcast_ref().is_some_and(&is))
        };
        let at = self.clients.places.iter().position(is)?;
        u16::try_from(at).ok().map(ClientId)
    }

    /// Calls `f` with a client of type `C`.
    ///
    /// # Panics
    /// There is no such client, or one of its methods is running.
    #[inline]
    pub fn with_client<C: RingClient, T>(
        &mut self,
        id: ClientId,
        f: impl FnOnce(&mut C, &mut Self) -> T,
    ) -> T {
        let mut client = self.clients.places[usize::from(id.0)].client.take().expect("the client is here");
        let result = f((&mut *client as &mut dyn Any).downcast_mut().expect("its type is known"), self);
        self.put_back(id, client);
        result
    }

    fn put_back(&mut self, id: ClientId, client: Box<dyn RingClient>) {
        let place = &mut self.clients.places[usize::from(id.0)];
        if place.removed && place.in_flight == 0 {
            // What it may still have asked for finds no client.
            place.used = false;
            drop(client);
        } else {
            place.client = Some(client);
        }
    }

    /// Removes a client. It is dropped after the last completion of its operations.
    pub fn remove_client(&mut self, id: ClientId) {
        let Some(mut client) = self.clients.places[usize::from(id.0)].client.take() else { return };
        client.leave(self, id);
        self.clients.places[usize::from(id.0)].removed = true;
        self.put_back(id, client);
    }

    /// Asks for a call of [`RingClient::submit`] before the next enter.
    #[inline]
    pub fn submit_client(&mut self, id: ClientId) {
        let place = &mut self.clients.places[usize::from(id.0)];
        if !place.asked {
            place.asked = true;
            self.clients.asked.push(id.0);
        }
    }

    /// Lets the clients push what they have gathered.
    #[inline]
    pub(super) fn submit_clients(&mut self) {
        while let Some(at) = self.clients.asked.pop() {
            let place = &mut self.clients.places[usize::from(at)];
            place.asked = false;
            let Some(mut client) = place.client.take() else { continue };
            client.submit(self, ClientId(at));
            self.put_back(ClientId(at), client);
        }
    }

    /// Passes the completions of clients to them.
    pub(super) fn complete_clients(&mut self) {
        let mut arrived = std::mem::take(&mut self.clients.arrived);
        for Completion { token, result, more } in arrived.drain(..) {
            let Some(place) = self.clients.places.get_mut(usize::from(token.slot)) else { continue };
            if !more {
                place.in_flight = place.in_flight.saturating_sub(1);
            }
            let Some(mut client) = place.client.take() else { continue };
            let id = ClientId(token.slot);
            client.complete(self, id, token.op, result, more);
            self.put_back(id, client);
        }
        self.clients.arrived = arrived;
    }

    /// Queues an operation of a client, like [`push`](Self::push). `op` comes back with the
    /// completion.
    ///
    /// # Safety
    /// That of [`push`](Self::push). The client, which the ring keeps until the completion, upholds
    /// it.
    #[inline]
    pub unsafe fn push_for_client(&mut self, entry: squeue::Entry, id: ClientId, op: u8) {
        self.clients.places[usize::from(id.0)].in_flight += 1;
        let entry: squeue::Entry128 = entry.into();
        let entry = entry.user_data(client_token(id, op).pack());
        loop {
            // SAFETY: the caller promises that what the entry names is valid until its completion.
            if unsafe { self.io.submission().push(&entry) }.is_ok() {
                return;
            }
            self.make_room();
        }
    }

    /// Ends the operation `op` of a client, like [`cancel`](Self::cancel).
    pub fn cancel_for_client(&mut self, id: ClientId, op: u8) {
        self.cancel(client_token(id, op));
    }

    /// Tries to end the operation `op` of a client. The try has a completion of its own, as
    /// operation `as_op` of the client: 0, or `-ENOENT` or `-EALREADY` if the operation may not end
    /// by it. Then `op` has completed, or is at work at this moment.
    pub fn try_cancel_for_client(&mut self, id: ClientId, op: u8, as_op: u8) {
        let entry = opcode::AsyncCancel::new(client_token(id, op).pack()).build();
        // SAFETY: such an entry names no memory.
        unsafe { self.push_for_client(entry, id, as_op) };
    }

    /// Completes, with `result`, an operation that waits on another ring, as [`wake`](Self::wake)
    /// does with 0.
    pub fn wake_with(&mut self, id: u64, token: u64, result: i32) {
        debug_assert_ne!(id, self.id());
        let entry = opcode::MsgRingData::new(io_uring::types::Fd(id as i32), result, token, None)
            .build()
            .flags(squeue::Flags::SKIP_SUCCESS)
            .user_data(IGNORE);
        self.push_ignored(&entry.into());
    }

    /// Serves the clients of a ring without a worker until `ended` returns true. `ended` is asked
    /// after each batch of completions.
    ///
    /// # Errors
    /// Those of io_uring_enter(2).
    pub fn run_clients(&mut self, mut ended: impl FnMut() -> bool) -> io::Result<()> {
        let mut taken = Vec::new();
        while !ended() {
            self.start_iteration();
            self.enter(true)?;
            self.reap(&mut taken);
            taken.clear();
        }
        Ok(())
    }
}

fn client_token(id: ClientId, op: u8) -> Token {
    Token { index: CLIENT_INDEX, generation: 0, slot: id.0, op }
}

impl Drop for Uring {
    /// Ends the operations of clients, whose memory the kernel uses until then.
    fn drop(&mut self) {
        for at in 0..self.clients.places.len() {
            if let Ok(at) = u16::try_from(at) {
                self.remove_client(ClientId(at));
            }
        }
        let until = Instant::now() + LEAVE;
        while self.clients.in_flight() > 0 && Instant::now() < until {
            let mut taken = Vec::new();
            if self.wait(Some(Duration::from_millis(100))).is_err() {
                break;
            }
            self.reap(&mut taken);
        }
        if self.clients.in_flight() > 0 {
            tracing::error!("the kernel does not end operations on a socket; their memory is lost");
            std::mem::forget(std::mem::take(&mut self.clients));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use io_uring::types;

    use super::*;

    /// Reads bytes from a socket, and completes a request for each.
    struct Bytes {
        socket: UnixStream,
        byte: Box<u8>,
        requests: Vec<Token>,
        reads: bool,
        dropped: Arc<AtomicU32>,
    }

    impl RingClient for Bytes {
        fn submit(&mut self, uring: &mut Uring, id: ClientId) {
            if !self.reads {
                self.reads = true;
                let entry = opcode::Read::new(types::Fd(self.socket.as_raw_fd()), &raw mut *self.byte, 1);
                // SAFETY: the byte is on the heap, and the ring keeps this client until the
                // completion.
                unsafe { uring.push_for_client(entry.build(), id, 1) };
            }
        }

        fn complete(&mut self, uring: &mut Uring, id: ClientId, op: u8, result: i32, _: bool) {
            assert_eq!(op, 1);
            self.reads = false;
            if result == 1 {
                let token = self.requests.remove(0);
                uring.done(token, i32::from(*self.byte));
                uring.submit_client(id);
            }
        }

        fn leave(&mut self, uring: &mut Uring, id: ClientId) {
            uring.cancel_for_client(id, 1);
        }
    }

    impl Drop for Bytes {
        fn drop(&mut self) {
            assert!(!self.reads, "dropped with an operation in flight");
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn a_client_completes_requests_and_leaves_after_its_last_operation() {
        use std::io::Write;
        let mut uring = Uring::new().unwrap();
        let dropped = Arc::new(AtomicU32::new(0));
        let (mut peer, socket) = UnixStream::pair().unwrap();
        let client =
            Bytes { socket, byte: Box::new(0), requests: Vec::new(), reads: false, dropped: dropped.clone() };
        let id = uring.add_client(Box::new(client));
        assert_eq!(uring.find_client::<Bytes>(|c| c.requests.is_empty()), Some(id));
        for n in 1..=3u8 {
            uring.with_client(id, |client: &mut Bytes, uring| {
                client.requests.push(Token { index: 5, generation: 6, slot: u16::from(n), op: 2 });
                uring.submit_client(id);
            });
            assert!(uring.wants_enter());
            peer.write_all(&[n]).unwrap();
            assert_eq!(uring.next_result().unwrap(), i32::from(n));
            assert_eq!(uring.pending(), 0);
        }
        // It reads again, which keeps nobody waiting.
        uring.run_until_idle(|_, _, _| panic!("nothing is pending")).unwrap();
        uring.send().unwrap();
        uring.enter(false).unwrap();
        uring.remove_client(id);
        assert_eq!(uring.find_client::<Bytes>(|_| true), None);
        assert_eq!(dropped.load(Relaxed), 0);
        while dropped.load(Relaxed) == 0 {
            uring.wait(None).unwrap();
            uring.reap(&mut Vec::new());
        }
    }

    #[test]
    fn a_ring_that_is_dropped_ends_the_operations_of_its_clients() {
        let mut uring = Uring::new().unwrap();
        let dropped = Arc::new(AtomicU32::new(0));
        let pairs: Vec<_> = (0..3).map(|_| UnixStream::pair().unwrap()).collect();
        for (_, socket) in &pairs {
            let socket = socket.try_clone().unwrap();
            let dropped = dropped.clone();
            let client = Bytes { socket, byte: Box::new(0), requests: Vec::new(), reads: false, dropped };
            let id = uring.add_client(Box::new(client));
            uring.submit_client(id);
        }
        uring.enter(false).unwrap();
        drop(uring);
        assert_eq!(dropped.load(Relaxed), 3);
    }
}
