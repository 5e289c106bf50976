//! What a guest sets by its card's control queue, done by the session thread (Virtio 1.3, 5.1.6.5).
//!
//! Until a front-end starts that queue all pairs are active: it has the control queue itself, or its guest uses none. When it
//! starts from its beginning, the driver is a new one: one pair is active, and it takes what was agreed on. Else the guest goes
//! on: with what it set in this connection, or with what was noted in the in-flight region, or, where nobody knows, with all
//! pairs.

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

use super::super::convert::count_u16;
use super::super::memory::Notes;
use super::{NetBackend, NetDevice};

/// See the module. Only the session thread changes it.
pub(super) struct Control {
    pending: Arc<PendingCommand>,
    set: Arc<QueueSet>,
    /// Guards nothing else; held for a look or a change.
    state: Mutex<State>,
}

struct State {
    /// Of each pair, whether its receive ring runs.
    running: Vec<bool>,
    /// The first ones, which may get frames.
    active: u16,
    notes: Option<Notes>,
}

impl Control {
    /// For a card with the queues of `set`, of which the first `pairs` are pairs.
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

    /// Features were agreed on: what a former guest set is over.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        state.active = count_u16(state.running.len());
    }

    /// A pair's receive ring runs, or does so no more. Whether the pair is active.
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
    /// The same with a control queue, where that can be.
    pub(super) fn controlled(mut self, set: Arc<QueueSet>) -> io::Result<Self> {
        if super::has_control(self.pairs) {
            self.control = Some(Control::new(set, self.pairs)?);
        }
        Ok(self)
    }

    /// The control queue starts.
    pub(super) fn control_starts(&self, control: &Control, fresh: bool) -> Result<(), String> {
        if !fresh {
            return Ok(());
        }
        let features = self.agreed().features;
        let active = if features & bit(VIRTIO_NET_F_MQ) != 0 { 1 } else { self.pairs };
        self.activate(control, active)?;
        self.take_offloads(control, features & GUEST_OFFLOADS)
    }

    /// The in-flight region is another one, before any ring runs: what a former daemon noted there holds again.
    pub(super) fn noted(&self, control: &Control, notes: Option<Notes>) -> Result<(), String> {
        let noted = notes.as_ref().and_then(Notes::read);
        control.state().notes = notes;
        let Some((active, offloads)) = noted else { return Ok(()) };
        self.activate(control, active.clamp(1, self.pairs))?;
        self.take_offloads(control, offloads & self.agreed().features & GUEST_OFFLOADS)
    }

    /// A command came.
    pub(super) fn commanded(&self, control: &Control) {
        let Some((number, command)) = control.pending.take() else { return };
        let done = self.obey(control, command);
        if let Err(why) = &done {
            // A guest may say so again and again.
            tracing::debug!("{}: a command of the guest is refused: {why}", self.name);
        }
        control.pending.answer(number, done.is_ok());
    }

    fn obey(&self, control: &Control, command: Command) -> Result<(), String> {
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

    /// From now on the first `count` pairs get frames, those of them that run.
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

    /// From now on the guest takes what these feature bits say.
    fn take_offloads(&self, control: &Control, bits: u64) -> Result<(), String> {
        if let NetBackend::Tap(tap, _) = &self.backend {
            tap.set_offloads(negotiated::offloads(bits)).map_err(|e| e.to_string())?;
        }
        self.takes.store(bits, Relaxed);
        let settled = self.settled(control, 0..self.pairs, false);
        self.note(control);
        settled
    }

    /// Returns when the workers of these pairs have ended the turns in which they may not have known yet; nothing comes any more
    /// by pairs that are set `aside`. (What lies in a tap's queue was made for what the guest took before.)
    ///
    /// # Errors
    /// A worker does not answer; the others do not wait for it.
    fn settled(&self, control: &Control, pairs: Range<u16>, aside: bool) -> Result<(), String> {
        let mut settled = Ok(());
        for pair in pairs {
            // One that does not run has nothing to end.
            let visited = control.set.run_on(pair, move |queue| {
                if aside && let Some(pair) = owner(queue).and_then(|owner| owner.pair()) {
                    pair.set_aside();
                }
            });
            settled = settled.and(visited.map(drop).map_err(|e| e.to_string()));
        }
        settled
    }

    fn note(&self, control: &Control) {
        let state = control.state();
        if let Some(notes) = &state.notes {
            notes.write(state.active, self.takes.load(Relaxed));
        }
    }
}
