//! The header extension by which this program marks an image that it has open for writing.

use super::Header;
use crate::bytes::{array, be64};

/// Says that an image is open for writing, in an extension that only this program knows, and what it may lack if its writer
/// is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// What the image may lack.
    pub open: Open,
    /// It is the first extension, where this program writes it. A program that rewrites the header without knowing the
    /// extension moves it behind those that it knows. The image was changed by another program then, and the mark says
    /// nothing about it any more.
    pub untouched: bool,
}

/// What an image that was not closed may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Open {
    /// Changes of the map may be in a [journal](crate::journal).
    Journal {
        /// The journal's number; random.
        id: [u8; 16],
        /// It grows with each flush that writes the map. A journal with another generation belongs to an earlier or a later
        /// state of the image.
        generation: u64,
    },
    /// Changes of the map may be in a journal of an earlier version of this program, which had no generation.
    Older,
    /// There is no journal; reference counts may be wrong.
    Without {
        /// Each completed write was on stable storage: no write is missing.
        stable: bool,
    },
}

/// Bytes of the extension, by which its kinds are told apart: flags, a number, a number and a generation.
const MARK_FLAGS: usize = 8;
const MARK_OLDER: usize = 16;
const MARK_JOURNAL: usize = 24;

impl Open {
    /// What the extension's data says; none: it is not as this program writes it.
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

    /// The extension's data; none for a kind that is not written any more.
    pub(super) fn encode(self) -> Option<Vec<u8>> {
        match self {
            Self::Journal { id, generation } => Some([&id[..], &generation.to_be_bytes()].concat()),
            Self::Without { stable } => Some(u64::from(stable).to_be_bytes().to_vec()),
            Self::Older => None,
        }
    }
}

/// Bytes at an image's start that storage writes whole, or not at all.
const SECTOR: usize = 512;

/// Where the generation lies in the first bytes of an image whose first extension is the mark of a journal; none: the mark does
/// not lie in the first sector, since the image says that its header is that long. A flush changes the generation alone, in a
/// write that must not tear.
pub(crate) fn generation_at(header: &Header) -> Option<usize> {
    let at = header.known_bytes() + 8 + MARK_OLDER;
    (header.version >= 3 && at + 8 <= SECTOR).then_some(at)
}
