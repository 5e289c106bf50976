//! An image for offline work: its header, and tables that are read with every offset checked
//! against the file.

use crate::bytes::{be64, to_usize};
use crate::header::{Header, autoclear, incompatible};
use crate::{Error, Result, Storage};

/// Start and end of the fields that can change. All of them are in the first 512 bytes, which
/// storage writes completely or not at all.
const FIELDS: usize = 24;
const FIELDS_END_V2: usize = 72;
const FIELDS_END_V3: usize = 96;

/// An image that nothing else uses in the meantime.
pub struct Image<'s> {
    pub(crate) file: &'s dyn Storage,
    pub(crate) header: Header,
    /// Length of the file when it was opened.
    pub(crate) len: u64,
}

impl<'s> Image<'s> {
    /// Reads and parses the header.
    ///
    /// # Errors
    /// Those of [`Header::parse`] and of the storage.
    pub fn open(file: &'s dyn Storage) -> Result<Self> {
        let io = Error::io("cannot read the header");
        let len = file.len().map_err(&io)?;
        let mut start = [0; 24];
        file.read_at(0, &mut start).map_err(&io)?;
        let bits = Header::peek_cluster_bits(&start).map_err(Error::of_header)?;
        let mut first = vec![0; to_usize(len.min(1 << bits))];
        file.read_at(0, &mut first).map_err(&io)?;
        let header = Header::parse(&first).map_err(Error::of_header)?;
        Ok(Self { file, header, len })
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns whether `bytes` at `offset` start at a cluster and are in the file. The last cluster
    /// may be incomplete.
    pub(crate) fn holds(&self, offset: u64, bytes: u64) -> bool {
        offset.is_multiple_of(self.header.cluster_size()) && self.reaches(offset, bytes)
    }

    /// Returns whether `bytes` at `offset` end in the file's last cluster or before.
    pub(crate) fn reaches(&self, offset: u64, bytes: u64) -> bool {
        let end = self.len.checked_next_multiple_of(self.header.cluster_size());
        offset.checked_add(bytes).is_some_and(|e| end.is_some_and(|end| e <= end))
    }

    /// Reads `bytes` at `offset`, which is the start of a cluster.
    ///
    /// # Errors
    /// They are not in the file.
    pub(crate) fn read(&self, offset: u64, bytes: u64, what: &'static str) -> Result<Vec<u8>> {
        if offset == 0 || !self.holds(offset, bytes) {
            return Err(Error::corrupt(format!(
                "{what} of {bytes} bytes at {offset:#x}, where the file has none"
            )));
        }
        // At most as much as the file has, whatever the image says.
        let mut buf = vec![0; to_usize(bytes)];
        self.file.read_at(offset, &mut buf).map_err(Error::io(what))?;
        Ok(buf)
    }

    /// Reads a table of 64-bit entries.
    ///
    /// # Errors
    /// It is not in the file.
    pub(crate) fn table(&self, offset: u64, entries: u64, what: &'static str) -> Result<Vec<u64>> {
        if entries == 0 {
            return Ok(Vec::new());
        }
        Ok(words(&self.read(offset, entries * 8, what)?))
    }

    pub(crate) fn write(&self, offset: u64, buf: &[u8], what: &'static str) -> Result<()> {
        self.file.write_at(offset, buf).map_err(Error::io(what))
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync().map_err(Error::io("cannot bring the image to stable storage"))
    }

    pub(crate) fn sync_if(&self, wanted: bool) -> Result<()> {
        if wanted { self.sync() } else { Ok(()) }
    }

    /// Makes `new` the header, in one write. The present header has to be the one on the storage.
    /// Everything that the new one refers to has to be on stable storage.
    ///
    /// # Errors
    /// It does not fit into a cluster; those of the storage.
    pub(crate) fn replace_header(&mut self, mut new: Header) -> Result<()> {
        new.autoclear &= autoclear::KNOWN;
        if new.version >= 3 && !new.has(incompatible::DIRTY) {
            // All changes are in the image. If another program sets the bit again, it does not mean
            // this program's journal.
            new.mark = None;
        }
        let bytes = new.encode()?;
        let old = &self.header;
        let same_names = (
            old.version,
            &old.backing,
            &old.backing_format,
            &old.data_file,
            &old.unknown,
            &old.extra,
            old.bitmaps,
            old.mark,
        ) == (
            new.version,
            &new.backing,
            &new.backing_format,
            &new.data_file,
            &new.unknown,
            &new.extra,
            new.bitmaps,
            new.mark,
        );
        if same_names {
            // Another program may have written another layout. Unchanged bytes are not written.
            let end = if new.version >= 3 { FIELDS_END_V3 } else { FIELDS_END_V2 };
            self.write(FIELDS as u64, bytes.get(FIELDS..end).unwrap_or_default(), "cannot write the header")?;
        } else {
            self.write_names(bytes)?;
        }
        self.sync()?;
        self.header = new;
        Ok(())
    }

    /// Writes from the first byte that changed to the last one.
    fn write_names(&self, mut bytes: Vec<u8>) -> Result<()> {
        let mut there = vec![0; to_usize(self.header.cluster_size())];
        self.file.read_at(0, &mut there).map_err(Error::io("cannot read the header"))?;
        let used = there.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
        bytes.resize(bytes.len().max(used), 0);
        let Some(from) = bytes.iter().zip(&there).position(|(a, b)| a != b) else { return Ok(()) };
        let to = bytes.iter().zip(&there).rposition(|(a, b)| a != b).map_or(from, |at| at + 1);
        self.write(from as u64, bytes.get(from..to).unwrap_or_default(), "cannot write the header")
    }
}

/// Converts bytes to big-endian numbers.
pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|b| be64(b, 0)).collect()
}

/// Converts numbers to big-endian bytes.
pub(crate) fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}
