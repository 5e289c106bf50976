//! The one source of chance: seeded, so that a run can be repeated.

use crate::verify::mix;

/// Marsaglia's xorshift64: a few cycles a number, good enough to spread offsets.
#[derive(Clone, Debug)]
pub struct XorShift(u64);

impl XorShift {
    /// From a seed and the number of the stream.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream + 1)) | 1)
    }

    /// The next number; never 0.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, which is not 0; even enough where `bound` is small.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Once in `n`.
    #[inline]
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
