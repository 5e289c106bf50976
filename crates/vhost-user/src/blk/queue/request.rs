//! How a virtio-blk request is parsed, started and completed (Virtio 1.3, section 5.2.6).

use std::sync::atomic::Ordering::Relaxed;

use virtio::blk::{
    BLK_RANGE_LEN, BadRequest, Range, Request, SECTOR_SIZE, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK,
    VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, split_request,
};
use virtio::mem;
use virtio::ring::{Seg, gather, scatter};
use vshunt_block::{Op, Step};
use vshunt_engine::{Direction, QueueStats, RequestKind, Token, Uring};
use vshunt_types::spec::Cache;

use super::{BlkQueue, OP_IO, REQUEST_BYTES_MAX, RequestSlot};

/// Why a queue breaks that lost track of its slots.
const NO_SLOT: &str = "it has no slot for a request: this is a bug of vshunt";

/// What follows after a request was parsed.
enum Prepared {
    /// The disk carries it out.
    Submit,
    /// It has succeeded, without the disk.
    Done,
}

/// A request as it was read, once: the guest may change its memory at any time, and what the limits
/// count must be what the disk does.
pub(super) struct Parsed {
    request: Result<Request, BadRequest>,
    /// A negative errno if the request is refused.
    work: Result<Work, i32>,
}

/// What a valid request asks for.
#[derive(Clone, Copy)]
enum Work {
    /// To read or write all of its data.
    Transfer,
    /// To discard a range, or to fill it with zeroes.
    Range(Op, Range),
    /// Something else.
    Other,
}

impl BlkQueue {
    /// Reads the request of the current chain.
    #[inline]
    pub(super) fn parse(&mut self) -> Parsed {
        let request = split_request(&self.chain, &mut self.data);
        let work = match &request {
            Ok(request) => self.check(request),
            Err(_) => Err(-libc::EINVAL),
        };
        Parsed { request, work }
    }

    /// Checks a request, whose data is in `data`.
    ///
    /// # Errors
    /// A negative errno if the request is not valid.
    #[inline]
    fn check(&self, request: &Request) -> Result<Work, i32> {
        let size = self.shared.disk.size_bytes();
        match request.kind {
            VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => {
                if request.kind == VIRTIO_BLK_T_OUT && self.shared.readonly {
                    return Err(-libc::EROFS);
                }
                in_bounds(request.sector, request.data_len, size)?;
                if request.data_len > REQUEST_BYTES_MAX {
                    return Err(-libc::EINVAL);
                }
                Ok(Work::Transfer)
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                let (op, range) = parse_range(request, &self.data)?;
                if self.shared.readonly {
                    return Err(-libc::EROFS);
                }
                let most = if op == Op::Discard {
                    self.shared.max_discard_sectors
                } else {
                    self.shared.max_zero_sectors
                };
                if range.num_sectors > most {
                    return Err(-libc::EINVAL);
                }
                in_bounds(range.sector, range_bytes(&range), size)?;
                Ok(Work::Range(op, range))
            }
            VIRTIO_BLK_T_FLUSH | VIRTIO_BLK_T_GET_ID => Ok(Work::Other),
            _ => Err(-libc::EOPNOTSUPP),
        }
    }

