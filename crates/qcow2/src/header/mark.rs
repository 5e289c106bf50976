//! The header extension that marks an image which this program has open for writing.

use super::Header;
use crate::bytes::{array, be64};

/// The extension that marks an image as open for writing. It also says what the image may lack if
/// its writer is killed. Only this program knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// What the image may lack.
    pub open: Open,
    /// Whether it is the first extension, where this program writes it. A program that rewrites the
    /// header without knowing the extension moves it behind those that it knows. The image was then
    /// changed by another program, and the mark has no meaning any more.
    pub untouched: bool,
}

/// What an image that was not closed may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// Changes of the map may be in a [journal](crate::journal).
    Journal {
        /// The journal's random number.
        id: [u8; 16],
        /// The generation, which grows with each flush that writes the map. A journal with another
        /// generation belongs to an earlier or a later state of the image.
        generation: u64,
    },
    /// Changes of the map may be in a journal of an earlier version of this program, which had no
    /// generation.
    Older,
    /// There is no journal; reference counts may be wrong.
    Without {
        /// Each completed write was on stable storage: no write is missing.
        stable: bool,
    },
}

/// Bytes of the extension, which distinguish its forms: flags; a number; a number and a generation.
const MARK_FLAGS: usize = 8;
const MARK_OLDER: usize = 16;
const MARK_JOURNAL: usize = 24;

impl Open {
    /// Decodes the extension's data. `None`: this program does not write this form.
    pub(super) fn decode(data: &[u8]) -> Option<Self> {
        match data.len() {
            MARK_FLAGS => Some(Self::Without { stable: be64(data, 0) & 1 != 0 }),
            MARK_OLDER => Some(Self::Older),
            MARK_JOURNAL => {
                let id = array(data, 0)?;
                Some(Self::Journal { id, generation: be64(data, 16) })
            }
            _ => None,
        }
    }

    /// Encodes the extension's data. `None`: this form is no longer written.
    pub(super) fn encode(self) -> Option<Vec<u8>> {
        match self {
            Self::Journal { id, generation } => Some([&id[..], &generation.to_be_bytes()].concat()),
            Self::Without { stable } => Some(u64::from(stable).to_be_bytes().to_vec()),
            Self::Older => None,
        }
    }
}

/// Bytes at an image's start that storage writes completely or not at all.
const SECTOR: usize = 512;

/// Returns the offset of the generation in the first bytes of an image whose first extension is the
/// mark of a journal. A flush changes only the generation, in a write that must not tear. `None`:
/// the mark is not in the first sector, because the header is too long.
pub(crate) fn generation_at(header: &Header) -> Option<usize> {
    let at = header.known_bytes() + 8 + MARK_OLDER;
    (header.version >= 3 && at + 8 <= SECTOR).then_some(at)
}
