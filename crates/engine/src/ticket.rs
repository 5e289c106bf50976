//! What control asks of a worker, and can take back.
//!
//! Made by the thread that asks, which puts one reference into the worker's mailbox and keeps another. So it can stop waiting
//! for a worker that does not answer: either the worker has begun, or what was asked for is taken back. What must never
//! happen: both, or neither; a queue would be on two workers, or on none.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vshunt_types::sync::Locked;

/// A request of `A`, answered with an `R`.
pub(super) struct Ticket<A, R> {
    /// Guards the phase alone. Held for a change of it, never while anything is waited for.
    phase: Mutex<Phase<A, R>>,
    answered: Condvar,
}

enum Phase<A, R> {
    /// In the mailbox, or begun by a worker that may still be told not to go on.
    Posted(A),
    /// The worker has what was asked for.
    Begun,
    /// The worker's answer, until it is fetched.
    Answered(R),
    /// Withdrawn, or the answer was fetched.
    Closed,
}

/// What came of an attempt to take a ticket back.
pub(super) enum Withdrawn<A, R> {
    /// The worker did not begin and never will.
    Back(A),
    /// The worker has begun, and will answer some time.
    Begun,
    /// The answer came just now.
    Answered(R),
}

impl<A, R> Ticket<A, R> {
    pub(super) fn new(asked: A) -> Arc<Self> {
        Arc::new(Self { phase: Mutex::new(Phase::Posted(asked)), answered: Condvar::new() })
    }

    fn phase(&self) -> MutexGuard<'_, Phase<A, R>> {
        self.phase.locked()
    }

    /// Worker: begins, after which it cannot be withdrawn. None if it was withdrawn before.
    pub(super) fn begin(&self) -> Option<A> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Begun) {
            Phase::Posted(asked) => Some(asked),
            other => {
                *phase = other;
                None
            }
        }
    }

    /// Worker: answers.
    ///
    /// # Errors
    /// It was withdrawn; the answer comes back.
    pub(super) fn answer(&self, answer: R) -> Result<(), R> {
        let mut phase = self.phase();
        match *phase {
            Phase::Posted(_) | Phase::Begun => {
                *phase = Phase::Answered(answer);
                self.answered.notify_one();
                Ok(())
            }
            Phase::Answered(_) | Phase::Closed => Err(answer),
        }
    }

    /// Worker: whether it was withdrawn.
    pub(super) fn is_withdrawn(&self) -> bool {
        matches!(*self.phase(), Phase::Closed)
    }

    /// Waits for the answer for at most `limit`. None if it did not come: the ticket stays as it is.
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

    /// Takes it back unless the worker has begun.
    pub(super) fn withdraw(&self) -> Withdrawn<A, R> {
        let mut phase = self.phase();
        match std::mem::replace(&mut *phase, Phase::Closed) {
            Phase::Posted(asked) => Withdrawn::Back(asked),
            Phase::Answered(answer) => Withdrawn::Answered(answer),
            other => {
                *phase = other;
                Withdrawn::Begun
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
        assert!(ticket.is_withdrawn() && ticket.begin().is_none() && ticket.answer(()).is_err());

        let ticket = Ticket::new(1);
        assert_eq!(ticket.begin(), Some(1));
        assert!(ticket.begin().is_none());
        assert!(matches!(ticket.withdraw(), Withdrawn::Begun));
        assert!(ticket.answer(2).is_ok() && ticket.answer(3).is_err());
        assert!(matches!(ticket.withdraw(), Withdrawn::Answered(2)));
    }

    #[test]
    fn of_a_worker_and_a_thread_that_gives_up_one_has_it() {
        for _ in 0..2000 {
            let ticket = Ticket::<Box<u32>, ()>::new(Box::new(7));
            let theirs = ticket.clone();
            let worker = std::thread::spawn(move || theirs.begin().is_some());
            let back = matches!(ticket.withdraw(), Withdrawn::Back(_));
            assert_ne!(worker.join().unwrap(), back);
        }
    }
}
