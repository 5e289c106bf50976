//! The region in which requests in flight are noted, which the front end keeps while no daemon runs.
//!
//! It is as large as the front end says, so it is bounded here by what its queues need: a reset may write all of it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Error, Result};
use virtio::inflight::inflight_queue_size;
use virtio::mem;
use virtio::ring::MAX_QUEUE_SIZE;

use super::super::convert::to_usize;
use super::super::memory::{Mapping, Notes, shared_file};
use super::{Session, refuse};

/// Up to what multiple an in-flight region may be rounded up, bytes.
const INFLIGHT_ROUND_BYTES: u64 = 4096;

/// The region in which requests in flight are noted, one part a queue.
pub(super) struct InflightArea {
    pub(super) map: Arc<Mapping>,
    /// What it lies in, and where.
    file: File,
    offset: u64,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

impl InflightArea {
    /// Whether a device initialised it before: the version that follows the 64 bits of features is not 0 then.
    pub(super) fn was_used(&self) -> bool {
        // By a call: to look at a page of the mapping that the file does not have would make one.
        let (at, mut version) = (size_of::<u64>(), [0; 2]);
        at + 2 <= self.map.len()
            && self.file.read_exact_at(&mut version, self.offset + at as u64).is_ok()
            && version != [0; 2]
    }

    /// Forgets all that the region says. Only while no ring runs: nothing is in flight then, and where packed rings
    /// stood is not to outlive a reset.
    ///
    /// Pages that the file does not have are left out. They read as zeroes; to write them would charge them to the daemon,
    /// once for each part of a large file that a front end names as its region.
    pub(super) fn clear(&self) {
        let mut from = 0;
        while let Some(data) = self.next_data(from) {
            let len = data.end - data.start;
            // SAFETY: inside of the mapping; rings, which alone use it, are gone.
            unsafe { mem::fill(self.map.at(data.start), 0, len) };
            from = data.end;
        }
    }

    /// The next part of the region, at `from` or behind it, that the file has pages of; all of the rest where the file cannot
    /// tell.
    fn next_data(&self, from: usize) -> Option<Range<usize>> {
        if from >= self.map.len() {
            return None;
        }
        let (at, end) = (self.offset + from as u64, self.offset + self.map.len() as u64);
        let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) if data < end => data.max(at),
            Ok(_) | Err(Errno::NXIO) => return None,
            Err(_) => return Some(from..self.map.len()),
        };
        let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data)).unwrap_or(end).min(end);
        // A front end that punches holes meanwhile may have made this one empty.
        let within = |pos: u64| to_usize(pos - self.offset);
        Some(within(data)..within(hole.max(data + 1)))
    }
}

impl Session {
    /// Bytes of an in-flight region for so many queues, whatever the layout, with room for a device's notes.
    ///
    /// # Errors
    /// There cannot be such queues.
    fn inflight_bytes(&self, queues: u16, size: u16) -> Result<u64> {
        if queues == 0 || usize::from(queues) > self.vrings.len() || size == 0 || size > MAX_QUEUE_SIZE {
            return Err(refuse(format!("there is no in-flight region for {queues} queues of {size}")));
        }
        let one = inflight_queue_size(size, false).max(inflight_queue_size(size, true));
        Ok((one * usize::from(queues) + size_of::<u64>() + Notes::BYTES) as u64)
    }

    /// GET_INFLIGHT_FD: makes a region for the front end to keep, and uses it.
    pub(super) fn make_inflight(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.inflight_bytes(asked.num_queues, asked.queue_size)?;
        let mut len = inflight_queue_size(asked.queue_size, self.packed()) * usize::from(asked.num_queues);
        if self.device.network().is_some_and(|network| network.takes_notes()) {
            len = len.next_multiple_of(size_of::<u64>()) + Notes::BYTES;
        }
        let file = shared_file("vshunt-inflight", len as u64).map_err(Error::ReqHandlerError)?;
        let reply = VhostUserInflight::new(len as u64, 0, asked.num_queues, asked.queue_size);
        self.take_inflight(&reply, &file)?;
        Ok((reply, file))
    }

    /// SET_INFLIGHT_FD: uses a region that the front end kept.
    ///
    /// # Errors
    /// It is larger than its queues need, cannot be mapped, or its guest cannot continue.
    pub(super) fn take_inflight(&mut self, area: &VhostUserInflight, file: &File) -> Result<()> {
        if self.vrings.iter().any(|v| v.running) {
            return Err(refuse("the in-flight region changes while rings run"));
        }
        let need = self.inflight_bytes(area.num_queues, area.queue_size)?;
        // Other back-ends round differently, but not by more than a page.
        let most = need.next_multiple_of(INFLIGHT_ROUND_BYTES);
        if area.mmap_size > most {
            return Err(refuse(format!(
                "the in-flight region has {} bytes, and {} queues of {} need {most} at most",
                area.mmap_size, area.num_queues, area.queue_size
            )));
        }
        let map = Mapping::new(&self.budget, file, area.mmap_offset, area.mmap_size);
        let map = map.map_err(Error::ReqHandlerError)?;
        let parts = usize::from(area.num_queues) * inflight_queue_size(area.queue_size, self.packed());
        let network = self.device.network();
        let notes = network.filter(|network| network.takes_notes()).and_then(|_| Notes::new(&map, parts));
        self.inflight = Some(InflightArea {
            map,
            file: file.try_clone().map_err(Error::ReqHandlerError)?,
            offset: area.mmap_offset,
            queues: area.num_queues,
            queue_size: area.queue_size,
        });
        if let Some(network) = self.device.network() {
            network.set_notes(notes);
        }
        self.cut_off = None;
        if self.inflight.as_ref().is_some_and(InflightArea::was_used)
            && let Err(why) = self.device.resumed()
        {
            tracing::error!("{}: the guest cannot go on where it was: {why}", self.name);
            self.cut_off = Some(why.clone());
            return Err(refuse(why));
        }
        Ok(())
    }
}
