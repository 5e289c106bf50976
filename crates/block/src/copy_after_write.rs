//! Copy after write: a write of a guest is complete only when the target of a mirror has it, too.
//!
//! A write goes to the disk first. Then it waits until a copy of its blocks that began later has
//! reached the target. The copy queue (`copy`) copies such blocks first, and beside them a backlog:
//! what was written before. When that is empty, at most the blocks in flight are missing in the
//! target.
//!
//! Writes of the same block are copied one after the other, each as the block is then. One copy
//! serves all writes that ended before it began.
//!
//! What must never happen: a write completes before the target has it, while the copy runs; two
//! copies of a block are in flight at a time; a waiting write is not woken.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use qcow2::Waker;
use vshunt_engine::EventFd;
use vshunt_types::sync::Locked;

use super::bits::Bits;
use super::wake_now::wake_now;

/// Most copies of the backlog at a time, beside those that writes wait for. One is always in
/// flight, if something is left: writes must not hold the backlog up.
const OF_BACKLOG_MAX: usize = 4;
/// Blocks of the backlog that are searched at a time, while the lock is held.
const SEARCH_BLOCKS: u64 = 1 << 20;

/// A write that waits.
struct Waiting {
    /// The number of copies that had begun when the write ended.
    since: u64,
    /// Its blocks.
    blocks: Range<u64>,
    /// The blocks that no later copy has brought to the target.
    left: Vec<Range<u64>>,
    waker: Waker,
}

impl Waiting {
    /// Takes note of a copy that began as number `begun`. Returns whether nothing is left.
    fn copied(&mut self, blocks: &Range<u64>, begun: u64) -> bool {
        if begun <= self.since || self.blocks.end <= blocks.start || blocks.end <= self.blocks.start {
            return false;
        }
        let mut rest = Vec::new();
        for left in self.left.drain(..) {
            let parts = [left.start..left.end.min(blocks.start), left.start.max(blocks.end)..left.end];
            rest.extend(parts.into_iter().filter(|part| part.start < part.end));
        }
        self.left = rest;
        self.left.is_empty()
    }
}

/// A copy in flight.
struct InFlight {
    blocks: Range<u64>,
    /// Its number.
    begun: u64,
    at: Instant,
    of_backlog: bool,
}

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    /// Runs of blocks that are set in `written`. Each such block is in one of them.
    urgent: VecDeque<Range<u64>>,
    /// Number of copies that have begun.
    begun: u64,
    /// The copies in flight.
    copying: Vec<InFlight>,
    /// How many of them are of the backlog.
    of_backlog: usize,
    /// Where the backlog is searched next, and for how many blocks nothing was found.
    cursor: u64,
    searched: u64,
}

/// The blocks that a copy has to bring to the target, shared by the handles of the source and the
/// copy queue.
pub struct CopyAfterWrite {
    /// Blocks that writes wait for, and whose copy has not begun.
    written: Bits,
    /// Other blocks that the target lacks, for which nobody waits, and whose copy has not begun.
    backlog: Bits,
    /// Blocks that are being copied. They stay set if that fails.
    copying: Bits,
    /// Guards the waiting writes and the copies in flight. Held only for look-ups, not for I/O.
    state: Mutex<State>,
    /// Length of `State::waiting`, to be read without the lock.
    waiting: AtomicUsize,
    /// Whether writes do not wait any more. Changed while the lock is held.
    ended: AtomicBool,
    /// Whether [`next`](Self::next) may find something.
    more: AtomicBool,
    /// Wakes the copy queue.
    eventfd: EventFd,
    /// Whether the copy queue sleeps.
    asleep: AtomicBool,
}

impl CopyAfterWrite {
    /// Makes the work of a copy of a disk of `size` bytes, in blocks of `1 << shift` bytes.
    ///
    /// # Errors
    /// `OutOfMemory`, and those of the system.
    pub fn new(size: u64, shift: u32) -> std::io::Result<Self> {
        let bits = || Bits::new(size, shift).ok_or(std::io::ErrorKind::OutOfMemory);
        Ok(Self {
            written: bits()?,
            backlog: bits()?,
            copying: bits()?,
            state: Mutex::default(),
            waiting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            more: AtomicBool::new(true),
            eventfd: EventFd::make()?,
            asleep: AtomicBool::new(false),
        })
    }

