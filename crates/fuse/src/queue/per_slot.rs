//! One value for each request slot of a queue.

use std::ops::{Index, IndexMut};

/// Values by slot number. The number of slots is a power of two, and an index is reduced to it, so
/// that no index is out of bounds and no access panics.
pub(super) struct PerSlot<T>(Box<[T]>);

impl<T> PerSlot<T> {
    /// Makes the values of `count` slots, which is a power of two.
    pub(super) fn new(count: u16, value: impl FnMut(u16) -> T) -> Self {
        assert!(count.is_power_of_two(), "a queue has a power of two of slots");
        Self((0..count).map(value).collect())
    }

    /// Numbers of all slots.
    pub(super) fn indexes(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.0.len()).unwrap_or(u16::MAX)
    }

    /// Keeps the memory for as long as the process runs. The values must not be used after that.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.0));
    }

    fn reduced(&self, slot: u16) -> usize {
        debug_assert!(usize::from(slot) < self.0.len(), "slot {slot}");
        usize::from(slot) & (self.0.len() - 1)
    }
}

impl<T> Index<u16> for PerSlot<T> {
    type Output = T;

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "the reduced index is below the length")]
    fn index(&self, slot: u16) -> &T {
        &self.0[self.reduced(slot)]
    }
}

impl<T> IndexMut<u16> for PerSlot<T> {
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "the reduced index is below the length")]
    fn index_mut(&mut self, slot: u16) -> &mut T {
        let index = self.reduced(slot);
        &mut self.0[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_has_its_value() {
        let mut values = PerSlot::new(4, |slot| slot * 10);
        values[3] += 1;
        assert_eq!(values.indexes().map(|slot| values[slot]).collect::<Vec<_>>(), [0, 10, 20, 31]);
    }
}
