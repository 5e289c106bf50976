//! The in-flight region, in which requests in flight are recorded. The front end keeps it while no
//! daemon runs.
//!
//! The front end chooses its size. The size is limited here to what the queues need, because a
//! reset may write all of it.

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

use super::super::memory::{Mapping, Notes, shared_file};
use super::{Session, refuse};
use vshunt_types::convert::to_usize;

/// An in-flight region may be rounded up to a multiple of this, bytes.
const INFLIGHT_ROUND_BYTES: u64 = 4096;

/// The in-flight region. Each queue has a part of it.
pub(super) struct InflightArea {
    pub(super) map: Arc<Mapping>,
    /// Its file, and its offset there.
    file: File,
    offset: u64,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

impl InflightArea {
    /// Returns whether a device has initialised it: then the version after the 64 bits of features
    /// is not 0.
    pub(super) fn was_used(&self) -> bool {
        // With a read call: a read through the mapping would allocate a page that the file does not
        // have.
        let (at, mut version) = (size_of::<u64>(), [0; 2]);
        at + 2 <= self.map.len()
            && self.file.read_exact_at(&mut version, self.offset + at as u64).is_ok()
            && version != [0; 2]
    }

    /// Clears the region. Called only while no ring runs. Positions of packed rings must not
    /// survive a reset.
    ///
    /// Holes of the file are not written, since they read as zeroes. Writing them would charge
    /// their pages to the daemon, and a front end could pass many parts of a large file, one after
    /// the other.
    pub(super) fn clear(&self) {
        let mut from = 0;
        while let Some(data) = self.next_data(from) {
            let len = data.end - data.start;
            // SAFETY: the range lies inside the mapping, and no ring runs that would use it.
            unsafe { mem::fill(self.map.at(data.start), 0, len) };
            from = data.end;
        }
    }

    /// Returns the next part of the region, at `from` or after it, that is not a hole of the file.
    /// If the file system does not know holes, that is the whole rest.
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
        // The front end may punch holes at the same time, so the part may be empty by now.
        let within = |pos: u64| to_usize(pos - self.offset);
        Some(within(data)..within(hole.max(data + 1)))
    }
}

impl Session {
    /// Returns the bytes of an in-flight region for `queues` queues of `size` descriptors, for both
    /// ring layouts, with room for notes.
    ///
    /// # Errors
    /// The device has no such queues.
    fn inflight_bytes(&self, queues: u16, size: u16) -> Result<u64> {
        if queues == 0 || usize::from(queues) > self.vrings.len() || size == 0 || size > MAX_QUEUE_SIZE {
            return Err(refuse(format!("there is no in-flight region for {queues} queues of {size}")));
        }
        let one = inflight_queue_size(size, false).max(inflight_queue_size(size, true));
        Ok((one * usize::from(queues) + size_of::<u64>() + Notes::BYTES) as u64)
    }

    /// Handles GET_INFLIGHT_FD: makes a region, uses it, and gives it to the front end.
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

    /// Handles SET_INFLIGHT_FD: uses a region that the front end has kept.
    ///
    /// # Errors
    /// The region is larger than its queues need, it cannot be mapped, or the guest cannot
    /// continue.
    pub(super) fn take_inflight(&mut self, area: &VhostUserInflight, file: &File) -> Result<()> {
        self.stop_all_discarding();
        if self.vrings.iter().any(|v| v.running) {
            return Err(refuse("the in-flight region changes while rings run"));
        }
        let need = self.inflight_bytes(area.num_queues, area.queue_size)?;
        // Other back ends round the size up, by at most a page.
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
