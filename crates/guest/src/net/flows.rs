//! Checks that each flow's frames arrive in order, once, completely, and on one queue.
//!
//! All receiving threads share it. A flow should arrive at one of them at a time. Otherwise counts
//! may be wrong by a few, without other effects.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use serde::Serialize;

use super::frame::{FLOWS_MAX, Mark, Wrong};

/// Counts of a receiver.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    /// Frames of this run.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Foreign frames, which every network has.
    pub other: u64,
    /// Numbers that are missing between received ones.
    pub lost: i64,
    /// Frames that arrived after later ones of their flow.
    pub late: u64,
    /// Frames that arrived more than once.
    pub twice: u64,
    /// Frames that arrived on another queue than the previous frame of their flow.
    pub moved: u64,
    /// With --verify: frames that differ from those that were sent.
    pub damaged: u64,
    /// With --verify: frames with a wrong checksum.
    pub wrong_checksums: u64,
    /// Description of the first damaged frame.
    pub first_wrong: Option<String>,
}

impl Tally {
    /// Adds the counts of another receiver.
    pub fn add(&mut self, other: &Self) {
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.other += other.other;
        self.lost += other.lost;
        self.late += other.late;
        self.twice += other.twice;
        self.moved += other.moved;
        self.damaged += other.damaged;
        self.wrong_checksums += other.wrong_checksums;
        self.first_wrong = self.first_wrong.take().or_else(|| other.first_wrong.clone());
    }

    /// Counts a frame that failed its check.
    #[cold]
    pub(super) fn note_wrong(&mut self, mark: Mark, len: usize, queue: u32, wrong: Wrong) {
        let what = match wrong {
            Wrong::Bytes(at) => {
                self.damaged += 1;
                format!("is not as it was sent from byte {at} on")
            }
            Wrong::Checksum => {
                self.wrong_checksums += 1;
                "has a wrong checksum".into()
            }
        };
        self.first_wrong.get_or_insert_with(|| {
            format!("frame {} of flow {}, {len} bytes, on queue {queue}, {what}", mark.number, mark.flow)
        });
    }
}

/// Numbers behind the newest one that are remembered individually.
const WINDOW: u64 = 64;

/// One flow.
#[derive(Default)]
#[repr(align(64))]
struct Flow {
    /// One more than the highest number that arrived. 0: none arrived.
    next: AtomicU64,
    /// Bit n: the number `next - 1 - n` arrived.
    seen: AtomicU64,
    /// The run, and the queue of the last frame.
    home: AtomicU32,
}

/// All flows.
pub struct Flows {
    each: Box<[Flow]>,
}

impl Default for Flows {
    fn default() -> Self {
        Self { each: (0..FLOWS_MAX).map(|_| Flow::default()).collect() }
    }
}

impl Flows {
    /// Records a frame that arrived on `queue`. Numbers before the first frame are not counted as
    /// lost.
    #[inline]
    pub fn note(&self, mark: Mark, queue: u32, tally: &mut Tally) {
        let flow = &self.each[usize::from(mark.flow)];
        let home = u32::from(mark.run) << 16 | queue & 0xFFFF;
        let (next, was) = (flow.next.load(Ordering::Relaxed), flow.home.load(Ordering::Relaxed));
        if next == 0 || was >> 16 != home >> 16 {
            flow.home.store(home, Ordering::Relaxed);
            flow.seen.store(1, Ordering::Relaxed);
            flow.next.store(mark.number + 1, Ordering::Relaxed);
            return;
        }
        if was != home {
            tally.moved += 1;
            flow.home.store(home, Ordering::Relaxed);
        }
        let seen = flow.seen.load(Ordering::Relaxed);
        if mark.number >= next {
            let gap = mark.number - next;
            tally.lost += gap as i64;
            let seen = if gap + 1 >= WINDOW { 0 } else { seen << (gap + 1) };
            flow.seen.store(seen | 1, Ordering::Relaxed);
            flow.next.store(mark.number + 1, Ordering::Relaxed);
            return;
        }
        let back = next - 1 - mark.number;
        if back < WINDOW && seen & 1 << back == 0 {
            flow.seen.store(seen | 1 << back, Ordering::Relaxed);
            tally.late += 1;
            // It was counted as lost, perhaps by another receiver.
            tally.lost -= 1;
        } else {
            tally.twice += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(flows: &Flows, tally: &mut Tally, numbers: &[u64]) {
        for &number in numbers {
            flows.note(Mark { run: 3, flow: 9, number }, 0, tally);
        }
    }

    #[test]
    fn losses_late_ones_and_repeats_are_told_apart() {
        let (flows, mut t) = (Flows::default(), Tally::default());
        note(&flows, &mut t, &[5, 6, 7, 10, 9, 11, 11, 7]);
        assert_eq!((t.lost, t.late, t.twice, t.moved), (1, 1, 2, 0), "8 is lost, 9 late");
        note(&flows, &mut t, &[500, 400]);
        assert_eq!((t.lost, t.twice), (1 + 488, 3), "too old to be known");
        flows.note(Mark { run: 3, flow: 9, number: 501 }, 1, &mut t);
        assert_eq!(t.moved, 1);
        flows.note(Mark { run: 4, flow: 9, number: 0 }, 1, &mut t);
        flows.note(Mark { run: 4, flow: 9, number: 1 }, 1, &mut t);
        assert_eq!((t.lost, t.late, t.twice, t.moved), (489, 1, 3, 1), "another run starts from zero");
    }

    #[test]
    fn tallies_add_up() {
        let mut t = Tally { frames: 2, bytes: 128, ..Tally::default() };
        let mut other = Tally { frames: 1, bytes: 64, lost: 3, ..Tally::default() };
        other.note_wrong(Mark { run: 0, flow: 1, number: 2 }, 64, 1, Wrong::Checksum);
        t.add(&other);
        assert_eq!((t.frames, t.bytes, t.lost, t.wrong_checksums), (3, 192, 3, 1));
        assert!(t.first_wrong.unwrap().contains("frame 2 of flow 1"));
    }
}
