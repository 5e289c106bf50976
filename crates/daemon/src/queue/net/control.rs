//! A card's control virtqueue, where the front-end leaves it to us: commands by which a guest sets what its card does
//! (Virtio 1.3, 5.1.6.5).
//!
//! A worker never waits for what a command changes: a tap's calls take the kernel's rtnl lock. So the command goes to a
//! [`Desk`], the export's session thread does it, as it does all that a front-end asks for, and the answer's eventfd wakes the
//! worker. One command is taken at a time. What must never happen: a queue that keeps its command while it leaves its worker,
//! for the session thread may be the one that waits for it; the command goes back to the ring instead, and is done again: none
//! means anything else the second time.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use virtio::mem;
use virtio::net::{Command, VIRTIO_NET_ERR, VIRTIO_NET_OK};
use virtio::ring::{Chain, Head, Seg};
use vshunt_engine::EventFd;
use vshunt_engine::PollState;
use vshunt_engine::{Queue, QueueStats, Token, Uring};
use vshunt_virtqueue::{RingParts, VirtqueueOwner, Vring};

use super::line::Line;

const OP_KICK: u8 = 1;
const OP_ANSWER: u8 = 2;

/// Where the queue leaves a command for the session thread, and finds the answer.
pub struct Desk {
    /// Guards what lies there; held for a look or a change.
    papers: Mutex<Papers>,
    /// Wakes the session thread.
    commands: EventFd,
    /// Wakes the queue's worker.
    answers: EventFd,
}

#[derive(Default)]
struct Papers {
    /// The number of the command that lies there or was taken last.
    number: u32,
    command: Option<Command>,
    answer: Option<bool>,
}

impl Desk {
    /// An empty one.
    ///
    /// # Errors
    /// The kernel has no eventfd for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { papers: Mutex::default(), commands: EventFd::make()?, answers: EventFd::make()? })
    }

    /// Becomes readable when a command comes.
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.commands.as_fd()
    }

    /// The session thread takes the command that lies there, with its number.
    pub fn take(&self) -> Option<(u32, Command)> {
        self.commands.take();
        let mut papers = self.papers();
        papers.command.take().map(|command| (papers.number, command))
    }

    /// It is done, or refused. An answer that nobody waits for any more is forgotten.
    pub fn answer(&self, number: u32, done: bool) {
        {
            let mut papers = self.papers();
            if papers.number != number {
                return;
            }
            papers.answer = Some(done);
        }
        self.answers.signal();
    }

    fn put(&self, command: Command) {
        self.replace(Some(command));
        self.commands.signal();
    }

    /// Nobody waits for what was put there.
    fn withdraw(&self) {
        self.replace(None);
    }

    fn replace(&self, command: Option<Command>) {
        let mut papers = self.papers();
        *papers = Papers { number: papers.number.wrapping_add(1), command, answer: None };
    }

    fn papers(&self) -> std::sync::MutexGuard<'_, Papers> {
        self.papers.locked()
    }
}

/// A command that the session thread has.
struct Asked {
    head: Head,
    /// The byte for the answer.
    ack: Seg,
}

/// See the module.
pub struct ControlQueue {
    line: Line,
    desk: Arc<Desk>,
    asked: Option<Asked>,
    /// The eventfd of answers.
    listen: PollState,
    // Any thread's.
    stats: Arc<QueueStats>,
}

// SAFETY: the segment leads into the guest's memory, which the line's table keeps mapped; while the queue moves there is none.
unsafe impl Send for ControlQueue {}

impl ControlQueue {
    /// One that is not yet on a worker.
    pub fn new(parts: RingParts, desk: Arc<Desk>) -> Self {
        let stats = parts.stats.clone();
        Self { line: Line::new(parts, Arc::default()), desk, asked: None, listen: PollState::Off, stats }
    }

    /// The command in the scratch chain.
    fn begin(&mut self) {
        let chain = &self.line.chain;
        let head = chain.head;
        let Some(ack) = chain.segs[chain.readable..].iter().copied().find(|seg| seg.len > 0) else {
            self.line.vring.unpop(head);
            return self.line.break_off("a control command has no room for its answer");
        };
        match command(chain) {
            None => self.finish(&Asked { head, ack }, false),
            Some(Command::Announced) => self.finish(&Asked { head, ack }, true),
            Some(command) => {
                self.asked = Some(Asked { head, ack });
                self.desk.put(command);
            }
        }
    }

