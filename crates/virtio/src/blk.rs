//! virtio-blk formats (Virtio 1.3, 5.2): feature bits, request types, status codes, the
//! configuration space, and the parsing of a request's header and status byte.
//!
//! The block queue calls it for each request. A driver may split header and data at any position
//! (2.7.4, 5.2.6.2), so nothing here assumes that a buffer starts or ends with a field.

use crate::bits::{low_u32, words};
use crate::mem;
use crate::raw;
use crate::ring::{Chain, Seg};
use alloc::vec::Vec;

/// The largest size of a segment is in `size_max`.
pub const VIRTIO_BLK_F_SIZE_MAX: u32 = 1;
/// The largest number of segments is in `seg_max`.
pub const VIRTIO_BLK_F_SEG_MAX: u32 = 2;
/// There is a geometry.
pub const VIRTIO_BLK_F_GEOMETRY: u32 = 4;
/// The disk is read-only.
pub const VIRTIO_BLK_F_RO: u32 = 5;
/// The block size is in `blk_size`.
pub const VIRTIO_BLK_F_BLK_SIZE: u32 = 6;
/// [`VIRTIO_BLK_T_FLUSH`] is supported.
pub const VIRTIO_BLK_F_FLUSH: u32 = 9;
/// There is a topology.
pub const VIRTIO_BLK_F_TOPOLOGY: u32 = 10;
/// The driver can switch the cache between write-back and write-through.
pub const VIRTIO_BLK_F_CONFIG_WCE: u32 = 11;
/// There are `num_queues` queues.
pub const VIRTIO_BLK_F_MQ: u32 = 12;
/// [`VIRTIO_BLK_T_DISCARD`] is supported.
pub const VIRTIO_BLK_F_DISCARD: u32 = 13;
/// [`VIRTIO_BLK_T_WRITE_ZEROES`] is supported.
pub const VIRTIO_BLK_F_WRITE_ZEROES: u32 = 14;
/// [`VIRTIO_BLK_T_GET_LIFETIME`] is supported.
pub const VIRTIO_BLK_F_LIFETIME: u32 = 15;
/// [`VIRTIO_BLK_T_SECURE_ERASE`] is supported.
pub const VIRTIO_BLK_F_SECURE_ERASE: u32 = 16;
/// The device is zoned.
pub const VIRTIO_BLK_F_ZONED: u32 = 17;

/// Read.
pub const VIRTIO_BLK_T_IN: u32 = 0;
/// Write.
pub const VIRTIO_BLK_T_OUT: u32 = 1;
/// Make written data stable.
pub const VIRTIO_BLK_T_FLUSH: u32 = 4;
/// Read the device's id string.
pub const VIRTIO_BLK_T_GET_ID: u32 = 8;
/// Read the device's wear.
pub const VIRTIO_BLK_T_GET_LIFETIME: u32 = 10;
/// Discard sectors.
pub const VIRTIO_BLK_T_DISCARD: u32 = 11;
/// Write zeroes.
pub const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;
/// Erase sectors irrecoverably.
pub const VIRTIO_BLK_T_SECURE_ERASE: u32 = 14;

/// The request was carried out.
pub const VIRTIO_BLK_S_OK: u8 = 0;
/// The device or the driver caused an error.
pub const VIRTIO_BLK_S_IOERR: u8 = 1;
/// The request's type is not supported.
pub const VIRTIO_BLK_S_UNSUPP: u8 = 2;

/// Flag of a [`Range`]: sectors may be deallocated.
pub const VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP: u32 = 1;

/// Bytes of a request's header.
pub const BLK_HDR_LEN: usize = 16;
/// Bytes of the string that [`VIRTIO_BLK_T_GET_ID`] reads, padded with zeroes.
pub const BLK_ID_LEN: usize = 20;
/// Bytes of one [`Range`].
pub const BLK_RANGE_LEN: usize = 16;
/// Bytes of a sector, the unit of `sector` and `capacity` whatever `blk_size` is.
pub const SECTOR_SIZE: u64 = 512;

