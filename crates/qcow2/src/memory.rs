//! A bounded file in memory, for tests and fuzzing, which can record all operations.

use std::cell::{Cell, RefCell};
use std::io;

use crate::Storage;
use crate::bytes::to_usize;

/// An operation on a [`Memory`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bytes written at an offset.
    Write(u64, Vec<u8>),
    /// A range zeroed.
    Punch(u64, u64),
    /// A new length.
    Length(u64),
    /// Everything before is on stable storage.
    Sync,
}

/// The file.
#[derive(Debug, Default)]
pub struct Memory {
    bytes: RefCell<Vec<u8>>,
    events: RefCell<Vec<Event>>,
    recording: Cell<bool>,
    most: Cell<u64>,
}

impl Memory {
    /// Makes a file with these bytes. It can grow up to `most` bytes; then there is no space.
    pub fn new(bytes: Vec<u8>, most: u64) -> Self {
        Self { bytes: RefCell::new(bytes), most: Cell::new(most), ..Self::default() }
    }

    /// Records all operations from now on.
    pub fn record(&self) {
        self.events.borrow_mut().clear();
        self.recording.set(true);
    }

    /// Returns the operations since [`record`](Self::record).
    pub fn events(&self) -> Vec<Event> {
        self.events.borrow().clone()
    }

    /// Returns the present bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.borrow().clone()
    }

    /// Applies an operation of another file.
    ///
    /// # Errors
    /// No space.
    pub fn apply(&self, event: &Event) -> io::Result<()> {
        match event {
            Event::Write(offset, bytes) => self.write_at(*offset, bytes),
            Event::Punch(offset, len) => self.punch(*offset, *len),
            Event::Length(len) => self.set_len(*len),
            Event::Sync => Ok(()),
        }
    }

    fn note(&self, event: impl FnOnce() -> Event) {
        if self.recording.get() {
            self.events.borrow_mut().push(event());
        }
    }

    fn room(&self, end: Option<u64>) -> io::Result<usize> {
        match end {
            Some(end) if end <= self.most.get() => Ok(to_usize(end)),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

impl Storage for Memory {
    #[expect(clippy::indexing_slicing, reason = "both ends are cut to the length above")]
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes.borrow();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let n = buf.len().min(bytes.len() - from);
        buf[..n].copy_from_slice(&bytes[from..from + n]);
        buf[n..].fill(0);
        Ok(())
    }

    #[expect(clippy::indexing_slicing, reason = "the bytes were made long enough above")]
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let end = self.room(offset.checked_add(buf.len() as u64))?;
        let mut bytes = self.bytes.borrow_mut();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[end - buf.len()..end].copy_from_slice(buf);
        self.note(|| Event::Write(offset, buf.to_vec()));
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.borrow().len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let len = self.room(Some(len))?;
        self.bytes.borrow_mut().resize(len, 0);
        self.note(|| Event::Length(len as u64));
        Ok(())
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = self.room(offset.checked_add(len))?;
        if self.bytes.borrow().len() < end {
            self.set_len(end as u64)?;
        }
        Ok(())
    }

    #[expect(clippy::indexing_slicing, reason = "both ends are cut to the length above")]
    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut bytes = self.bytes.borrow_mut();
        let most = bytes.len() as u64;
        let (from, to) = (to_usize(offset.min(most)), to_usize(offset.saturating_add(len).min(most)));
        bytes[from..to].fill(0);
        self.note(|| Event::Punch(offset, len));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.note(|| Event::Sync);
        Ok(())
    }
}
