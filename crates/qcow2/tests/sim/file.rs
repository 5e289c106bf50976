//! A file in memory that knows which states a crash can leave.

use std::cell::RefCell;
use std::io;

use qcow2::Storage;

/// Unit that reaches the disk completely or not at all.
pub(crate) const SECTOR: usize = 512;

#[derive(Default)]
struct Inner {
    now: Vec<u8>,
    /// The contents that are surely on stable storage.
    synced: Vec<u8>,
    /// Later writes, in order: offset and bytes of sectors.
    pending: Vec<(u64, Vec<u8>)>,
}

/// The file. Reads and writes take effect at once. A crash removes all or some of the writes that
/// were not synced.
#[derive(Default)]
pub(crate) struct File(RefCell<Inner>);

impl File {
    pub(crate) fn of(bytes: Vec<u8>) -> Self {
        Self(RefCell::new(Inner { synced: bytes.clone(), now: bytes, ..Inner::default() }))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.borrow().now.clone()
    }

    pub(crate) fn zero(&self, offset: u64, len: u64) {
        // Beyond the end there is nothing to clear.
        let end = (offset + len).min(self.0.borrow().now.len() as u64);
        if offset < end {
            self.write_at(offset, &vec![0; (end - offset) as usize]).unwrap();
        }
    }

    pub(crate) fn extend(&self, len: u64) {
        let now = &mut self.0.borrow_mut().now;
        now.resize(now.len().max(len as usize), 0);
    }

    /// Returns the contents after a crash at this moment. `keep` decides for each sector that was
    /// written since the last sync whether it reached the disk.
    pub(crate) fn crashed(&self, mut keep: impl FnMut() -> bool) -> Vec<u8> {
        let inner = self.0.borrow();
        let mut bytes = inner.synced.clone();
        for (offset, data) in &inner.pending {
            for (i, sector) in data.chunks(SECTOR).enumerate() {
                if keep() {
                    put(&mut bytes, *offset as usize + i * SECTOR, sector);
                }
            }
        }
        bytes
    }
}

fn put(bytes: &mut Vec<u8>, at: usize, data: &[u8]) {
    if bytes.len() < at + data.len() {
        bytes.resize(at + data.len(), 0);
    }
    bytes[at..at + data.len()].copy_from_slice(data);
}

impl Storage for File {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let inner = self.0.borrow();
        let have = inner.now.get(offset as usize..).unwrap_or_default();
        let n = have.len().min(buf.len());
        buf[..n].copy_from_slice(&have[..n]);
        buf[n..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let mut inner = self.0.borrow_mut();
        put(&mut inner.now, offset as usize, buf);
        inner.pending.push((offset, buf.to_vec()));
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.borrow().now.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.borrow_mut().now.resize(len as usize, 0);
        Ok(())
    }

    fn allocate(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.zero(offset, len);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        for (offset, data) in inner.pending.drain(..) {
            put(&mut inner.synced, offset as usize, &data);
        }
        // A file's length is as stable as its contents.
        let len = inner.synced.len().max(inner.now.len());
        inner.synced.resize(len, 0);
        Ok(())
    }
}