    /// Adds what was written earlier.
    pub fn add(&self, earlier: &Bits) {
        let mut state = self.state();
        self.backlog.add(earlier);
        state.searched = 0;
        drop(state);
        self.look_again();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Returns a map of the blocks, for their size and places.
    pub(super) fn blocks(&self) -> &Bits {
        &self.backlog
    }

    /// Takes note of a write that has ended. Returns whether it has to wait for a wake-up.
    pub(super) fn wrote(&self, bytes: Range<u64>, waker: Waker) -> bool {
        let blocks = self.written.blocks(bytes);
        if blocks.is_empty() {
            return false;
        }
        let mut state = self.state();
        if self.has_ended() {
            return false;
        }
        // The parts that are not urgent yet.
        let mut at = blocks.start;
        while at < blocks.end {
            let set = self.written.run(at..blocks.end, blocks.end - at);
            let end = set.as_ref().map_or(blocks.end, |run| run.start);
            if at < end {
                self.written.set(at..end);
                self.backlog.clear(at..end);
                state.urgent.push_back(at..end);
            }
            at = set.map_or(blocks.end, |run| run.end);
        }
        let since = state.begun;
        state.waiting.push(Waiting { since, blocks: blocks.clone(), left: vec![blocks], waker });
        self.waiting.store(state.waiting.len(), SeqCst);
        self.more.store(true, SeqCst);
        drop(state);
        self.notify();
        true
    }

    /// Takes note of a write that has failed. It may have changed the disk, and does not wait.
    pub(super) fn failed(&self, bytes: Range<u64>) {
        let mut state = self.state();
        let blocks = self.backlog.blocks(bytes);
        self.backlog.set(blocks.clone());
        // Other writes wait for these.
        let mut at = blocks.start;
        while let Some(run) = self.written.run(at..blocks.end, blocks.end - at) {
            at = run.end;
            self.backlog.clear(run);
        }
        state.searched = 0;
        self.more.store(true, SeqCst);
        drop(state);
        self.notify();
    }

    /// Begins the next copy. Returns its blocks, at most `bytes` of them. `backlog`: it may be one
    /// that nobody waits for.
    pub(super) fn next(&self, bytes: u64, backlog: bool) -> Option<Range<u64>> {
        let most = (bytes / self.backlog.granularity()).max(1);
        let mut guard = self.state();
        let state = &mut *guard;
        let mut of_backlog = false;
        let mut run = None;
        if !self.has_ended() {
            if backlog && state.of_backlog == 0 {
                run = self.next_of_backlog(state, most);
                of_backlog = run.is_some();
            }
            run = run.or_else(|| self.next_urgent(state, most));
            if run.is_none() && backlog && state.of_backlog < OF_BACKLOG_MAX {
                run = self.next_of_backlog(state, most);
                of_backlog = run.is_some();
            }
        }
        let Some(run) = run else {
            // A write, or the end of a copy, sets it again.
            let searches = backlog && state.of_backlog < OF_BACKLOG_MAX && !self.is_searched(state);
            self.more.store(searches && !self.has_ended(), SeqCst);
            return None;
        };
        state.begun += 1;
        state.of_backlog += usize::from(of_backlog);
        state.copying.push(InFlight {
            blocks: run.clone(),
            begun: state.begun,
            at: Instant::now(),
            of_backlog,
        });
        self.copying.set(run.clone());
        self.backlog.clear(run.clone());
        Some(run)
    }

    /// Takes the next run of blocks that a write waits for and that are not being copied.
    fn next_urgent(&self, state: &mut State, most: u64) -> Option<Range<u64>> {
        for _ in 0..state.urgent.len() {
            let whole = state.urgent.pop_front()?;
            let Some(run) = free_run(&self.written, &self.copying, whole.clone(), most) else {
                // Its turn comes when these copies have ended.
                state.urgent.push_back(whole);
                continue;
            };
            // Other writes do not wait for all of a long one.
            if run.end < whole.end {
                state.urgent.push_back(run.end..whole.end);
            }
            if whole.start < run.start {
                state.urgent.push_back(whole.start..run.start);
            }
            self.written.clear(run.clone());
            return Some(run);
        }
        None
    }

    /// Returns whether all of the backlog was searched.
    fn is_searched(&self, state: &State) -> bool {
        state.searched >= self.backlog.all().end
    }

    /// Finds the next run of the backlog that is not being copied, if it is among the next
    /// [`SEARCH_BLOCKS`].
    fn next_of_backlog(&self, state: &mut State, most: u64) -> Option<Range<u64>> {
        if self.is_searched(state) {
            return None;
        }
        let all = self.backlog.all().end;
        let part = state.cursor..all.min(state.cursor + SEARCH_BLOCKS);
        let run = free_run(&self.backlog, &self.copying, part.clone(), most);
        let end = match &run {
            Some(run) => {
                state.searched = 0;
                run.end
            }
            None => {
                state.searched += part.end - part.start;
                part.end
            }
        };
        state.cursor = if end < all { end } else { 0 };
        run
    }

    /// Ends a copy whose blocks are in the target, and wakes the writes that waited for it alone.
    pub(super) fn copied(&self, blocks: &Range<u64>, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        let place = state.copying.iter().position(|copy| copy.blocks == *blocks).expect("it is in flight");
        let InFlight { begun, of_backlog, .. } = state.copying.swap_remove(place);
        state.of_backlog -= usize::from(of_backlog);
        self.copying.clear(blocks.clone());
        if self.backlog.first(blocks.clone()).is_some() {
            state.searched = 0;
        }
        let mut at = 0;
        while let Some(write) = state.waiting.get_mut(at) {
            if write.copied(blocks, begun) {
                wake(state.waiting.swap_remove(at).waker);
            } else {
                at += 1;
            }
        }
        self.waiting.store(state.waiting.len(), SeqCst);
        // What these blocks held up may be copied now.
        self.more.store(true, SeqCst);
    }

    /// Returns whether the copy queue may find something to do.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.more.load(SeqCst)
    }

