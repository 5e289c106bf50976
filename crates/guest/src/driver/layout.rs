//! Splits requests into descriptors at random. A device must accept any position of the header, the
//! data and the status (virtio 1.3, 2.7.4 and 5.2.6.2).
//!
//! The queue of a load thread or a test uses this. It allocates nothing once its vectors have
//! grown.

use virtio::driver::DriverSeg;

use crate::rng::Rng;

/// A contiguous piece of guest memory: address and bytes.
pub type Span = (u64, u32);

/// Splits spans into descriptors at random.
#[derive(Clone, Debug)]
pub struct Shuffle {
    /// The source of all random numbers.
    pub rng: Rng,
    /// Most descriptors of a request, at least 3.
    segs_max: usize,
    segs: Vec<DriverSeg>,
}

impl Shuffle {
    /// Makes requests of at most `segs_max` descriptors, but of at least the three that a request
    /// needs.
    pub fn new(rng: Rng, segs_max: usize) -> Self {
        Self { rng, segs_max: segs_max.max(3), segs: Vec::new() }
    }

    /// Returns descriptors for the readable and then the writable bytes. Adjacent spans may share
    /// one descriptor, and a span of several bytes may become many. No descriptor is empty.
    pub fn cut(&mut self, readable: &[Span], writable: &[Span]) -> &[DriverSeg] {
        self.segs.clear();
        for (spans, writable) in [(readable, false), (writable, true)] {
            let first = self.segs.len();
            for &(addr, len) in spans.iter().filter(|s| s.1 > 0) {
                let join = self.segs.len() > first && self.rng.one_in(2);
                match self.segs.last_mut() {
                    Some(last) if join && last.addr + u64::from(last.len) == addr => last.len += len,
                    _ => self.segs.push(DriverSeg { addr, len, writable }),
                }
            }
        }
        let wanted = self.segs.len() as u64 + self.rng.below(self.segs_max as u64);
        while (self.segs.len() as u64) < wanted.min(self.segs_max as u64) {
            let at = self.rng.below(self.segs.len() as u64) as usize;
            self.split(at);
            // A piece of one byte cannot be split. Such an iteration counts, too, so that the loop
            // ends.
            if self.rng.one_in(8) {
                break;
            }
        }
        &self.segs
    }

    /// Splits the descriptor `at`: anywhere, near its ends, or at a page or sector.
    fn split(&mut self, at: usize) {
        let DriverSeg { addr, len, writable } = self.segs[at];
        if len < 2 {
            return;
        }
        let most = u64::from(len - 1);
        let head = match self.rng.below(4) {
            0 => 1 + self.rng.below(most),
            1 => 1 + self.rng.below(most.min(16)),
            2 => u64::from(len) - 1 - self.rng.below(most.min(16)),
            _ => {
                let grain = if self.rng.one_in(2) { 4096 } else { 512 };
                grain - addr % grain + grain * self.rng.below(8)
            }
        };
        let head = head.clamp(1, most) as u32;
        self.segs[at].len = head;
        let tail = DriverSeg { addr: addr + u64::from(head), len: len - head, writable };
        self.segs.insert(at + 1, tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(segs: &[DriverSeg], writable: bool) -> Vec<u64> {
        let segs = segs.iter().filter(|s| s.writable == writable);
        segs.flat_map(|s| s.addr..s.addr + u64::from(s.len)).collect()
    }

    #[test]
    fn every_byte_is_there_once_and_in_order() {
        let mut shuffle = Shuffle::new(Rng::new(3, 0), 12);
        let (mut joined, mut most) = (0, 0);
        for _ in 0..5000 {
            let (readable, writable) = ([(0x1000, 16), (0x1010, 700)], [(0x5000, 4096), (0x6000, 1)]);
            let segs = shuffle.cut(&readable, &writable).to_vec();
            assert_eq!(bytes(&segs, false), (0x1000..0x1010 + 700).collect::<Vec<_>>());
            assert_eq!(bytes(&segs, true), (0x5000..0x6001).collect::<Vec<_>>());
            assert!(segs.iter().all(|s| s.len > 0) && segs.len() <= 12, "{segs:?}");
            let first_writable = segs.iter().position(|s| s.writable).unwrap();
            assert!(segs[first_writable..].iter().all(|s| s.writable), "{segs:?}");
            joined += usize::from(segs.iter().any(|s| s.addr < 0x1010 && s.addr + u64::from(s.len) > 0x1010));
            most = most.max(segs.len());
        }
        assert!(joined > 500, "header and data share a descriptor often: {joined}");
        assert_eq!(most, 12);
    }

    #[test]
    fn the_least_request_stays_as_it_is() {
        let mut shuffle = Shuffle::new(Rng::new(3, 1), 3);
        for _ in 0..100 {
            let segs = shuffle.cut(&[(0, 16)], &[(0x100, 1)]);
            assert!(matches!(segs.len(), 2 | 3));
        }
    }
}