    /// Starts the request of the current chain, as [`parse`](Self::parse) read it. Afterwards it is
    /// in flight, or complete and staged.
    #[inline]
    pub(super) fn begin(&mut self, uring: &mut Uring, base: Token, parsed: &Parsed) {
        let Some(index) = self.free.pop() else { unreachable!("the caller checked that a slot is free") };
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return self.break_off(&NO_SLOT) };
        slot.head = self.chain.head;
        slot.taken = self.meter.stamp();
        let request = match &parsed.request {
            Ok(request) => request,
            Err(bad) => {
                slot.kind = RequestKind::Other;
                slot.status = bad.status.unwrap_or(std::ptr::null_mut());
                slot.io.reset(Op::Flush, 0, false);
                return self.finish(index, -libc::EINVAL);
            }
        };
        slot.status = request.status;
        slot.kind = kind_of(request);
        if self.log.is_some() {
            self.remember_writable(index, request.writable);
        }
        match self.prepare(index, request, parsed.work) {
            Ok(Prepared::Submit) => {}
            Ok(Prepared::Done) => return self.finish(index, 0),
            Err(errno) => return self.finish(index, errno),
        }
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return self.break_off(&NO_SLOT) };
        self.taken_bytes += slot.io.request.len;
        let Some(handle) = &self.handle else { unreachable!("a queue is armed before it takes a request") };
        match handle.start(uring, &mut slot.io, base.with(index, OP_IO)) {
            Step::Wait => {}
            Step::Done(result) => self.finish(index, result),
        }
    }

    /// Fills in the [`Io`](vshunt_block::Io) of a slot.
    ///
    /// # Errors
    /// The errno of a request that is refused.
    #[inline]
    fn prepare(&mut self, index: u16, request: &Request, work: Result<Work, i32>) -> Result<Prepared, i32> {
        let Some(RequestSlot { io, .. }) = self.slots.get_mut(usize::from(index)) else {
            return Err(-libc::EINVAL);
        };
        io.reset(Op::Flush, 0, false);
        let shared = &self.shared;
        match work? {
            Work::Transfer => {
                let write = request.kind == VIRTIO_BLK_T_OUT;
                let fua = write && shared.writethrough.load(Relaxed);
                io.reset(
                    if write { Op::Write } else { Op::Read },
                    request.sector.wrapping_mul(SECTOR_SIZE),
                    fua,
                );
                for seg in &self.data {
                    // SAFETY: the segment was translated when the chain was taken. `mem` keeps it
                    // mapped until the queue is at rest. The slot is boxed, and reused only after
                    // the completion of the request.
                    unsafe { io.push(seg.ptr, seg.len as usize) };
                }
                Ok(Prepared::Submit)
            }
            Work::Range(op, range) => {
                let fua = op != Op::Discard && shared.writethrough.load(Relaxed);
                io.reset(op, range.sector * SECTOR_SIZE, fua);
                io.request.len = range_bytes(&range);
                Ok(if range.num_sectors == 0 { Prepared::Done } else { Prepared::Submit })
            }
            Work::Other if request.kind == VIRTIO_BLK_T_GET_ID => {
                io.reset(Op::Read, 0, false);
                // SAFETY: the segments were translated when the chain was taken, and `mem` keeps
                // them mapped.
                io.request.len = unsafe { scatter(&shared.serial, &self.data) } as u64;
                Ok(Prepared::Done)
            }
            Work::Other => {
                if shared.writethrough_until_flush.load(Relaxed) {
                    shared.writethrough_until_flush.store(false, Relaxed);
                    shared.writethrough.store(false, Relaxed);
                }
                let done = shared.disk.cache() == Cache::Unsafe || shared.readonly;
                Ok(if done { Prepared::Done } else { Prepared::Submit })
            }
        }
    }
}

#[inline]
fn kind_of(request: &Request) -> RequestKind {
    match request.kind {
        VIRTIO_BLK_T_IN => RequestKind::Read,
        VIRTIO_BLK_T_OUT => RequestKind::Write,
        VIRTIO_BLK_T_FLUSH => RequestKind::Flush,
        _ => RequestKind::Other,
    }
}

/// Returns what limits look at: the operation, its offset, and its length; for a request that is
/// refused a length of 0. None: requests that are no operation of the disk.
fn charged(request: &Request, work: Result<Work, i32>) -> Option<(Op, u64, u64)> {
    let op = match request.kind {
        VIRTIO_BLK_T_IN => Op::Read,
        VIRTIO_BLK_T_OUT => Op::Write,
        VIRTIO_BLK_T_DISCARD => Op::Discard,
        VIRTIO_BLK_T_WRITE_ZEROES => Op::WriteZeroes { unmap: false },
        VIRTIO_BLK_T_FLUSH => Op::Flush,
        _ => return None,
    };
    match work {
        Ok(Work::Transfer) => Some((op, request.sector.wrapping_mul(SECTOR_SIZE), request.data_len)),
        Ok(Work::Range(op, range)) => Some((op, range.sector * SECTOR_SIZE, range_bytes(&range))),
        Ok(Work::Other) | Err(_) => Some((op, 0, 0)),
    }
}

