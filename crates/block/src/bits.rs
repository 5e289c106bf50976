//! A bitmap with one bit for each block of a disk. Any thread may set and clear bits.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Number of bits in a word.
const WORD: u64 = u64::BITS as u64;

/// One bit for each block of a disk. The last block may be shorter.
pub struct Bits {
    words: Box<[AtomicU64]>,
    /// log2 of the block size in bytes.
    shift: u32,
    /// Size of the disk, bytes.
    size: u64,
}

impl Bits {
    /// Creates a bitmap of zeroes for a disk of `size` bytes, in blocks of `1 << shift` bytes.
    /// `None` if there is no memory.
    pub fn new(size: u64, shift: u32) -> Option<Self> {
        let count = usize::try_from(size.div_ceil(1 << shift).div_ceil(WORD)).ok()?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).ok()?;
        words.resize_with(count, AtomicU64::default);
        Some(Self { words: words.into(), shift, size })
    }

    /// Creates a bitmap from the bytes of an image's bitmap: bit 0 of byte 0 is the first block.
    /// `None` if there is no memory.
    pub fn from_bytes(size: u64, shift: u32, bytes: &[u8]) -> Option<Self> {
        let bits = Self::new(size, shift)?;
        for (word, bytes) in bits.words.iter().zip(bytes.chunks(8)) {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(all), Relaxed);
        }
        Some(bits)
    }

    /// Returns the bytes for an image's bitmap; see [`from_bytes`](Self::from_bytes).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(self.all().end.div_ceil(8) as usize);
        bytes
    }

    /// Returns the block size, bytes; a power of two.
    pub fn granularity(&self) -> u64 {
        1 << self.shift
    }

    /// Returns the size of the disk, bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the blocks of the disk that a range of bytes touches.
    pub fn blocks(&self, bytes: Range<u64>) -> Range<u64> {
        let end = bytes.end.min(self.size);
        let last = end.div_ceil(1 << self.shift);
        if bytes.start < end { (bytes.start >> self.shift)..last } else { last..last }
    }

    /// Returns the range of bytes of a range of blocks.
    pub fn bytes(&self, blocks: Range<u64>) -> Range<u64> {
        (blocks.start << self.shift)..(blocks.end << self.shift).min(self.size)
    }

    /// Returns the words of a range of blocks, each with a mask of the bits in the range.
    fn masks(&self, blocks: Range<u64>) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let (mut at, end) = (blocks.start, blocks.end);
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let (word, low) = (at / WORD, at % WORD);
                let n = (WORD - low).min(end - at);
                at += n;
                (&self.words[word as usize], (u64::MAX >> (WORD - n)) << low)
            })
        })
    }

    /// Sets the bits of a range of blocks. A word whose bits are set already is not written.
    #[inline]
    pub fn set(&self, blocks: Range<u64>) {
        for (word, mask) in self.masks(blocks) {
            if word.load(Relaxed) & mask != mask {
                word.fetch_or(mask, AcqRel);
            }
        }
    }

    /// Clears the bits of a range of blocks.
    pub fn clear(&self, blocks: Range<u64>) {
        for (word, mask) in self.masks(blocks) {
            word.fetch_and(!mask, AcqRel);
        }
    }

    /// Returns whether a bit of a range of blocks is set.
    #[inline]
    pub fn any(&self, blocks: Range<u64>) -> bool {
        self.masks(blocks).any(|(word, mask)| word.load(Acquire) & mask != 0)
    }

    /// Returns the first block of a range whose bit is set.
    pub fn first(&self, blocks: Range<u64>) -> Option<u64> {
        let begin = blocks.start;
        let mut base = begin / WORD * WORD;
        for (word, mask) in self.masks(blocks) {
            let set = word.load(Acquire) & mask;
            if set != 0 {
                return Some(base + u64::from(set.trailing_zeros()));
            }
            base += WORD;
        }
        None
    }

    /// Returns the first run of set bits in a range of blocks, at most `most` blocks long.
    pub fn run(&self, blocks: Range<u64>, most: u64) -> Option<Range<u64>> {
        let first = self.first(blocks.clone())?;
        let limit = blocks.end.min(first + most);
        let mut base = (first + 1) / WORD * WORD;
        for (word, mask) in self.masks(first + 1..limit) {
            let clear = !word.load(Acquire) & mask;
            if clear != 0 {
                return Some(first..base + u64::from(clear.trailing_zeros()));
            }
            base += WORD;
        }
        Some(first..limit)
    }

    /// Returns the run of set bits at the start of a range of blocks.
    pub fn run_from(&self, blocks: Range<u64>) -> Option<Range<u64>> {
        let next = blocks.start..blocks.end.min(blocks.start + 1);
        self.any(next).then(|| self.run(blocks.clone(), blocks.end - blocks.start)).flatten()
    }

    /// Returns the number of bits that are set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.load(Relaxed).count_ones())).sum()
    }

    /// Returns the range of all blocks.
    pub fn all(&self) -> Range<u64> {
        self.blocks(0..self.size)
    }

    /// Sets the bit of each block that overlaps a block set in `other`. The granularities may
    /// differ.
    pub fn add(&self, other: &Self) {
        let mut at = 0;
        while let Some(run) = other.run(at..other.all().end, WORD * WORD) {
            at = run.end;
            self.set(self.blocks(other.bytes(run)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_across_words() {
        let bits = Bits::new(1000 * 512 - 100, 9).unwrap();
        assert_eq!((bits.all(), bits.granularity()), (0..1000, 512));
        bits.set(60..200);
        assert_eq!(bits.count(), 140);
        assert!(bits.any(0..61) && !bits.any(0..60) && !bits.any(200..1000));
        assert_eq!((bits.first(0..1000), bits.first(200..1000)), (Some(60), None));
        assert_eq!(bits.run(0..1000, 1000), Some(60..200));
        assert_eq!(bits.run(100..1000, 10), Some(100..110));
        bits.clear(64..128);
        assert_eq!(bits.run(0..1000, 1000), Some(60..64));
        assert_eq!(bits.run(64..1000, 1000), Some(128..200));
        // The disk's end.
        assert_eq!(bits.blocks(511..513), 0..2);
        assert_eq!(bits.blocks(u64::MAX - 1..u64::MAX), 1000..1000);
        assert_eq!(bits.bytes(999..1000), 999 * 512..1000 * 512 - 100);
    }

    #[test]
    fn bytes_and_back() {
        let bits = Bits::new(77 * 512, 9).unwrap();
        bits.set(3..20);
        bits.set(70..77);
        let bytes = bits.to_bytes();
        assert_eq!(bytes, [0xf8, 0xff, 0x0f, 0, 0, 0, 0, 0, 0xc0, 0x1f]);
        assert_eq!(Bits::from_bytes(77 * 512, 9, &bytes).unwrap().to_bytes(), bytes);
    }

    #[test]
    fn one_is_added_to_another_of_any_granularity() {
        let (fine, coarse) = (Bits::new(1 << 20, 9).unwrap(), Bits::new(1 << 20, 16).unwrap());
        fine.set(127..129);
        coarse.add(&fine);
        assert_eq!(coarse.run(0..16, 16), Some(0..2));
        fine.clear(fine.all());
        fine.add(&coarse);
        assert_eq!(fine.run(0..2048, 2048), Some(0..256));
    }
}
