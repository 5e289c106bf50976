//! A request's own buffers. They are aligned to pages, for files that are open with O_DIRECT.

const ALIGN: usize = 4096;
/// Larger buffers are not kept for the next request.
const KEPT_BYTES: usize = 256 << 10;

/// A buffer, which is all zero at first.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    room: Vec<u8>,
    /// Start and length of the bytes in it.
    at: usize,
    len: usize,
}

impl Buffer {
    /// Makes the contents `len` zeroes.
    #[expect(
        clippy::indexing_slicing,
        reason = "the room is as long as the length and the alignment together"
    )]
    pub(super) fn reset(&mut self, len: usize) {
        if self.room.len() < len + ALIGN {
            // A new allocation, which is zero without being touched.
            self.room = vec![0; len + ALIGN];
            self.at = self.room.as_ptr().align_offset(ALIGN).min(ALIGN);
        } else {
            self.room[self.at..self.at + len].fill(0);
        }
        self.len = len;
    }

    /// Makes these bytes the contents.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.reset(bytes.len());
        self.copy_from_slice(bytes);
    }

    /// Frees a large buffer after a request.
    pub(super) fn rest(&mut self) {
        if self.room.len() > KEPT_BYTES + ALIGN {
            *self = Self::default();
        }
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    #[expect(clippy::indexing_slicing, reason = "`reset` makes the room for the length and the alignment")]
    fn deref(&self) -> &[u8] {
        &self.room[self.at..self.at + self.len]
    }
}

impl std::ops::DerefMut for Buffer {
    #[expect(clippy::indexing_slicing, reason = "`reset` makes the room for the length and the alignment")]
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.at..self.at + self.len]
    }
}