/// Returns the length of a range.
#[inline]
fn range_bytes(range: &Range) -> u64 {
    u64::from(range.num_sectors) * SECTOR_SIZE
}

/// Checks that `len` bytes from `sector` lie on a disk of `size` bytes, and are whole sectors.
///
/// # Errors
/// `-EINVAL` if not.
#[inline]
fn in_bounds(sector: u64, len: u64, size: u64) -> Result<(), i32> {
    let start = sector.checked_mul(SECTOR_SIZE).ok_or(-libc::EINVAL)?;
    let end = start.checked_add(len).ok_or(-libc::EINVAL)?;
    if end > size || !len.is_multiple_of(SECTOR_SIZE) { Err(-libc::EINVAL) } else { Ok(()) }
}

/// Returns the only range of a DISCARD or WRITE_ZEROES request: the device offers max_*_seg = 1.
///
/// # Errors
/// A negative errno if the request is not valid.
fn parse_range(request: &Request, data: &[Seg]) -> Result<(Op, Range), i32> {
    let mut bytes = [0u8; BLK_RANGE_LEN];
    // More ranges than max_*_seg allows are not supported; QEMU answers the same.
    if request.data_len > BLK_RANGE_LEN as u64 {
        return Err(-libc::EOPNOTSUPP);
    }
    // SAFETY: the segments were translated when the chain was taken, and the queue keeps them
    // mapped.
    let got = unsafe { gather(data, &mut bytes) };
    if request.data_len != BLK_RANGE_LEN as u64 || got != BLK_RANGE_LEN {
        return Err(-libc::EINVAL);
    }
    let range = Range::parse(bytes);
    let flags = range.flags;
    // Virtio 1.3, 5.2.6.2: unknown flags, and unmap in a discard, are answered with UNSUPP.
    let discard = request.kind == VIRTIO_BLK_T_DISCARD;
    if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (discard && flags != 0) {
        return Err(-libc::EOPNOTSUPP);
    }
    let op = if discard {
        Op::Discard
    } else {
        Op::WriteZeroes { unmap: flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 }
    };
    Ok((op, range))
}

impl BlkQueue {
    /// Returns what a request costs: its direction and its bytes. None: limits do not concern it.
    fn cost(&self, parsed: &Parsed) -> Option<(Direction, u64)> {
        let request = parsed.request.as_ref().ok()?;
        let (op, offset, bytes) = charged(request, parsed.work)?;
        // A worker arms the queue before it takes a request.
        self.handle.as_ref()?.cost(op, offset, bytes)
    }

    /// Asks the limits whether a request may begin.
    pub(super) fn may_begin(&mut self, parsed: &Parsed) -> bool {
        match self.cost(parsed) {
            Some((direction, bytes)) => self.limit.ask(direction, bytes),
            None => true,
        }
    }

    /// Charges the limits with a request that begins in any case.
    pub(super) fn charge(&mut self, parsed: &Parsed) {
        if let Some((direction, bytes)) = self.cost(parsed) {
            self.limit.charge(direction, bytes);
        }
    }

