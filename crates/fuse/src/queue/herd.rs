//! Which channel of a mount listens.
//!
//! Every channel may read every request, so to wake them all for one would burn CPUs, and to wake them in turn would
//! have each request wait for a sleeping worker. So one channel leads: it alone waits for requests, and it serves what
//! comes for as long as it keeps up. Where others wait beside the one in hand when it has worked for a while it calls another, which
//! serves until nothing is left and goes idle again. A call that found next to nothing makes the next one later, one that
//! helped makes it sooner.
//!
//! Used by queues, on their workers' threads. What must never happen: requests waiting while no channel listens.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use vshunt_types::sync::Locked;

use vshunt_engine::EventFd;

/// How long a channel works on what it finds before it calls another, µs: from, to. Less than the first is what waking
/// another costs.
const CALL_AFTER_US_MIN: u32 = 20;
const CALL_AFTER_US_MAX: u32 = 5_000;
/// Requests that a called channel has to find for the call to have been worth it.
const HELP_MIN: u32 = 8;

#[derive(Default)]
struct State {
    leader: Option<u16>,
    /// Those that neither listen nor serve; the last to go idle is called first, its caches are warm.
    idle: Vec<u16>,
}

/// The channels of one mount.
pub struct Herd {
    /// Guards who leads and who is idle; held for a few instructions.
    state: Mutex<State>,
    eventfds: Vec<Arc<EventFd>>,
    call_after_us: AtomicU32,
}

impl Herd {
    /// Channels with these eventfds; none of them listens yet.
    pub fn new(eventfds: Vec<Arc<EventFd>>) -> Self {
        Self { state: Mutex::default(), eventfds, call_after_us: AtomicU32::new(CALL_AFTER_US_MIN) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Channel `me` found nothing more. Whether it leads, and so has to listen.
    pub(super) fn reserve(&self, me: u16) -> bool {
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

    /// Channel `me` serves: it was called, or came by itself.
    pub(super) fn roused(&self, me: u16) {
        self.state().idle.retain(|&i| i != me);
    }

    /// How long a channel may work before it calls another, µs.
    #[inline]
    pub(super) fn call_after_us(&self) -> u32 {
        self.call_after_us.load(Relaxed)
    }

    /// Calls an idle channel, if there is one.
    pub(super) fn call(&self) {
        let called = self.state().idle.pop();
        if let Some(index) = called {
            self.eventfds[usize::from(index)].signal();
        }
    }

    /// A called channel found so many requests before there were none.
    pub(super) fn called(&self, requests: u32) {
        let now = self.call_after_us.load(Relaxed);
        let next = if requests < HELP_MIN { now.saturating_mul(2) } else { now / 2 };
        self.call_after_us.store(next.clamp(CALL_AFTER_US_MIN, CALL_AFTER_US_MAX), Relaxed);
    }

    /// Channel `me` can take no more for now, or leaves: another one leads.
    pub(super) fn pass(&self, me: u16) {
        let called = {
            let mut state = self.state();
            state.idle.retain(|&i| i != me);
            match state.leader {
                Some(leader) if leader != me => return,
                // Whoever serves now, or is called, leads when it settles.
                _ => {
                    state.leader = None;
                    state.idle.pop()
                }
            }
        };
        if let Some(index) = called {
            self.eventfds[usize::from(index)].signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn herd(n: usize) -> Herd {
        Herd::new((0..n).map(|_| Arc::new(EventFd::make().unwrap())).collect())
    }

    fn signalled(herd: &Herd, i: usize) -> bool {
        herd.eventfds[i].take()
    }

    #[test]
    fn one_leads_and_the_last_to_go_idle_is_called_first() {
        let herd = herd(3);
        assert!(herd.reserve(0));
        assert!(herd.reserve(0), "it goes on leading");
        assert!(!herd.reserve(1));
        assert!(!herd.reserve(2));
        herd.call();
        assert!(signalled(&herd, 2) && !signalled(&herd, 1));
        herd.call();
        assert!(signalled(&herd, 1));
        herd.call();
        assert!(!(0..3).any(|i| signalled(&herd, i)), "none is idle");
    }

    #[test]
    fn a_leader_that_goes_calls_a_successor() {
        let herd = herd(2);
        assert!(herd.reserve(0));
        assert!(!herd.reserve(1));
        herd.pass(0);
        assert!(signalled(&herd, 1));
        assert!(herd.reserve(1));
        assert!(!herd.reserve(0));
        // One that does not lead changes nothing when it goes.
        herd.pass(0);
        assert!(!signalled(&herd, 0) && !signalled(&herd, 1));
        herd.pass(1);
        assert!(!signalled(&herd, 0), "it left the idle ones");
        assert!(herd.reserve(0), "nobody led");
    }

    #[test]
    fn calls_in_vain_come_later() {
        let herd = herd(2);
        for _ in 0..20 {
            herd.called(HELP_MIN - 1);
        }
        assert_eq!(herd.call_after_us(), CALL_AFTER_US_MAX);
        for _ in 0..20 {
            herd.called(HELP_MIN);
        }
        assert_eq!(herd.call_after_us(), CALL_AFTER_US_MIN);
    }
}
