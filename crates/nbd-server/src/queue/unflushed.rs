//! Changes by a client that no flush covers.

/// Counts the changes by a client, and those that are stable.
#[derive(Default)]
pub(super) struct Unflushed {
    /// The number of changes that are complete and were not stable by themselves.
    changes: u64,
    /// The number of those, from the first one on, that a flush covers.
    flushed: u64,
}

impl Unflushed {
    /// Counts a write, discard or WriteZeroes that is complete, or has failed and may have changed
    /// something. `stable`: it is on stable storage.
    #[inline]
    pub(super) fn changed(&mut self, stable: bool) {
        self.changes += u64::from(!stable);
    }

    /// Returns the number of changes that a flush which starts now covers.
    #[inline]
    pub(super) fn mark(&self) -> u64 {
        self.changes
    }

    /// Counts a completed flush. `mark`: the [`mark`](Self::mark) of its start.
    #[inline]
    pub(super) fn flushed(&mut self, mark: u64) {
        self.flushed = self.flushed.max(mark);
    }

    /// Returns whether all changes are stable.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.flushed >= self.changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_what_was_complete_when_it_began() {
        let mut unflushed = Unflushed::default();
        unflushed.changed(true);
        assert!(unflushed.is_empty());
        unflushed.changed(false);
        let mark = unflushed.mark();
        unflushed.changed(false);
        unflushed.flushed(mark);
        assert!(!unflushed.is_empty());
        unflushed.flushed(unflushed.mark());
        unflushed.flushed(mark);
        assert!(unflushed.is_empty());
    }
}