    /// Returns whether the target has all blocks: nothing is left or in flight, and the copy has
    /// not ended.
    pub fn is_idle(&self) -> bool {
        // Without the lock, since that may take long. Only failed writes make it more.
        if self.backlog.first(self.backlog.all()).is_some() {
            return false;
        }
        let state = self.state();
        !self.has_ended() && state.urgent.is_empty() && state.copying.is_empty()
    }

    /// Returns for how long the oldest copy has been in flight.
    pub fn oldest(&self) -> Option<Duration> {
        self.state().copying.iter().map(|copy| copy.at).min().map(|at| at.elapsed())
    }

    /// Returns the number of bytes that nobody waits for, and whose copy has not begun.
    pub fn backlog_bytes(&self) -> u64 {
        self.backlog.count() * self.backlog.granularity()
    }

    /// Adds the blocks that the target may lack to a map.
    pub fn add_left_to(&self, bits: &Bits) {
        for left in [&self.written, &self.backlog, &self.copying] {
            bits.add(left);
        }
    }

    /// Returns the number of writes that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// Returns whether writes do not wait any more.
    #[inline]
    pub fn has_ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Ends the copy. All waiting writes continue, and later ones do not wait.
    pub(super) fn end(&self, wake: &mut dyn FnMut(Waker)) {
        let mut state = self.state();
        self.ended.store(true, SeqCst);
        state.waiting.drain(..).for_each(|write| wake(write.waker));
        self.waiting.store(0, SeqCst);
    }

    /// Ends the copy from a control thread.
    pub fn end_now(&self) {
        wake_now(|wake| self.end(wake));
    }

    /// Returns the eventfd that wakes the copy queue while it sleeps.
    pub(super) fn eventfd(&self) -> RawFd {
        self.eventfd.fd()
    }

    /// Sets whether the copy queue sleeps.
    pub(super) fn set_asleep(&self, yes: bool) {
        self.asleep.store(yes, SeqCst);
    }

    /// Makes the copy queue look again what it may do.
    pub fn look_again(&self) {
        self.more.store(true, SeqCst);
        self.notify();
    }

    /// Wakes the copy queue if it sleeps.
    fn notify(&self) {
        if self.asleep.swap(false, SeqCst) {
            self.eventfd.signal();
        }
    }
}

/// Returns the first run of blocks in a range that are set in `wanted` and not in `busy`.
fn free_run(wanted: &Bits, busy: &Bits, blocks: Range<u64>, most: u64) -> Option<Range<u64>> {
    let mut at = blocks.start;
    while let Some(run) = wanted.run(at..blocks.end, most) {
        match busy.first(run.clone()) {
            None => return Some(run),
            Some(first) if first > run.start => return Some(run.start..first),
            Some(first) => at = busy.run(first..blocks.end, blocks.end - first)?.end,
        }
    }
    None
}

#[cfg(test)]
mod tests;