/// The device configuration space up to `zoned`, which is not included (5.2.4). Numbers have the
/// host's byte order here, and are little-endian in [`as_bytes`](Self::as_bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// Size in sectors of 512 bytes.
    pub capacity: u64,
    /// Largest segment in bytes.
    pub size_max: u32,
    /// Most segments in a request.
    pub seg_max: u32,
    /// Geometry: cylinders.
    pub cylinders: u16,
    /// Geometry: heads.
    pub heads: u8,
    /// Geometry: sectors for each track.
    pub sectors: u8,
    /// Block size in bytes.
    pub blk_size: u32,
    /// Topology: logical blocks in a physical one, as a power of two.
    pub physical_block_exp: u8,
    /// Topology: the logical block where the first physical one starts.
    pub alignment_offset: u8,
    /// Topology: smallest good I/O size in logical blocks.
    pub min_io_size: u16,
    /// Topology: best I/O size in logical blocks.
    pub opt_io_size: u32,
    /// 0 write-through, 1 write-back.
    pub writeback: u8,
    /// Not used.
    pub unused0: u8,
    /// Request queues.
    pub num_queues: u16,
    /// Most sectors in a discard range.
    pub max_discard_sectors: u32,
    /// Most ranges in a discard.
    pub max_discard_seg: u32,
    /// Alignment of discard ranges in sectors.
    pub discard_sector_alignment: u32,
    /// Most sectors in a write-zeroes range.
    pub max_write_zeroes_sectors: u32,
    /// Most ranges in a write-zeroes.
    pub max_write_zeroes_seg: u32,
    /// 1 if write-zeroes may deallocate.
    pub write_zeroes_may_unmap: u8,
    /// Not used.
    pub unused1: [u8; 3],
    /// Most sectors in a secure-erase range.
    pub max_secure_erase_sectors: u32,
    /// Most ranges in a secure erase.
    pub max_secure_erase_seg: u32,
    /// Alignment of secure-erase ranges in sectors.
    pub secure_erase_sector_alignment: u32,
}

/// Bytes of [`BlkConfig`].
pub const BLK_CONFIG_LEN: usize = size_of::<BlkConfig>();
/// The offset of `writeback`, the only field that a driver writes.
pub const BLK_CONFIG_WRITEBACK_AT: usize = core::mem::offset_of!(BlkConfig, writeback);
const _: () = assert!(BLK_CONFIG_LEN == 72 && BLK_CONFIG_WRITEBACK_AT == 32);

impl BlkConfig {
    /// Returns the configuration space as the driver reads it.
    pub fn as_bytes(&self) -> [u8; BLK_CONFIG_LEN] {
        let mut bytes = [0; BLK_CONFIG_LEN];
        let mut rest = bytes.iter_mut();
        let mut put = |field: &[u8]| {
            for (&from, to) in field.iter().zip(&mut rest) {
                *to = from;
            }
        };
        put(&self.capacity.to_le_bytes());
        put(&self.size_max.to_le_bytes());
        put(&self.seg_max.to_le_bytes());
        put(&self.cylinders.to_le_bytes());
        put(&[self.heads, self.sectors]);
        put(&self.blk_size.to_le_bytes());
        put(&[self.physical_block_exp, self.alignment_offset]);
        put(&self.min_io_size.to_le_bytes());
        put(&self.opt_io_size.to_le_bytes());
        put(&[self.writeback, self.unused0]);
        put(&self.num_queues.to_le_bytes());
        put(&self.max_discard_sectors.to_le_bytes());
        put(&self.max_discard_seg.to_le_bytes());
        put(&self.discard_sector_alignment.to_le_bytes());
        put(&self.max_write_zeroes_sectors.to_le_bytes());
        put(&self.max_write_zeroes_seg.to_le_bytes());
        put(&[self.write_zeroes_may_unmap]);
        put(&self.unused1);
        put(&self.max_secure_erase_sectors.to_le_bytes());
        put(&self.max_secure_erase_seg.to_le_bytes());
        put(&self.secure_erase_sector_alignment.to_le_bytes());
        bytes
    }
}

/// A request's header (5.2.6, `struct virtio_blk_req`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// `VIRTIO_BLK_T_*`.
    pub kind: u32,
    /// I/O priority, reserved.
    pub ioprio: u32,
    /// First sector.
    pub sector: u64,
}

impl Header {
    /// Parses the header's bytes.
    #[inline]
    pub fn parse(bytes: [u8; BLK_HDR_LEN]) -> Self {
        let [word, sector] = words(bytes);
        Self { kind: low_u32(word), ioprio: low_u32(word >> 32), sector }
    }

    /// Returns the header's bytes.
    #[inline]
    pub fn to_bytes(self) -> [u8; BLK_HDR_LEN] {
        (u128::from(self.kind) | u128::from(self.ioprio) << 32 | u128::from(self.sector) << 64).to_le_bytes()
    }
}

/// One range of a discard, write-zeroes or secure erase (5.2.6, `struct
/// virtio_blk_discard_write_zeroes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub num_sectors: u32,
    /// [`VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`]; the other bits are reserved.
    pub flags: u32,
}

impl Range {
    /// Parses a range's bytes.
    pub fn parse(bytes: [u8; BLK_RANGE_LEN]) -> Self {
        let [sector, word] = words(bytes);
        Self { sector, num_sectors: low_u32(word), flags: low_u32(word >> 32) }
    }
}

/// A request whose header was parsed and whose data segments were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// `VIRTIO_BLK_T_*`, or an unknown type.
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Whether the device writes the data: for reads, ids, and unknown types.
    pub writable: bool,
    /// Bytes of data.
    pub data_len: u64,
    /// The address of the status: the last device-writable byte.
    pub status: *mut u8,
}

// SAFETY: the value is an address without access. Code that writes the status keeps the memory
// table alive, on any thread.
unsafe impl Send for Request {}

