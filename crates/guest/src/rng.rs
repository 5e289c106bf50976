//! The random number generators. They have seeds, so that a run can be repeated.

use crate::verify::mix;

/// A generator that takes a few cycles for each number.
#[derive(Clone, Debug)]
pub struct Rng(fastrand::Rng);

impl Rng {
    /// Makes a generator from a seed and the number of the stream.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(fastrand::Rng::with_seed(mix(seed ^ mix(stream + 1))))
    }
}

/// Random numbers as a fuzzer needs them. They are taken from bytes, few bytes for a small number.
/// When the bytes are used up, a seed provides the rest.
#[derive(Clone, Debug)]
pub struct Draws {
    bytes: Vec<u8>,
    at: usize,
    rest: Rng,
}

impl Draws {
    /// Makes a source from the bytes of a corpus. Without bytes it only uses the seed.
    pub fn new(bytes: Vec<u8>, rest: Rng) -> Self {
        Self { bytes, at: 0, rest }
    }

    fn take(&mut self, bytes: usize) -> Option<u64> {
        let taken = self.bytes.get(self.at..self.at + bytes)?;
        self.at += bytes;
        Some(taken.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    /// Returns any number.
    pub fn draw(&mut self) -> u64 {
        self.take(8).unwrap_or_else(|| self.rest.draw())
    }

    /// Returns a number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let bytes = match bound {
            0..=0x100 => 1,
            0x101..=0x1_0000 => 2,
            _ => 8,
        };
        self.take(bytes).unwrap_or_else(|| self.rest.draw()) % bound
    }

    /// Returns true once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns the bytes that are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
}

impl Rng {
    /// Returns any number.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Returns a number below `bound`, which is not 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    /// Returns true once in `n` calls on average.
    #[inline]
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