    /// Completes the request of slot `index` with `result`, 0 or a negative errno: writes the
    /// status byte, counts the request, and stages its used element. The length of the element is
    /// the number of bytes written to guest memory.
    #[inline]
    pub(super) fn finish(&mut self, index: u16, result: i32) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else { return self.break_off(&NO_SLOT) };
        let stats = &*self.stats;
        let status = match result {
            0.. => VIRTIO_BLK_S_OK,
            r if r == -libc::EOPNOTSUPP => VIRTIO_BLK_S_UNSUPP,
            _ => VIRTIO_BLK_S_IOERR,
        };
        let (head, kind, taken, mut written) = (slot.head, slot.kind, slot.taken, 0);
        if !slot.status.is_null() {
            // SAFETY: the address was translated when the chain was taken, as one byte that the
            // device may write. `mem` keeps it mapped.
            unsafe { mem::write_u8(slot.status, status) };
            written = 1;
        }
        match (slot.io.request.op, status) {
            (Op::Read, VIRTIO_BLK_S_OK) => {
                QueueStats::add(&stats.read_bytes, slot.io.request.len);
                written += u32::try_from(slot.io.request.len).unwrap_or(u32::MAX - 1);
            }
            (Op::Write, VIRTIO_BLK_S_OK) => QueueStats::add(&stats.write_bytes, slot.io.request.len),
            (_, VIRTIO_BLK_S_OK) => {}
            _ => QueueStats::add(&stats.errors, 1),
        }
        if self.log.is_some() {
            self.mark(index);
        }
        self.vring.push(head, written);
        self.staged += 1;
        self.free.push(index);
        self.meter.done(taken, kind);
        self.stats.completed(kind);
    }

    /// Remembers the buffers that a request may write to, while the guest migrates.
    pub(super) fn remember_writable(&mut self, index: u16, writable: bool) {
        let Some(buffers) = self.writable.get_mut(usize::from(index)) else { return };
        buffers.clear();
        if writable {
            buffers.extend_from_slice(&self.data);
        }
    }

    /// Marks all pages that the device may have written for a request as dirty. A request that
    /// failed may have written a part.
    #[cold]
    fn mark(&mut self, index: u16) {
        let Some(log) = &self.log else { return };
        let (index, buffers) = (usize::from(index), self.writable.get_mut(usize::from(index)));
        for seg in buffers.into_iter().flat_map(|buffers| buffers.drain(..)) {
            if let Some(addr) = self.mem.host_to_guest(seg.ptr) {
                log.mark(addr, u64::from(seg.len));
            }
        }
        if let Some(addr) = self.slots.get(index).and_then(|slot| self.mem.host_to_guest(slot.status)) {
            log.mark(addr, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_valid_request_is_charged() {
        let charged = |kind, work| {
            let status = std::ptr::null_mut();
            charged(&Request { kind, sector: 8, writable: false, data_len: 4096, status }, work)
        };
        let range = Range { sector: 8, num_sectors: 1 << 22, flags: 0 };
        let zeroes = Op::WriteZeroes { unmap: true };
        let refused = Err(-libc::EINVAL);
        for (kind, work, wanted) in [
            (VIRTIO_BLK_T_IN, Ok(Work::Transfer), Some((Op::Read, 4096, 4096))),
            (VIRTIO_BLK_T_OUT, Ok(Work::Transfer), Some((Op::Write, 4096, 4096))),
            (VIRTIO_BLK_T_WRITE_ZEROES, Ok(Work::Range(zeroes, range)), Some((zeroes, 4096, 2 << 30))),
            (VIRTIO_BLK_T_DISCARD, Ok(Work::Range(Op::Discard, range)), Some((Op::Discard, 4096, 2 << 30))),
            (VIRTIO_BLK_T_IN, refused, Some((Op::Read, 0, 0))),
            (VIRTIO_BLK_T_OUT, refused, Some((Op::Write, 0, 0))),
            (VIRTIO_BLK_T_DISCARD, refused, Some((Op::Discard, 0, 0))),
            (VIRTIO_BLK_T_FLUSH, Ok(Work::Other), Some((Op::Flush, 0, 0))),
            (VIRTIO_BLK_T_GET_ID, Ok(Work::Other), None),
            (99, Err(-libc::EOPNOTSUPP), None),
        ] {
            assert_eq!(charged(kind, work), wanted, "type {kind}");
        }
    }
}
