//! The control virtqueue of a network device, if the front end leaves it to the daemon. By its
//! commands a guest sets what the device does (Virtio 1.3, 5.1.6.5).
//!
//! A worker never waits for what a command changes: calls on a tap take the kernel's rtnl lock. So
//! the queue leaves the command in a [`PendingCommand`], and the export's session thread executes
//! it, as it does for requests of the front end. The answer's eventfd wakes the worker. One command
//! is taken at a time.
//!
//! What must never happen: a queue keeps its command while it leaves its worker, because the
//! session thread may be the thread that waits for that. The command goes back to the ring instead,
//! and is executed again later. All commands are idempotent.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use virtio::mem;
use virtio::net::{Command, VIRTIO_NET_ERR, VIRTIO_NET_OK};
use virtio::ring::{Chain, Head, Seg};
use vshunt_engine::{EventFd, PollState, Queue, QueueStats, Token, Uring};
use vshunt_virtqueue::{RingParts, VirtqueueOwner, Vring};

use crate::net_virtqueue::NetVirtqueue;

const OP_KICK: u8 = 1;
const OP_ANSWER: u8 = 2;

/// A command that the queue leaves for the session thread, and its answer.
pub struct PendingCommand {
    /// Guards the command and the answer. Held for a read or a change.
    state: Mutex<PendingState>,
    /// Wakes the session thread.
    commands: EventFd,
    /// Wakes the queue's worker.
    answers: EventFd,
}

#[derive(Default)]
struct PendingState {
    /// The number of the current or the last command.
    number: u32,
    command: Option<Command>,
    answer: Option<bool>,
}

impl PendingCommand {
    /// No command and no answer.
    ///
    /// # Errors
    /// No eventfd can be created.
    pub fn new() -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), commands: EventFd::make()?, answers: EventFd::make()? })
    }

    /// Becomes readable when a command is there.
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.commands.as_fd()
    }

    /// Takes the current command, with its number. Only the session thread calls this.
    pub fn take(&self) -> Option<(u32, Command)> {
        self.commands.take();
        let mut state = self.state();
        state.command.take().map(|command| (state.number, command))
    }

    /// Answers a command: it was executed, or refused. The answer to a command that was withdrawn
    /// is ignored.
    pub fn answer(&self, number: u32, done: bool) {
        {
            let mut state = self.state();
            if state.number != number {
                return;
            }
            state.answer = Some(done);
        }
        self.answers.signal();
    }

    fn put(&self, command: Command) {
        self.replace(Some(command));
        self.commands.signal();
    }

    /// Withdraws the command or the answer.
    fn withdraw(&self) {
        self.replace(None);
    }

    fn replace(&self, command: Option<Command>) {
        let mut state = self.state();
        *state = PendingState { number: state.number.wrapping_add(1), command, answer: None };
    }

    fn state(&self) -> std::sync::MutexGuard<'_, PendingState> {
        self.state.locked()
    }
}

/// A command that was taken off the ring and is not answered.
struct ActiveCommand {
    head: Head,
    /// The guest's byte for the answer.
    ack: Seg,
}

/// See the module.
pub struct ControlQueue {
    virtqueue: NetVirtqueue,
    pending: Arc<PendingCommand>,
    active: Option<ActiveCommand>,
    /// The poll of the eventfd of answers.
    poll_state: PollState,
    // Any thread's.
    stats: Arc<QueueStats>,
}

// SAFETY: the segment of an active command points into the guest's memory, which the virtqueue's
// memory table keeps mapped. While the queue moves to another worker there is no active command.
unsafe impl Send for ControlQueue {}

impl ControlQueue {
    /// Makes a queue that is on no worker.
    pub fn new(parts: RingParts, pending: Arc<PendingCommand>) -> Self {
        let stats = parts.stats.clone();
        Self {
            virtqueue: NetVirtqueue::new(parts, Arc::default()),
            pending,
            active: None,
            poll_state: PollState::Off,
            stats,
        }
    }

