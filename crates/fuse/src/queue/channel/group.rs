//! Which channel of a mount waits for requests: leader and followers.
//!
//! Every channel can read every request. To wake all of them for one request would waste CPU time,
//! and to wake them in turn would delay each request by the time that a worker needs to wake up. So
//! one channel leads: it alone waits for requests, and it serves what comes for as long as it keeps
//! up. If requests still wait after it has worked for a while, it wakes another channel, which
//! serves until no request is left and becomes idle again. A channel that was woken and found
//! almost nothing makes the leader wait longer the next time; one that helped makes it wait less.
//!
//! Queues use it on the threads of their workers. What must never happen: requests wait while no
//! channel listens.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_engine::EventFd;

/// How long a channel works before it wakes another one, µs: bounds. To wake a worker costs about
/// as much as the lower one.
const WAKE_AFTER_US_MIN: u32 = 20;
const WAKE_AFTER_US_MAX: u32 = 5_000;
/// A woken channel has helped if it found at least that many requests.
const HELP_MIN: u32 = 8;

#[derive(Default)]
struct State {
    leader: Option<u16>,
    /// Channels that neither listen nor serve. The last one to become idle is woken first: its
    /// caches are warm.
    idle: Vec<u16>,
}

/// The channels of one mount.
pub(crate) struct ChannelGroup {
    /// Guards the leader and the idle channels. Held for a few instructions.
    state: Mutex<State>,
    eventfds: Vec<Arc<EventFd>>,
    wake_after_us: AtomicU32,
}

impl ChannelGroup {
    /// Channels with these eventfds, by queue index. None of them listens yet.
    pub(crate) fn new(eventfds: Vec<Arc<EventFd>>) -> Self {
        Self { state: Mutex::default(), eventfds, wake_after_us: AtomicU32::new(WAKE_AFTER_US_MIN) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Channel `me` found no more requests. Returns whether it leads, and so must listen; otherwise
    /// it becomes idle.
    pub(super) fn lead_or_idle(&self, me: u16) -> bool {
        let mut state = self.state();
        match state.leader {
            Some(leader) if leader != me => {
                if !state.idle.contains(&me) {
                    state.idle.push(me);
                }
                false
            }
            _ => {
                state.leader = Some(me);
                true
            }
        }
    }

    /// Channel `me` is not idle any more.
    pub(super) fn leave_idle(&self, me: u16) {
        self.state().idle.retain(|&i| i != me);
    }

    /// How long a channel works before it wakes another one, µs.
    #[inline]
    pub(super) fn wake_after_us(&self) -> u32 {
        self.wake_after_us.load(Relaxed)
    }

    /// Wakes an idle channel, if there is one.
    pub(super) fn wake(&self) {
        let idle = self.state().idle.pop();
        self.signal(idle);
    }

    fn signal(&self, channel: Option<u16>) {
        if let Some(eventfd) = channel.and_then(|index| self.eventfds.get(usize::from(index))) {
            eventfd.signal();
        }
    }

    /// A woken channel found that many requests before there were none.
    pub(super) fn note_help(&self, requests: u32) {
        let now = self.wake_after_us.load(Relaxed);
        let next = if requests < HELP_MIN { now.saturating_mul(2) } else { now / 2 };
        self.wake_after_us.store(next.clamp(WAKE_AFTER_US_MIN, WAKE_AFTER_US_MAX), Relaxed);
    }

    /// Channel `me` can take no more requests for now, or leaves its worker: another one leads.
    pub(super) fn hand_off(&self, me: u16) {
        let successor = {
            let mut state = self.state();
            state.idle.retain(|&i| i != me);
            match state.leader {
                Some(leader) if leader != me => return,
                // A channel that serves now, or that is woken here, becomes the leader when it
                // finds no more requests.
                _ => {
                    state.leader = None;
                    state.idle.pop()
                }
            }
        };
        self.signal(successor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(n: usize) -> ChannelGroup {
        ChannelGroup::new((0..n).map(|_| Arc::new(EventFd::make().unwrap())).collect())
    }

    fn signalled(group: &ChannelGroup, i: usize) -> bool {
        group.eventfds[i].take()
    }

    #[test]
    fn one_leads_and_the_last_to_go_idle_is_woken_first() {
        let group = group(3);
        assert!(group.lead_or_idle(0));
        assert!(group.lead_or_idle(0), "it still leads");
        assert!(!group.lead_or_idle(1));
        assert!(!group.lead_or_idle(2));
        group.wake();
        assert!(signalled(&group, 2) && !signalled(&group, 1));
        group.wake();
        assert!(signalled(&group, 1));
        group.wake();
        assert!(!(0..3).any(|i| signalled(&group, i)), "none is idle");
    }

    #[test]
    fn a_leader_that_leaves_wakes_a_successor() {
        let group = group(2);
        assert!(group.lead_or_idle(0));
        assert!(!group.lead_or_idle(1));
        group.hand_off(0);
        assert!(signalled(&group, 1));
        assert!(group.lead_or_idle(1));
        assert!(!group.lead_or_idle(0));
        // A channel that does not lead changes nothing when it leaves.
        group.hand_off(0);
        assert!(!signalled(&group, 0) && !signalled(&group, 1));
        group.hand_off(1);
        assert!(!signalled(&group, 0), "it is not idle any more");
        assert!(group.lead_or_idle(0), "nobody led");
    }

    #[test]
    fn a_wake_in_vain_delays_the_next_one() {
        let group = group(2);
        for _ in 0..20 {
            group.note_help(HELP_MIN - 1);
        }
        assert_eq!(group.wake_after_us(), WAKE_AFTER_US_MAX);
        for _ in 0..20 {
            group.note_help(HELP_MIN);
        }
        assert_eq!(group.wake_after_us(), WAKE_AFTER_US_MIN);
    }
}
