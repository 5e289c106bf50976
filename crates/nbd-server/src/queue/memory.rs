//! Memory for the data of requests, with a bound for each connection.

use vshunt_block::AlignedBuf;

use crate::shared::PAYLOAD_BYTES_MAX;

/// Most bytes of buffers in use: those of one request of the longest kind.
const HELD_BYTES_MAX: usize = PAYLOAD_BYTES_MAX as usize;
/// Most bytes of buffers that are kept for later requests: as many as make up for the cost of
/// fresh pages at the usual lengths.
const KEPT_BYTES_MAX: usize = 4 << 20;
/// Bytes of the shortest buffer.
const BUFFER_BYTES_MIN: usize = 4096;

/// The buffers of a connection.
#[derive(Default)]
pub(super) struct Memory {
    kept: Vec<AlignedBuf>,
    kept_bytes: usize,
    held_bytes: usize,
}

/// Why there is no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// Requests have to be answered first.
    Wait,
    /// The system has none.
    NoMemory,
}

impl Memory {
    /// Returns a buffer of at least `len` bytes, which is 1 to [`PAYLOAD_BYTES_MAX`].
    ///
    /// # Errors
    /// There is none now.
    pub(super) fn take(&mut self, len: usize) -> Result<AlignedBuf, Lack> {
        let size = len.max(BUFFER_BYTES_MIN).next_power_of_two();
        if self.held_bytes > 0 && self.held_bytes + size > HELD_BYTES_MAX {
            return Err(Lack::Wait);
        }
        let fits = |buf: &AlignedBuf| buf.len() == size;
        let buf = match self.kept.iter().rposition(fits) {
            Some(at) => {
                self.kept_bytes -= size;
                self.kept.swap_remove(at)
            }
            None => match AlignedBuf::new(size) {
                Some(buf) => buf,
                None if self.held_bytes > 0 => return Err(Lack::Wait),
                None => return Err(Lack::NoMemory),
            },
        };
        self.held_bytes += size;
        Ok(buf)
    }

    /// Takes a buffer back.
    pub(super) fn give(&mut self, buf: AlignedBuf) {
        self.held_bytes -= buf.len();
        if self.kept_bytes + buf.len() <= KEPT_BYTES_MAX {
            self.kept_bytes += buf.len();
            self.kept.push(buf);
        } else if self.kept_bytes > KEPT_BYTES_MAX / 2 && buf.len() <= KEPT_BYTES_MAX {
            // The lengths have changed: the oldest ones make room.
            let oldest = self.kept.swap_remove(0);
            self.kept_bytes -= oldest.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_holds_so_much_and_no_more() {
        let mut memory = Memory::default();
        let all: Vec<_> = (0..32).map(|_| memory.take(1 << 20).unwrap()).collect();
        assert_eq!(memory.take(1).err(), Some(Lack::Wait));
        all.into_iter().for_each(|buf| memory.give(buf));
        assert_eq!((memory.held_bytes, memory.kept_bytes), (0, KEPT_BYTES_MAX));
        let longest = memory.take(HELD_BYTES_MAX).unwrap();
        assert_eq!(longest.len(), HELD_BYTES_MAX);
        assert_eq!(memory.take(512).err(), Some(Lack::Wait));
        memory.give(longest);
        assert_eq!(memory.held_bytes, 0);
        for _ in 0..100 {
            let buf = memory.take(4096).unwrap();
            memory.give(buf);
        }
        assert!(memory.kept_bytes <= KEPT_BYTES_MAX);
    }
}
