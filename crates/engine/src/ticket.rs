//! A request of control to a worker, which can be withdrawn.
//!
//! The thread that asks makes the ticket. It puts one reference into the worker's mailbox and keeps
//! another one. So it can stop waiting for a worker that does not answer: either the worker has
//! started on the request, or the request is withdrawn. Exactly one of the two must be true;
//! otherwise a queue would be on two workers, or on none.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

/// A request with an `A`, answered with an `R`.
pub(super) struct Ticket<A, R> {
    /// Guards the phase only. It is held for a change of the phase, never during a wait.
    phase: Mutex<Phase<A, R>>,
    answered: Condvar,
}

enum Phase<A, R> {
    /// In the mailbox, or started by a worker that may still be told to stop.
    Posted(A),
    /// The worker has the request.
    Started,
    /// The worker's answer, until it is fetched.
    Answered(R),
    /// The request was withdrawn, or the answer was fetched.
    Closed,
}

/// The result of an attempt to withdraw a ticket.
pub(super) enum Withdrawn<A, R> {
    /// The worker has not started, and never will.
    Back(A),
    /// The worker has started, and will answer at some time.
    Started,
    /// The worker has answered.
    Answered(R),
}

impl<A, R> Ticket<A, R> {
    pub(super) fn new(asked: A) -> Arc<Self> {
        Arc::new(Self { phase: Mutex::new(Phase::Posted(asked)), answered: Condvar::new() })
    }

    fn phase(&self) -> MutexGuard<'_, Phase<A, R>> {
        self.phase.locked()
    }

    /// Worker: starts on the request, which cannot be withdrawn from then on. `None` if it was
    /// withdrawn before.
    pub(super) fn start(&self) -> Option<A> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Started) {
            Phase::Posted(asked) => Some(asked),
            other => {
                *phase = other;
                None
            }
        }
    }

    /// Worker: answers the request.
    ///
    /// # Errors
    /// The request was withdrawn. The error contains the answer.
    pub(super) fn answer(&self, answer: R) -> Result<(), R> {
        let mut phase = self.phase();
        match *phase {
            Phase::Posted(_) | Phase::Started => {
                *phase = Phase::Answered(answer);
                self.answered.notify_one();
                Ok(())
            }
            Phase::Answered(_) | Phase::Closed => Err(answer),
        }
    }

    /// Worker: returns whether the request was withdrawn.
    pub(super) fn is_withdrawn(&self) -> bool {
        matches!(*self.phase(), Phase::Closed)
    }

    /// Waits for the answer for at most `limit`. `None` if there is none by then; the ticket is
    /// unchanged.
    pub(super) fn wait(&self, limit: Duration) -> Option<R> {
        let until = Instant::now() + limit;
        let mut phase = self.phase();
        loop {
            if matches!(*phase, Phase::Answered(_)) {
                let Phase::Answered(answer) = std::mem::replace(&mut *phase, Phase::Closed) else {
                    unreachable!("seen under the same lock")
                };
                return Some(answer);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            phase = self.answered.wait_timeout(phase, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Withdraws the request, unless the worker has started on it.
    pub(super) fn withdraw(&self) -> Withdrawn<A, R> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Closed) {
            Phase::Posted(asked) => Withdrawn::Back(asked),
            Phase::Answered(answer) => Withdrawn::Answered(answer),
            other => {
                *phase = other;
                Withdrawn::Started
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_it_was_begun_or_it_comes_back() {
        let ticket = Ticket::<_, ()>::new(1);
        assert!(ticket.wait(Duration::from_millis(1)).is_none());
        assert!(matches!(ticket.withdraw(), Withdrawn::Back(1)));
        assert!(ticket.is_withdrawn() && ticket.start().is_none() && ticket.answer(()).is_err());

        let ticket = Ticket::new(1);
        assert_eq!(ticket.start(), Some(1));
        assert!(ticket.start().is_none());
        assert!(matches!(ticket.withdraw(), Withdrawn::Started));
        assert!(ticket.answer(2).is_ok() && ticket.answer(3).is_err());
        assert!(matches!(ticket.withdraw(), Withdrawn::Answered(2)));
    }

    #[test]
    fn of_a_worker_and_a_thread_that_gives_up_one_has_it() {
        for _ in 0..2000 {
            let ticket = Ticket::<Box<u32>, ()>::new(Box::new(7));
            let theirs = ticket.clone();
            let worker = std::thread::spawn(move || theirs.start().is_some());
            let back = matches!(ticket.withdraw(), Withdrawn::Back(_));
            assert_ne!(worker.join().unwrap(), back);
        }
    }
}
