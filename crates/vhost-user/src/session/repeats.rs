//! Memory regions that a front end has added more than once. QEMU adds each region once for each
//! queue pair of a network device, and removes it as often.

use std::collections::{BTreeMap, btree_map::Entry};

/// Guest address, user address and size of a region.
pub(super) type Key = (u64, u64, u64);

/// How often each region was added again, at least once. Only regions of the memory table have an
/// entry, so there are never more entries than regions.
#[derive(Default)]
pub(super) struct Repeats(BTreeMap<Key, u16>);

impl Repeats {
    /// Counts that a region of the table was added again. Returns false if the counter would
    /// overflow.
    pub(super) fn add(&mut self, key: Key) -> bool {
        let times = self.0.entry(key).or_insert(0);
        let more = times.checked_add(1);
        *times = more.unwrap_or(*times);
        more.is_some()
    }

    /// Counts a removal. Returns true if the region was added again before, so that it stays in the
    /// table.
    pub(super) fn remove(&mut self, key: Key) -> bool {
        let Entry::Occupied(mut times) = self.0.entry(key) else { return false };
        match *times.get() {
            2.. => *times.get_mut() -= 1,
            _ => _ = times.remove(),
        }
        true
    }

    /// Forgets a region that was replaced by other memory.
    pub(super) fn forget(&mut self, key: Key) {
        self.0.remove(&key);
    }

    /// Forgets all regions: the front end sent a new memory table.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_goes_with_its_last_removal_and_leaves_nothing() {
        let mut repeats = Repeats::default();
        for n in 0..1000 {
            let key = (n << 12, n << 12, 4096);
            assert!(!repeats.remove(key), "it was added once");
            assert!(repeats.add(key) && repeats.add(key));
            assert!(repeats.remove(key) && repeats.remove(key) && !repeats.remove(key));
            assert_eq!(repeats.0.len(), 0, "an entry of a region that is gone");
        }
    }

    #[test]
    fn there_is_a_most() {
        let mut repeats = Repeats::default();
        let key = (0, 0, 4096);
        assert!((0..u16::MAX).all(|_| repeats.add(key)));
        assert!(!repeats.add(key) && !repeats.add(key));
        repeats.forget(key);
        assert!(!repeats.remove(key));
    }
}
