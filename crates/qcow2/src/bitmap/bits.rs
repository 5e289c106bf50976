//! The bits of a bitmap.

use crate::bytes::to_usize;
use crate::{Error, Result};

/// Most bytes of the bits of one bitmap (QEMU's limit).
pub(super) const BYTES_MAX: u64 = 512 << 20;

/// One bit for each range of a disk. The last range may be shorter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bits {
    size: u64,
    granularity_bits: u32,
    bytes: Vec<u8>,
}

impl Bits {
    /// Makes the bits for a disk of `size` bytes. None is set.
    ///
    /// # Errors
    /// More than `BYTES_MAX`.
    pub fn new(size: u64, granularity_bits: u32) -> Result<Self> {
        let bytes = size.div_ceil(1 << granularity_bits).div_ceil(8);
        if bytes > BYTES_MAX {
            return Err(Error::unsupported(format!(
                "a bitmap with a bit for each {} bytes of a disk of {size} needs {bytes} bytes; {BYTES_MAX} is the most",
                1u64 << granularity_bits
            )));
        }
        Ok(Self { size, granularity_bits, bytes: vec![0; to_usize(bytes)] })
    }

    /// Returns the number of bits.
    pub fn len(&self) -> u64 {
        self.size.div_ceil(1 << self.granularity_bits)
    }

    /// Returns whether there are no bits: the disk has no bytes.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns log2 of the bytes for each bit.
    pub fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// Returns whether bit number `at` is set.
    pub fn get(&self, at: u64) -> bool {
        self.bytes.get((at / 8) as usize).is_some_and(|b| b >> (at % 8) & 1 != 0)
    }

    /// Sets the bits of `bytes` of the disk at `offset`. Ranges beyond the end have no bits.
    pub fn set_range(&mut self, offset: u64, bytes: u64) {
        let end = offset.saturating_add(bytes).min(self.size);
        if offset >= end {
            return;
        }
        let (first, last) = (offset >> self.granularity_bits, (end - 1) >> self.granularity_bits);
        let (from, to) = ((first / 8) as usize, (last / 8) as usize);
        let head = 0xffu8 << (first % 8);
        let tail = 0xffu8 >> (7 - last % 8);
        match self.bytes.get_mut(from..=to) {
            Some([one]) => *one |= head & tail,
            Some([first, between @ .., last]) => {
                *first |= head;
                between.fill(0xff);
                *last |= tail;
            }
            _ => debug_assert!(false, "a disk has a bit for each of its bytes"),
        }
    }

    /// Returns the bits for another size of the disk. New bits are not set.
    ///
    /// # Errors
    /// More than `BYTES_MAX`.
    pub fn resized(&self, size: u64) -> Result<Self> {
        let mut new = Self::new(size, self.granularity_bits)?;
        new.bytes.iter_mut().zip(&self.bytes).for_each(|(to, from)| *to = *from);
        new.clear_tail();
        Ok(new)
    }

    /// Sets all bits that `other` has set, which may have another granularity.
    ///
    /// # Errors
    /// `other` is for a disk of another size.
    pub fn merge(&mut self, other: &Self) -> Result<()> {
        if self.size != other.size {
            return Err(Error::invalid(format!(
                "bitmaps of disks of {} and of {} bytes cannot be merged",
                self.size, other.size
            )));
        }
        if self.granularity_bits == other.granularity_bits {
            self.bytes.iter_mut().zip(&other.bytes).for_each(|(a, b)| *a |= b);
            return Ok(());
        }
        for (n, byte) in (0..).zip(&other.bytes).filter(|(_, b)| **b != 0) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 != 0) {
                let at: u64 = n * 8 + bit;
                self.set_range(at << other.granularity_bits, 1 << other.granularity_bits);
            }
        }
        Ok(())
    }

    /// Makes the bits from bytes in the format of [`bytes`](Self::bytes).
    ///
    /// # Errors
    /// The disk needs another number of bytes, or there are more than `BYTES_MAX`.
    pub fn of(size: u64, granularity_bits: u32, bytes: Vec<u8>) -> Result<Self> {
        if Self::new(size, granularity_bits)?.bytes.len() != bytes.len() {
            return Err(Error::invalid(format!("{} bytes of bits for a disk of {size}", bytes.len())));
        }
        let mut bits = Self { size, granularity_bits, bytes };
        bits.clear_tail();
        Ok(bits)
    }

    /// Returns the bits as they are stored in the file: bit 0 of the first byte is the first.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Clears the bits behind the last one, which have to be 0.
    pub(super) fn clear_tail(&mut self) {
        let used = self.len() % 8;
        if let (Some(last), 1..) = (self.bytes.last_mut(), used) {
            *last &= 0xff >> (8 - used);
        }
    }
}
