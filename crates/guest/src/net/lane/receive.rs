//! The receiving half of a lane: buffers, frames that fill several of them, checks, and the answers
//! of an echo.

use std::sync::atomic::Ordering;

use super::super::device::{HEADER, Side};
use super::super::frame::{self, HEAD};
use super::Mode;
use super::{Lane, NEEDS_CSUM};
use crate::driver::DriverSeg;
use crate::error::{Result, fail};

/// Most completions that are taken in one step.
const TAKE_MAX: u32 = 256;

/// A frame in `scratch` of which some buffers have not arrived yet.
#[derive(Default)]
pub(super) struct Partial {
    pub(super) got: u16,
    want: u16,
    len: usize,
}

impl Lane<'_> {
    /// Gives every free receive buffer to the device.
    pub(super) fn refill(&mut self) {
        let Side { queue, buffers, each } = &mut self.pair.rx;
        while let Some(slot) = queue.take_slot() {
            let addr = buffers.guest() + (usize::from(slot) * *each) as u64;
            let seg = DriverSeg { addr, len: *each as u32, writable: true };
            if !queue.stage_chain(slot, &[seg], false) {
                queue.give_slot(slot);
                break;
            }
        }
        self.counted.kicks += u64::from(queue.publish());
    }

    /// Takes the received frames.
    pub(super) fn reap_rx(&mut self) -> Result<u32> {
        let mut count = 0;
        while count < TAKE_MAX
            && let Some(done) = self.pair.rx.queue.poll()?
        {
            count += 1;
            self.take(done.cookie, done.len as usize)?;
            self.pair.rx.queue.give_slot(done.cookie);
            if count.is_multiple_of(self.plan.batch.into()) {
                self.refill();
                self.counted.kicks += u64::from(self.pair.tx.queue.publish());
            }
        }
        if count > 0 {
            self.refill();
            self.counted.kicks += u64::from(self.pair.tx.queue.publish());
            self.gauges[0].done.store(self.counted.received.frames, Ordering::Relaxed);
            self.gauges[0].bytes.store(self.counted.received.bytes, Ordering::Relaxed);
        }
        Ok(count)
    }

    /// Takes a receive buffer with `len` bytes.
    #[inline]
    fn take(&mut self, slot: u16, len: usize) -> Result<()> {
        let rx = &self.pair.rx;
        let (at, first) = (rx.at(slot), self.partial.got == 0);
        if len > rx.each || first && len < HEADER {
            return Err(fail!(
                Io,
                "queue {}: the server says that it wrote {len} bytes into a buffer of {}, with a header of {HEADER}",
                rx.queue.parts().index,
                rx.each
            ));
        }
        if first {
            let mut count = [1, 0];
            if self.merge {
                rx.buffers.read(at + 10, &mut count);
            }
            self.partial = Partial { got: 0, want: u16::from_le_bytes(count), len: 0 };
            if self.partial.want == 0 || self.partial.want > self.plan.queue_size {
                return Err(fail!(
                    Io,
                    "queue {}: a frame is said to fill {} buffers of {}",
                    rx.queue.parts().index,
                    self.partial.want,
                    self.plan.queue_size
                ));
            }
        }
        self.partial.got += 1;
        // A receiver that only counts needs the start of the frame.
        let whole = self.plan.verify || self.plan.mode == Mode::Echo;
        let needed = if whole { len } else { len.min((HEADER + HEAD).saturating_sub(self.partial.len)) };
        let end = self.partial.len + needed;
        if end > self.scratch.len() {
            return Err(fail!(Io, "queue {}: a frame of over {end} bytes", rx.queue.parts().index));
        }
        rx.buffers.read(at, &mut self.scratch[self.partial.len..end]);
        self.partial.len += len;
        if self.partial.got == self.partial.want {
            let len = std::mem::take(&mut self.partial).len;
            self.received(len)?;
        }
        Ok(())
    }

    /// Handles a complete frame of `len` bytes with its header. `scratch` has the bytes that are
    /// needed.
    #[inline]
    fn received(&mut self, len: usize) -> Result<()> {
        let kept = len.min(self.scratch.len());
        let Some(mark) = frame::read_mark(&self.scratch[HEADER..kept.max(HEADER)]) else {
            self.counted.received.other += 1;
            return Ok(());
        };
        let tally = &mut self.counted.received;
        tally.frames += 1;
        tally.bytes += (len - HEADER) as u64;
        self.flows.note(mark, self.index, tally);
        if self.plan.verify {
            let partial = self.scratch[0] & NEEDS_CSUM != 0;
            if let Err(wrong) = frame::check(&self.scratch[HEADER..len], mark, partial) {
                tally.note_wrong(mark, len - HEADER, self.index, wrong);
            }
        }
        if self.plan.mode == Mode::Echo && !self.stopped {
            self.send_back(len)?;
        }
        Ok(())
    }

    /// Stages the frame in `scratch` with its ends exchanged.
    fn send_back(&mut self, len: usize) -> Result<()> {
        if self.pair.tx.queue.free_slots() == 0 {
            // Staged frames have to be published before any can complete.
            self.counted.kicks += u64::from(self.pair.tx.queue.publish());
            self.reap_tx()?;
        }
        let tx = &mut self.pair.tx;
        let slot = if len <= tx.each { tx.queue.take_slot() } else { None };
        let Some(slot) = slot else {
            self.counted.no_room += 1;
            return Ok(());
        };
        frame::send_back(&mut self.scratch[HEADER..len]);
        let mut header = [0; HEADER];
        if self.csum && self.scratch[0] & NEEDS_CSUM != 0 {
            // The device may complete what is still to be done. The number of buffers is not used
            // when sending.
            header[..10].copy_from_slice(&self.scratch[..10]);
            header[0] &= NEEDS_CSUM;
        }
        let at = tx.at(slot);
        tx.buffers.write(at, &header);
        tx.buffers.write(at + HEADER, &self.scratch[HEADER..len]);
        if !self.stage(slot, len) {
            self.counted.no_room += 1;
        }
        Ok(())
    }
}
