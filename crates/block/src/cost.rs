//! What a request costs against the limits of an export.
//!
//! Queues of all front ends ask before they start a request. What moves no data costs no bytes. The
//! table in docs/guide/limits.md says the same; a test compares the two.

use vshunt_engine::Direction;

use super::Op;

/// Bytes that writing zeroes costs at most: those of the longest request of a guest. NBD and mounts
/// have no such limit of a request.
const ZEROED_BYTES_MAX: u64 = 2 << 30;

/// How a disk makes a range read as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// It frees or marks the range.
    Marks,
    /// It marks whole clusters of this many bytes, a power of two, and writes the parts of clusters
    /// at both ends.
    MarksClusters(u64),
    /// It has to write the zeroes, or it is not known whether a server does.
    Writes,
}

impl Zeroing {
    /// Returns how many bytes of a range of zeroes the storage may have to write, as far as they
    /// are charged.
    fn written_bytes(self, offset: u64, len: u64) -> u64 {
        match self {
            Self::Marks => 0,
            Self::MarksClusters(cluster) => {
                let end = offset.saturating_add(len);
                let first = offset.checked_next_multiple_of(cluster).unwrap_or(u64::MAX);
                len - (end & !(cluster - 1)).saturating_sub(first)
            }
            Self::Writes => len.min(ZEROED_BYTES_MAX),
        }
    }

    /// Returns the most that this is for a range of at most `len` bytes.
    pub(super) fn written_bytes_max(self, len: u64) -> u64 {
        match self {
            Self::Marks => 0,
            Self::MarksClusters(cluster) => len.min(2 * cluster),
            Self::Writes => len.min(ZEROED_BYTES_MAX),
        }
    }
}

/// Returns what a request costs: its direction, as which it is one operation, and its bytes. None:
/// limits do not concern it.
///
/// A request that is refused costs what it would with a length of 0: the length is whatever its
/// sender has written there.
pub fn cost(op: Op, offset: u64, len: u64, zeroing: Zeroing) -> Option<(Direction, u64)> {
    match op {
        Op::Read => Some((Direction::Read, len)),
        Op::Write => Some((Direction::Write, len)),
        Op::WriteZeroes { .. } => Some((Direction::Write, zeroing.written_bytes(offset, len))),
        Op::Discard | Op::Allocate => Some((Direction::Write, 0)),
        // Front ends never ask for the last two: jobs do, which have a speed of their own.
        Op::Flush | Op::Seek { .. } | Op::WriteCompressed | Op::Populate => None,
    }
}

#[cfg(test)]
mod tests {
    use ::qcow2::Look;

    use super::*;

    const GUIDE: &str = include_str!("../../../docs/guide/limits.md");
    const MIB: u64 = 1 << 20;

    /// The text of the guide for what a request costs: one of 1 MiB, and one that is too long for
    /// any disk.
    fn in_words(op: Op, zeroing: Zeroing) -> String {
        const LONG: u64 = 1 << 62;
        let bytes = |len| cost(op, MIB + 512, len, zeroing).map_or(0, |(_, bytes)| bytes);
        let bytes = match (bytes(MIB), bytes(LONG)) {
            (0, 0) => "none",
            (MIB, LONG) => "its length",
            (MIB, 0x8000_0000) => "its length, at most 2 GiB",
            (65536, 65536) => "the parts of clusters at its ends",
            other => panic!("{op:?} costs {other:?} bytes"),
        };
        match cost(op, MIB + 512, MIB, zeroing) {
            None => format!("none | {bytes}"),
            Some((Direction::Read, _)) => format!("one read | {bytes}"),
            Some((Direction::Write, _)) => format!("one write | {bytes}"),
        }
    }

    #[test]
    fn the_guide_says_what_each_request_costs() {
        let zeroes = |unmap| Op::WriteZeroes { unmap };
        let rows = [
            ("| read |", Op::Read, Zeroing::Marks),
            ("| write |", Op::Write, Zeroing::Marks),
            ("| write-zeroes, on a disk that marks them |", zeroes(false), Zeroing::Marks),
            ("| write-zeroes, on a disk that marks them |", zeroes(true), Zeroing::Marks),
            (
                "| write-zeroes, on a disk that marks whole clusters |",
                zeroes(true),
                Zeroing::MarksClusters(65536),
            ),
            ("| write-zeroes, on a disk that writes them |", zeroes(false), Zeroing::Writes),
            ("| write-zeroes, on a disk that writes them |", zeroes(true), Zeroing::Writes),
            ("| discard |", Op::Discard, Zeroing::Writes),
            ("| allocation |", Op::Allocate, Zeroing::Writes),
            ("| flush |", Op::Flush, Zeroing::Writes),
            ("| search for data and holes |", Op::Seek { look: Look::Disk }, Zeroing::Writes),
        ];
        for (name, op, zeroing) in rows {
            let mut lines = GUIDE.lines().filter(|line| line.starts_with(name));
            let (line, words) = (lines.next().unwrap_or_default(), in_words(op, zeroing));
            assert!(
                line.ends_with(&format!(" | {words} |")),
                "{name} costs {words}, and the guide has: {line}"
            );
            assert_eq!(lines.next(), None, "{name} is in the guide twice");
        }
    }

    #[test]
    fn the_parts_of_clusters_at_the_ends_cost_bytes() {
        let written = |offset, len| Zeroing::MarksClusters(65536).written_bytes(offset, len);
        assert_eq!(written(0, 65536), 0);
        assert_eq!(written(512, 65536), 65536);
        assert_eq!(written(512, 1024), 1024);
        assert_eq!(written(65536 - 512, 2 * 65536), 65536);
        assert_eq!(written(65536 - 512, 65536 + 1024), 1024);
        assert_eq!(written(u64::MAX - 511, 511), 511);
    }
}