/// Why a request cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad request: {reason}")]
pub struct BadRequest {
    /// The address where [`VIRTIO_BLK_S_IOERR`] can be reported, if there is one.
    pub status: Option<*mut u8>,
    /// The reason.
    pub reason: BadReason,
}

// SAFETY: the value is an address without access. Code that writes the status keeps the memory
// table alive, on any thread.
unsafe impl Send for BadRequest {}
// SAFETY: the value is only data.
unsafe impl Sync for BadRequest {}

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReason {
    /// The chain has a fault.
    #[error(transparent)]
    Chain(crate::ring::ChainFault),
    /// There are fewer device-readable bytes than a header has.
    #[error("no room for a header")]
    Header,
    /// There is no device-writable byte.
    #[error("no room for a status")]
    Status,
}

/// Returns whether a request's data is device-readable.
const fn reads_data(kind: u32) -> bool {
    matches!(
        kind,
        VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES | VIRTIO_BLK_T_SECURE_ERASE
    )
}

/// Parses the header of `chain`, finds the status byte, and puts the data's segments into `data`,
/// which is cleared first.
///
/// Allocates nothing once `data` has grown. Buffers of the direction that the request's type does
/// not use are ignored. `chain` must come from [`DeviceRing::pop`](crate::ring::DeviceRing::pop) or
/// a similar method, and the memory table that it was popped with must be alive, because its
/// segments are accessed.
///
/// # Errors
/// The chain has a fault, or no room for a header or status.
#[inline]
pub fn split_request(chain: &Chain, data: &mut Vec<Seg>) -> Result<Request, BadRequest> {
    data.clear();
    let (readable, writable) = chain.segs.split_at(chain.readable.min(chain.segs.len()));
    let status = last_byte(writable);
    if let Some(fault) = chain.fault {
        return Err(BadRequest { status, reason: BadReason::Chain(fault) });
    }
    let Some((header, rest, first)) = take_header(readable) else {
        return Err(BadRequest { status, reason: BadReason::Header });
    };
    let Some(status) = status else {
        return Err(BadRequest { status: None, reason: BadReason::Status });
    };
    let mut data_len = 0u64;
    let mut add = |seg: Seg| {
        if seg.len != 0 {
            data_len += u64::from(seg.len);
            data.push(seg);
        }
    };
    let reads = reads_data(header.kind);
    if reads {
        add(first);
        rest.iter().copied().for_each(add);
    } else {
        // All bytes except the last one. `status` says that there is one.
        let end = writable.iter().rposition(|seg| seg.len != 0).unwrap_or(0);
        for (i, &seg) in writable.iter().enumerate().take(end + 1) {
            add(Seg { len: seg.len - u32::from(i == end), ..seg });
        }
    }
    Ok(Request { kind: header.kind, sector: header.sector, writable: !reads, data_len, status })
}

/// Returns the last byte of some segments.
#[inline]
fn last_byte(segs: &[Seg]) -> Option<*mut u8> {
    let seg = segs.iter().rev().find(|seg| seg.len != 0)?;
    // SAFETY: this is the last of the segment's bytes, all of which the ring checked.
    Some(unsafe { seg.ptr.add(seg.len as usize - 1) })
}

/// Copies the header from several segments. Returns it, the segments after the one where it ends,
/// and the rest of that one.
#[inline]
fn take_header(segs: &[Seg]) -> Option<(Header, &[Seg], Seg)> {
    let (&seg, rest) = segs.split_first()?;
    if seg.len as usize >= BLK_HDR_LEN && seg.ptr.addr().is_multiple_of(8) {
        // SAFETY: the segment has at least sixteen bytes, and its pointer is aligned to 8. The
        // chain has only segments of guest memory, which stays mapped.
        let word = unsafe { raw::get_u64(seg.ptr) };
        // SAFETY: bytes 8 to 15 of the sixteen whose length and alignment were checked.
        let sector = unsafe { raw::get_u64(seg.ptr.wrapping_add(8)) };
        let header = Header { kind: low_u32(word), ioprio: low_u32(word >> 32), sector };
        return Some((header, rest, cut(seg, BLK_HDR_LEN)));
    }
    let mut bytes = [0; BLK_HDR_LEN];
    let mut have = 0;
    let mut segs = segs;
    while let [seg, rest @ ..] = segs {
        let take = (seg.len as usize).min(BLK_HDR_LEN - have);
        let to = bytes.get_mut(have..have + take)?;
        // SAFETY: `take` bytes of the segment, which is guest memory.
        unsafe { mem::read(seg.ptr, to) };
        have += take;
        if have == BLK_HDR_LEN {
            return Some((Header::parse(bytes), rest, cut(*seg, take)));
        }
        segs = rest;
    }
    None
}

/// Returns a segment without its first `count` bytes. It has at least as many.
#[inline]
fn cut(seg: Seg, count: usize) -> Seg {
    // SAFETY: the address is at most one past the segment's end.
    Seg { ptr: unsafe { seg.ptr.add(count) }, len: seg.len - low_u32(count as u64) }
}

#[cfg(test)]
mod tests;