    fn finish(&mut self, asked: &Asked, done: bool) {
        let status = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        // SAFETY: translated on taking the chain and the device's to write; the line's table, which is kept until the queue
        // rests, has it mapped.
        unsafe { mem::write_u8(asked.ack.ptr, status) };
        self.line.mark(&[asked.ack], 1);
        self.line.push(asked.head, 1);
        self.line.ended(1);
        if !done {
            QueueStats::add(&self.stats.errors, 1);
        }
    }

    /// Takes the answer, if it is there. Returns the commands that are over by that.
    fn answered(&mut self) -> u32 {
        let Some(done) = self.desk.papers().answer.take() else { return 0 };
        let Some(asked) = self.asked.take() else { return 0 };
        self.finish(&asked, done);
        self.flight_changed();
        1
    }

    fn flight_changed(&self) {
        self.stats.in_flight.store(self.asked.is_some().into(), Relaxed);
    }
}

/// What a chain says; none where that makes no sense.
fn command(chain: &Chain) -> Option<Command> {
    let mut bytes = [0; Command::BYTES_MAX];
    let mut len = 0;
    for seg in &chain.segs[..chain.readable] {
        let to = bytes.get_mut(len..len + seg.len as usize)?;
        // SAFETY: the segment was translated on taking the chain, and the line's table has it mapped; `to` is as long, and ours.
        unsafe { mem::read(seg.ptr, to) };
        len += to.len();
    }
    chain.fault.is_none().then(|| Command::parse(&bytes[..len]))?
}

impl VirtqueueOwner for ControlQueue {
    fn ring(&mut self, _nth: u16) -> Option<&mut dyn Vring> {
        Some(&mut self.line)
    }

    fn remove(&mut self, _nth: u16, _discard: bool) -> (u32, bool) {
        (self.line.vring.base(), false)
    }

    fn is_broken(&self) -> bool {
        self.line.broken
    }
}

impl Queue for ControlQueue {
    fn arm(&mut self, uring: &mut Uring, place: Token) {
        self.listen.begin(uring, self.desk.answers.fd(), place.with(0, OP_ANSWER));
        self.line.arm(uring, place.with(0, OP_KICK));
    }

    fn take(&mut self, _ring: &mut Uring, _place: Token, budget: u32) -> u32 {
        let mut taken = 0;
        while taken < budget && self.asked.is_none() && self.line.pop() {
            taken += 1;
            self.begin();
        }
        self.flight_changed();
        taken
    }

    fn complete(&mut self, uring: &mut Uring, token: Token, result: i32, more: bool) -> u32 {
        if token.op == OP_KICK {
            self.line.kicked(uring, token, result, more);
            return 0;
        }
        if !more && self.listen.ended().restarts() {
            self.listen.begin(uring, self.desk.answers.fd(), token);
        }
        self.answered()
    }

    fn publish(&mut self) -> bool {
        self.line.publish()
    }

    fn has_work(&self) -> bool {
        self.asked.is_none() && self.line.has_avail()
    }

    fn wake(&mut self) {
        self.line.vring.disable_kick();
    }

    fn sleep(&mut self, _ring: &mut Uring, _place: Token, _after: u32) -> bool {
        self.asked.is_none() && !self.line.broken && self.line.vring.enable_kick()
    }

    fn disarm(&mut self, uring: &mut Uring, place: Token) {
        self.line.disarm(uring, place.with(0, OP_KICK));
        self.listen.end(uring, place.with(0, OP_ANSWER));
        if let Some(asked) = self.asked.take() {
            self.desk.withdraw();
            self.line.vring.unpop(asked.head);
            self.flight_changed();
        }
    }

    fn at_rest(&self) -> bool {
        self.listen == PollState::Off && self.line.at_rest()
    }

    fn leave(&mut self, _ring: &mut Uring) {}

    fn extension(&self) -> &'static dyn Any {
        vshunt_virtqueue::extension::<Self>()
    }
}

impl Drop for ControlQueue {
    fn drop(&mut self) {
        debug_assert!(
            self.asked.is_none() && self.at_rest(),
            "a control queue dropped with a command under way"
        );
    }
}
