//! Commands of the control queue of a network device, which the session thread runs (Virtio 1.3,
//! 5.1.6.5).
//!
//! | state of the control queue | active pairs and offloads |
//! | --- | --- |
//! | not started (the front end serves it, or the guest does not use it) | all pairs |
//! | started from its beginning (a new driver) | one pair, and all negotiated offloads |
//! | continued | what the guest set in this connection; else the notes in the in-flight region; else all pairs |

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use vshunt_types::sync::Locked;

use virtio::features::bit;
use virtio::net::*;
use vshunt_engine::QueueSet;
use vshunt_net::control::PendingCommand;
use vshunt_net::negotiated::{self, GUEST_OFFLOADS};
use vshunt_virtqueue::owner;

use super::super::memory::Notes;
use super::{NetBackend, NetDevice};
use vshunt_types::convert::len_u16;

/// The control queue of a network device. Only the session thread changes it.
pub(super) struct Control {
    pending: Arc<PendingCommand>,
    set: Arc<QueueSet>,
    /// Guards itself alone; held for a read or a change.
    state: Mutex<State>,
}

struct State {
    /// For each pair, whether its receive ring runs.
    running: Vec<bool>,
    /// Number of active pairs, which are the first ones.
    active: u16,
    notes: Option<Notes>,
}

impl Control {
    /// Makes the control queue of a device with the queues of `set`, of which the first `pairs` are
    /// queue pairs.
    ///
    /// # Errors
    /// The kernel has no eventfd for it.
    pub(super) fn new(set: Arc<QueueSet>, pairs: u16) -> io::Result<Self> {
        let running = vec![false; pairs.into()];
        let state = Mutex::new(State { running, active: pairs, notes: None });
        Ok(Self { pending: Arc::new(PendingCommand::new()?), set, state })
    }

    pub(super) fn eventfd(&self) -> BorrowedFd<'_> {
        self.pending.eventfd()
    }

    pub(super) fn pending(&self) -> Arc<PendingCommand> {
        self.pending.clone()
    }

    /// Forgets what a former driver has set: features were negotiated.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        state.active = len_u16(state.running.len());
    }

    /// Records whether the receive ring of a pair runs. Returns whether the pair is active.
    pub(super) fn runs(&self, pair: u16, on: bool) -> bool {
        let mut state = self.state();
        if let Some(running) = state.running.get_mut(usize::from(pair)) {
            *running = on;
        }
        pair < state.active
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl NetDevice {
    /// Adds a control queue, if the device can have one.
    ///
    /// # Errors
    /// The kernel has no eventfd for it.
    pub(super) fn controlled(mut self, set: Arc<QueueSet>) -> io::Result<Self> {
        if super::has_control(self.pairs) {
            self.control = Some(Control::new(set, self.pairs)?);
        }
        Ok(self)
    }

    /// Prepares a start of the control queue. `fresh`: the driver is a new one.
    pub(super) fn control_starts(&self, control: &Control, fresh: bool) -> Result<(), String> {
        if !fresh {
            return Ok(());
        }
        let features = self.agreed().features;
        let active = if features & bit(VIRTIO_NET_F_MQ) != 0 { 1 } else { self.pairs };
        self.activate(control, active)?;
        self.take_offloads(control, features & GUEST_OFFLOADS)
    }

    /// Restores the notes that a former daemon left in the in-flight region. Called before any ring
    /// runs.
    pub(super) fn noted(&self, control: &Control, notes: Option<Notes>) -> Result<(), String> {
        let noted = notes.as_ref().and_then(Notes::read);
        control.state().notes = notes;
        let Some((active, offloads)) = noted else { return Ok(()) };
        self.activate(control, active.clamp(1, self.pairs))?;
        self.take_offloads(control, offloads & self.agreed().features & GUEST_OFFLOADS)
    }

    /// Runs the pending command.
    pub(super) fn run_pending(&self, control: &Control) {
        let Some((number, command)) = control.pending.take() else { return };
        let done = self.run(control, command);
        if let Err(why) = &done {
            // Not a warning: a guest could repeat it without limit.
            tracing::debug!("{}: a command of the guest is refused: {why}", self.name);
        }
        control.pending.answer(number, done.is_ok());
    }

    /// Runs a command.
    ///
    /// # Errors
    /// The guest may not set that.
    fn run(&self, control: &Control, command: Command) -> Result<(), String> {
        let features = self.agreed().features;
        let has = |number| features & bit(number) != 0;
        match command {
            Command::Announced => Ok(()),
            Command::Pairs(count) if !has(VIRTIO_NET_F_MQ) || !(1..=self.pairs).contains(&count) => {
                Err(format!("{count} pairs of {}", self.pairs))
            }
            Command::Pairs(count) => self.activate(control, count),
            Command::Offloads(bits)
                if !has(VIRTIO_NET_F_CTRL_GUEST_OFFLOADS) || bits & !(features & GUEST_OFFLOADS) != 0 =>
            {
                Err(format!("offloads {bits:#x}, which were not agreed on"))
            }
            Command::Offloads(bits) => self.take_offloads(control, bits),
        }
    }

    /// Makes the first `count` pairs active. Those whose receive ring runs get frames from now on.
    fn activate(&self, control: &Control, count: u16) -> Result<(), String> {
        let (before, running) = {
            let mut state = control.state();
            (std::mem::replace(&mut state.active, count), state.running.clone())
        };
        let running = |pair: &u16| running.get(usize::from(*pair)) == Some(&true);
        if let Err(why) = (before..count).filter(running).try_for_each(|pair| self.link(pair)) {
            control.state().active = before;
            (before..count).filter(running).for_each(|pair| self.unlink(pair));
            return Err(why);
        }
        (count..before).filter(running).for_each(|pair| self.unlink(pair));
        let settled = self.settled(control, count..before, true);
        self.note(control);
        settled
    }

    /// Sets the offloads that the guest accepts from now on, as feature bits.
    fn take_offloads(&self, control: &Control, bits: u64) -> Result<(), String> {
        if let NetBackend::Tap(tap, _) = &self.backend {
            tap.set_offloads(negotiated::offloads(bits)).map_err(|e| e.to_string())?;
        }
        self.takes.store(bits, Relaxed);
        let settled = self.settled(control, 0..self.pairs, false);
        self.note(control);
        settled
    }

    /// Waits until the workers of these pairs have ended the iteration in which they may not have
    /// seen a change. With `aside`, the pairs deliver no more frames afterwards. (Frames in the
    /// queue of a tap were made for the earlier offloads.)
    ///
    /// # Errors
    /// A worker does not answer. The other workers do not wait for it.
    fn settled(&self, control: &Control, pairs: Range<u16>, aside: bool) -> Result<(), String> {
        let mut settled = Ok(());
        for pair in pairs {
            // A queue that does not run has no iteration to end.
            let visited = control.set.run_on(pair, move |queue| {
                if aside && let Some(pair) = owner(queue).and_then(|owner| owner.pair()) {
                    pair.set_aside();
                }
            });
            settled = settled.and(visited.map(drop).map_err(|e| e.to_string()));
        }
        settled
    }

    /// Writes the notes, if the in-flight region has room for them.
    fn note(&self, control: &Control) {
        let state = control.state();
        if let Some(notes) = &state.notes {
            notes.write(state.active, self.takes.load(Relaxed));
        }
    }
}
