//! The dirty log as a migrating VMM has it, and the check that the device marked every page that it
//! wrote.
//!
//! Each completion shows what the device must have written: the data of reads, the status byte, the
//! used element and the used index. Those pages are recorded when completions are taken, and looked
//! up in the log.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::memory::{Area, Memory, PAGE, RegionSpec};
use crate::error::Result;

/// A page that was written and not marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedPage {
    /// Guest address of the page.
    pub guest_addr: u64,
    /// What the device wrote there.
    pub what: &'static str,
}

/// A dirty log that is shared with the server. It has one bit for each page, lowest bit first.
#[derive(Debug)]
pub struct DirtyLog {
    memory: Arc<Memory>,
    bits: Area,
    /// Pages that the device must have marked since the last [`DirtyLog::clear`].
    expected: BTreeMap<u64, &'static str>,
}

impl DirtyLog {
    /// Makes an empty log that covers all of `guest`.
    pub fn new(guest: &Memory) -> Result<Self> {
        let end = guest.regions().iter().map(|r| r.guest_addr + r.size).max().unwrap_or(0);
        let size = end.div_ceil(PAGE * 8).next_multiple_of(PAGE);
        let memory = Memory::new(&[RegionSpec { guest_addr: 0, size }])?;
        let bits = memory.alloc(size as usize, 1)?;
        Ok(Self { memory, bits, expected: BTreeMap::new() })
    }

    /// Returns its size in bytes and its file.
    pub fn share(&self) -> (u64, BorrowedFd<'_>) {
        let region = &self.memory.regions()[0];
        (region.size, region.fd())
    }

    /// Returns its address in this process.
    pub fn user_addr(&self) -> u64 {
        self.memory.regions()[0].user_addr()
    }

    /// Returns another handle of the same log, with no expected pages. It keeps the mapping.
    pub fn share_memory(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), bits: self.bits.clone(), expected: BTreeMap::new() }
    }

    /// Returns whether the page of this guest address is marked.
    pub fn is_marked(&self, guest_addr: u64) -> bool {
        let page = guest_addr / PAGE;
        let mut byte = [0];
        self.bits.read((page / 8) as usize, &mut byte);
        byte[0] & 1 << (page % 8) != 0
    }

    /// Returns the guest addresses of all marked pages.
    pub fn marked(&self) -> Vec<u64> {
        let bytes = self.bits.to_vec();
        let pages = (0..bytes.len() as u64 * 8).filter(|p| bytes[(p / 8) as usize] & 1 << (p % 8) != 0);
        pages.map(|page| page * PAGE).collect()
    }

    /// Clears the log and the expected pages. Call this only while no request is in flight.
    pub fn clear(&mut self) {
        self.bits.fill(0);
        self.expected.clear();
    }

    /// Records that the device wrote these bytes.
    pub fn expect(&mut self, guest_addr: u64, len: u64, what: &'static str) {
        if len == 0 {
            return;
        }
        for page in guest_addr / PAGE..=(guest_addr + len - 1) / PAGE {
            self.expected.entry(page * PAGE).or_insert(what);
        }
    }

    /// Returns pages that were written and not marked. There are none if the device is correct.
    pub fn missed(&self) -> Vec<MissedPage> {
        let missed = self.expected.iter().filter(|&(&page, _)| !self.is_marked(page));
        missed.map(|(&guest_addr, &what)| MissedPage { guest_addr, what }).collect()
    }
}
