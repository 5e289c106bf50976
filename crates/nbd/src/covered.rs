//! Which parts of a range have been announced, whatever their order.

use std::ops::Range;

/// Most separate parts. Servers send chunks in order, or nearly so.
const PARTS_MAX: usize = 4096;

/// The parts of a range that begins at 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    /// Everything before this is covered.
    end: u64,
    /// What is covered behind it: in order, apart from each other and from `end`.
    others: Vec<Range<u64>>,
}

impl Covered {
    /// Makes it empty.
    #[inline]
    pub fn clear(&mut self) {
        self.end = 0;
        self.others.clear();
    }

    /// Adds a part. Returns false if a byte of it is covered already, or if there are too many
    /// parts.
    #[inline]
    pub fn add(&mut self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        if at == self.end && self.others.is_empty() {
            self.end = end;
            return true;
        }
        self.add_apart(at, end)
    }

    fn add_apart(&mut self, at: u64, end: u64) -> bool {
        let index = self.others.partition_point(|part| part.start < at);
        let before = index.checked_sub(1).and_then(|i| self.others.get(i)).map_or(self.end, |part| part.end);
        let after = self.others.get(index).map(|part| part.start);
        if at < before || after.is_some_and(|after| end > after) {
            return false;
        }
        let joins_after = after == Some(end);
        if at == before {
            let joined = if joins_after { self.others.remove(index).end } else { end };
            match index.checked_sub(1).and_then(|i| self.others.get_mut(i)) {
                Some(part) => part.end = joined,
                None => self.end = joined,
            }
            return true;
        }
        if let Some(part) = self.others.get_mut(index).filter(|_| joins_after) {
            part.start = at;
            return true;
        }
        let has_room = self.others.len() < PARTS_MAX;
        if has_room {
            self.others.insert(index, at..end);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::{Covered, PARTS_MAX};
    use proptest::prelude::*;

    proptest! {
        /// As a set of bytes says.
        #[test]
        fn a_part_is_added_once(parts in proptest::collection::vec((0_u64..64, 1_u64..9), 1..40)) {
            let (mut covered, mut bytes) = (Covered::default(), [false; 80]);
            for (at, len) in parts {
                let place = &mut bytes[at as usize..(at + len) as usize];
                let is_free = !place.contains(&true);
                prop_assert_eq!(covered.add(at, len), is_free, "{}+{}: {:?}", at, len, covered);
                if is_free {
                    place.fill(true);
                }
            }
            let end = bytes.iter().position(|covered| !covered).unwrap_or(80) as u64;
            prop_assert_eq!(covered.end, end);
            prop_assert!(covered.others.windows(2).all(|two| two[0].end < two[1].start), "{:?}", covered);
        }
    }

    #[test]
    fn parts_are_bounded() {
        let mut covered = Covered::default();
        assert!((1..=PARTS_MAX as u64).all(|at| covered.add(at * 2, 1)));
        assert!(!covered.add(1 << 40, 1));
        assert!(covered.add(0, 1) && covered.add(1, 1), "what joins another part needs no room");
        assert!(!covered.add(u64::MAX, 1) && !covered.add(0, 1));
        let mut to_the_end = Covered::default();
        assert!(
            to_the_end.add(0, 1)
                && to_the_end.add(1 << 60, 1)
                && to_the_end.add((1 << 60) + 1, u64::MAX - (1 << 60) - 1)
        );
    }
}
