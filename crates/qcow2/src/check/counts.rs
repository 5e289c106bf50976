//! The number and kind of the references to each cluster of the file.
//!
//! It takes some 2.5 bytes for each cluster, in pages that are made when a cluster in them is
//! referred to. So a sparse file costs only as much as it uses.

use std::cell::Cell;
use std::collections::HashMap;

use crate::bytes::{low_u16, low_u32, to_usize};
/// The contents of a cluster. A cluster contains things of one kind only, and of most kinds only
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Class {
    Free = 0,
    Header,
    RefTable,
    RefBlock,
    L1,
    Snapshots,
    Bitmaps,
    /// An L2 table. Snapshots share it.
    L2,
    /// Guest data. Snapshots share it, and several compressed clusters share one.
    Data,
}

impl Class {
    const ALL: [Self; 9] = [
        Self::Free,
        Self::Header,
        Self::RefTable,
        Self::RefBlock,
        Self::L1,
        Self::Snapshots,
        Self::Bitmaps,
        Self::L2,
        Self::Data,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Free => "nothing",
            Self::Header => "the header",
            Self::RefTable => "the refcount table",
            Self::RefBlock => "a refcount block",
            Self::L1 => "an L1 table",
            Self::Snapshots => "the snapshot table",
            Self::Bitmaps => "bitmaps",
            Self::L2 => "an L2 table",
            Self::Data => "data",
        }
    }

    fn shared(self) -> bool {
        matches!(self, Self::L2 | Self::Data)
    }
}

/// Clusters of a page.
pub(super) const PAGE: u64 = 64;

/// A cluster's word: the count, whether the file's count is one, the class.
const COUNT: u16 = 0x07ff;
const ONE: u16 = 0x0800;
const CLASS_SHIFT: u32 = 12;

#[derive(Default)]
pub(super) struct Counts {
    index: HashMap<u64, u32>,
    pages: Vec<[u16; to_usize(PAGE)]>,
    /// Counts that do not fit into a word. The word is [`COUNT`] then.
    over: HashMap<u64, u64>,
    /// The page that was used last.
    last: Cell<Option<(u64, u32)>>,
}

impl Counts {
    #[allow(
        clippy::indexing_slicing,
        reason = "pages are never removed, and one has a word for each remainder"
    )]
    fn word(&mut self, cluster: u64) -> &mut u16 {
        let number = cluster / PAGE;
        let page = match self.last.get() {
            Some((n, page)) if n == number => page,
            _ => *self.index.entry(number).or_insert_with(|| {
                self.pages.push([0; to_usize(PAGE)]);
                low_u32(self.pages.len() as u64 - 1)
            }),
        };
        self.last.set(Some((number, page)));
        &mut self.pages[page as usize][(cluster % PAGE) as usize]
    }

    /// Returns the words of a page, if a cluster in it is referred to.
    pub(super) fn page(&self, number: u64) -> Option<&[u16; to_usize(PAGE)]> {
        let page = match self.last.get() {
            Some((n, page)) if n == number => page,
            _ => *self.index.get(&number)?,
        };
        self.last.set(Some((number, page)));
        self.pages.get(page as usize)
    }

    fn peek(&self, cluster: u64) -> u16 {
        self.page(cluster / PAGE).and_then(|page| page.get(to_usize(cluster % PAGE))).map_or(0, |word| *word)
    }

    /// Counts `n` more references to a cluster with contents of `class`.
    ///
    /// # Errors
    /// The cluster has contents of another class, which is returned. Nothing is counted then.
    pub(super) fn add(&mut self, cluster: u64, class: Class, n: u64) -> Result<(), Class> {
        let word = self.word(cluster);
        let there = class_of(*word);
        if there != Class::Free && (there != class || !class.shared()) {
            return Err(there);
        }
        let (low, flags) = (u64::from(*word & COUNT), *word & ONE);
        let sum = low.saturating_add(n);
        let fits = sum < u64::from(COUNT);
        let new = if fits { low_u16(sum) } else { COUNT };
        *word = new | flags | (class as u16) << CLASS_SHIFT;
        if !fits {
            let before = if low == u64::from(COUNT) { 0 } else { low };
            let over = self.over.entry(cluster).or_insert(before);
            *over = over.saturating_add(n);
        }
        Ok(())
    }

    /// Removes all references to a cluster.
    pub(super) fn forget(&mut self, cluster: u64) {
        self.over.remove(&cluster);
        *self.word(cluster) = 0;
    }

    pub(super) fn class(&self, cluster: u64) -> Class {
        class_of(self.peek(cluster))
    }

    pub(super) fn count(&self, cluster: u64) -> u64 {
        match self.peek(cluster) & COUNT {
            COUNT => self.over.get(&cluster).copied().unwrap_or(u64::from(COUNT)),
            n => u64::from(n),
        }
    }

    /// Records whether the file counts the cluster exactly once.
    pub(super) fn set_one(&mut self, cluster: u64, one: bool) {
        let word = self.word(cluster);
        *word = if one { *word | ONE } else { *word & !ONE };
    }

    pub(super) fn is_one(&self, cluster: u64) -> bool {
        self.peek(cluster) & ONE != 0
    }

    /// Returns the numbers of all pages with references, ascending.
    pub(super) fn page_numbers(&self) -> Vec<u64> {
        let mut numbers: Vec<u64> = self.index.keys().copied().collect();
        numbers.sort_unstable();
        numbers
    }
}

fn class_of(word: u16) -> Class {
    Class::ALL.get(usize::from(word >> CLASS_SHIFT)).copied().unwrap_or(Class::Data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_beyond_a_word() {
        let mut c = Counts::default();
        for n in [2000, 46, 1, 1, 5000] {
            c.add(7, Class::Data, n).unwrap();
        }
        c.set_one(7, true);
        c.add(7, Class::Data, u64::MAX).unwrap();
        assert_eq!((c.count(7), c.is_one(7), c.class(7)), (u64::MAX, true, Class::Data));
        c.add(8, Class::Data, 2046).unwrap();
        assert_eq!(c.count(8), 2046);
        c.add(8, Class::Data, 1).unwrap();
        assert_eq!((c.count(8), c.count(9)), (2047, 0));
    }

    #[test]
    fn a_cluster_holds_one_kind() {
        let mut c = Counts::default();
        c.add(1, Class::L2, 2).unwrap();
        assert_eq!(c.add(1, Class::Data, 1), Err(Class::L2));
        c.add(2, Class::L1, 1).unwrap();
        assert_eq!(c.add(2, Class::L1, 1), Err(Class::L1));
        assert_eq!((c.count(1), c.count(2)), (2, 1));
        c.forget(1);
        c.add(1, Class::Data, 1).unwrap();
        assert_eq!(c.page_numbers(), [0]);
    }
}
