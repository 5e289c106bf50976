//! A request's own bytes, page-aligned: files that are open with O_DIRECT take them as they are.

const ALIGN: usize = 4096;
/// Larger ones are not kept for the next request.
const KEPT_BYTES: usize = 256 << 10;

/// Some bytes, all zero at first.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    room: Vec<u8>,
    /// Where in it the bytes begin, and how many they are.
    at: usize,
    len: usize,
}

impl Buffer {
    /// Makes it `len` zeroes.
    pub(super) fn reset(&mut self, len: usize) {
        if self.room.len() < len + ALIGN {
            // Anew, so that it is zero without being touched.
            self.room = vec![0; len + ALIGN];
            self.at = self.room.as_ptr().align_offset(ALIGN).min(ALIGN);
        } else {
            self.room[self.at..self.at + len].fill(0);
        }
        self.len = len;
    }

    /// Makes it these bytes.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.reset(bytes.len());
        self.copy_from_slice(bytes);
    }

    /// After a request.
    pub(super) fn rest(&mut self) {
        if self.room.len() > KEPT_BYTES + ALIGN {
            *self = Self::default();
        }
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[self.at..self.at + self.len]
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.at..self.at + self.len]
    }
}
