//! The control queue of the guest's NIC, which its front end leaves to the back-end.

use std::sync::Arc;

use virtio::net::Command;
use vshunt_guest::driver::{Area, DriverSeg, Memory, Queue, QueueShape};

use crate::guest::{Guest, RING_SIZE};
use crate::{Outcome, text};

/// Where in a slot the answer comes.
const ACK_AT: usize = 64;
const SLOT_BYTES: usize = 128;
/// What no answer is.
const UNANSWERED: u8 = 0xEE;

pub(crate) struct Control {
    pub(crate) queue: Queue,
    area: Area,
}

impl Control {
    pub(crate) fn new(memory: &Arc<Memory>, index: u16, shape: QueueShape) -> Outcome<Self> {
        let queue = Queue::new(memory, index, shape).map_err(text)?;
        let area = memory.alloc(SLOT_BYTES * usize::from(RING_SIZE), 4096).map_err(text)?;
        Ok(Self { queue, area })
    }
}

impl Guest {
    /// Gives the device a command.
    pub(crate) fn command(&mut self, command: Command) -> Outcome {
        let control = self.control.as_mut().ok_or("this guest has no control queue")?;
        let slot = control.queue.take_slot().ok_or("no slot")?;
        let at = usize::from(slot) * SLOT_BYTES;
        let bytes = command.to_bytes();
        control.area.write(at, &bytes);
        control.area.write(at + ACK_AT, &[UNANSWERED]);
        let seg = |from: usize, len: usize, writable| DriverSeg {
            addr: control.area.guest() + (at + from) as u64,
            len: len as u32,
            writable,
        };
        // As Linux has it: class and command, data, answer.
        let segs = [seg(0, 2, false), seg(2, bytes.len() - 2, false), seg(ACK_AT, 1, true)];
        if !control.queue.stage_chain(slot, &segs, control.queue.indirect()) {
            return Err("the control ring is full".to_owned());
        }
        control.queue.publish();
        Ok(())
    }

    /// The answer to the oldest command, once it is there.
    pub(crate) fn answer(&mut self) -> Outcome<Option<u8>> {
        let control = self.control.as_mut().ok_or("this guest has no control queue")?;
        let Some(done) = control.queue.poll().map_err(text)? else { return Ok(None) };
        let mut byte = [0];
        control.area.read(usize::from(done.cookie) * SLOT_BYTES + ACK_AT, &mut byte);
        control.queue.give_slot(done.cookie);
        match (done.len, byte) {
            (1, [byte]) if byte != UNANSWERED => Ok(Some(byte)),
            (len, [byte]) => {
                Err(format!("a command comes back with {len} bytes written and {byte:#x} for an answer"))
            }
        }
    }
}