    /// Starts the command in the scratch chain.
    fn start_command(&mut self) {
        let chain = &self.virtqueue.chain;
        let head = chain.head;
        let Some(ack) = chain.segs.iter().skip(chain.readable).copied().find(|seg| seg.len > 0) else {
            self.virtqueue.vring.unpop(head);
            return self.virtqueue.mark_broken("a control command has no room for its answer");
        };
        match command(chain) {
            None => self.finish(&ActiveCommand { head, ack }, false),
            Some(Command::Announced) => self.finish(&ActiveCommand { head, ack }, true),
            Some(command) => {
                self.active = Some(ActiveCommand { head, ack });
                self.pending.put(command);
            }
        }
    }

    fn finish(&mut self, active: &ActiveCommand, done: bool) {
        let status = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        // SAFETY: the ring translated the segment as device-writable with at least one byte. The
        // virtqueue keeps the memory table, and with it the mapping, until the queue is at rest.
        unsafe { mem::write_u8(active.ack.ptr, status) };
        self.virtqueue.mark(&[active.ack], 1);
        self.virtqueue.push(active.head, 1);
        self.virtqueue.ended(1);
        if !done {
            QueueStats::add(&self.stats.errors, 1);
        }
    }

    /// Takes the answer, if there is one. Returns the number of commands that it completes.
    fn answered(&mut self) -> u32 {
        let Some(done) = self.pending.state().answer.take() else { return 0 };
        let Some(active) = self.active.take() else { return 0 };
        self.finish(&active, done);
        self.flight_changed();
        1
    }

    fn flight_changed(&self) {
        self.stats.in_flight.store(self.active.is_some().into(), Relaxed);
    }
}

/// Parses the command of a chain. `None`: the device does not know the command.
fn command(chain: &Chain) -> Option<Command> {
    let mut bytes = [0; Command::BYTES_MAX];
    let mut len = 0;
    for seg in chain.segs.iter().take(chain.readable) {
        let to = bytes.get_mut(len..len + seg.len as usize)?;
        // SAFETY: the ring translated the segment when the chain was popped, and the virtqueue's
        // memory table has it mapped. `to` is a part of a local array, as long as the segment.
        unsafe { mem::read(seg.ptr, to) };
        len += to.len();
    }
    chain.fault.is_none().then(|| Command::parse(bytes.get(..len)?))?
}

impl VirtqueueOwner for ControlQueue {
    fn ring(&mut self, _nth: u16) -> Option<&mut dyn Vring> {
        Some(&mut self.virtqueue)
    }

    fn remove(&mut self, _nth: u16, _discard: bool) -> (u32, bool) {
        (self.virtqueue.vring.base(), false)
    }

    fn is_broken(&self) -> bool {
        self.virtqueue.broken
    }
}

impl Queue for ControlQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.poll_state.start(uring, self.pending.answers.fd(), place.with(0, OP_ANSWER));
        self.virtqueue.arm(uring, place.with(0, OP_KICK));
    }

    fn take(&mut self, _uring: &mut Uring, _place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        while taken < budget && self.active.is_none() && self.virtqueue.pop() {
            taken += 1;
            self.start_command();
        }
        self.flight_changed();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if token.op == OP_KICK {
            self.virtqueue.kicked(uring, token, result, more);
            return 0;
        }
        if !more && self.poll_state.ended().restarts() {
            self.poll_state.start(uring, self.pending.answers.fd(), token);
        }
        self.answered()
    }

    fn publish(&mut self) -> bool {
        self.virtqueue.publish()
    }

    fn has_work(&self) -> bool {
        self.active.is_none() && self.virtqueue.has_avail()
    }

    fn wake(&mut self) {
        self.virtqueue.vring.disable_kick();
    }

    fn sleep(&mut self, _uring: &mut Uring, _place: Token, _after: u32) -> bool {
        self.active.is_none() && !self.virtqueue.broken && self.virtqueue.vring.enable_kick()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.virtqueue.disarm(uring, place.with(0, OP_KICK));
        self.poll_state.end(uring, place.with(0, OP_ANSWER));
        if let Some(active) = self.active.take() {
            self.pending.withdraw();
            self.virtqueue.vring.unpop(active.head);
            self.flight_changed();
        }
    }

    fn at_rest(&self) -> bool {
        self.poll_state == PollState::Off && self.virtqueue.at_rest()
    }

    fn leave(&mut self, _uring: &mut Uring) {}

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

impl Drop for ControlQueue {
    fn drop(&mut self) {
        debug_assert!(
            self.active.is_none() && self.at_rest(),
            "a control queue dropped with a command under way"
        );
    }
}
