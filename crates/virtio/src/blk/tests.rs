use super::*;
use crate::testing::{Rng, iterations};

/// Cuts `len` bytes at `base` into random segments, some of them empty.
fn cut_up(rng: &mut Rng, base: *mut u8, len: usize) -> Vec<Seg> {
    let mut segs = Vec::new();
    let mut at = 0;
    while at < len {
        let piece = if rng.one_in(5) { 0 } else { (1 + rng.below(24) as usize).min(len - at) };
        segs.push(Seg { ptr: base.wrapping_add(at), len: piece as u32 });
        at += piece;
    }
    segs
}

fn addrs(segs: &[Seg]) -> Vec<usize> {
    segs.iter().flat_map(|s| s.ptr.addr()..s.ptr.addr() + s.len as usize).collect()
}

#[test]
fn requests_split_at_will_come_out_whole() {
    for seed in 0..iterations(4000) {
        let mut rng = Rng::new(seed);
        let kinds = [0, 1, 4, 8, 10, 11, 13, 14, 99];
        let kind = kinds[rng.below(9) as usize];
        let (readable_len, writable_len) = (rng.below(90) as usize, rng.below(60) as usize);
        let mut memory = vec![0u64; 32];
        let base: *mut u8 = memory.as_mut_ptr().cast::<u8>().wrapping_add(rng.below(9) as usize);
        let header = Header { kind, ioprio: rng.next() as u32, sector: rng.next() };
        for (i, byte) in header.to_bytes().into_iter().enumerate() {
            // SAFETY: inside of the vector.
            unsafe { base.add(i).write(byte) };
        }
        let writable_base = base.wrapping_add(128);
        let mut segs = cut_up(&mut rng, base, readable_len);
        let readable = segs.len();
        segs.extend(cut_up(&mut rng, writable_base, writable_len));
        let mut chain = Chain { segs, readable, ..Chain::new() };
        let mut data = vec![Seg { ptr: base, len: 7 }];
        let status = (writable_len > 0).then(|| writable_base.wrapping_add(writable_len - 1));
        let result = split_request(&chain, &mut data);
        let bad = |reason| Err(BadRequest { status, reason });
        if readable_len < BLK_HDR_LEN {
            assert_eq!(result, bad(BadReason::Header));
            assert!(data.is_empty());
        } else if let Some(status) = status {
            let writes = matches!(kind, 1 | 11 | 13 | 14);
            let range = if writes {
                base.addr() + BLK_HDR_LEN..base.addr() + readable_len
            } else {
                writable_base.addr()..status.addr()
            };
            let wanted = Request {
                kind,
                sector: header.sector,
                writable: !writes,
                data_len: range.len() as u64,
                status,
            };
            assert_eq!(result, Ok(wanted));
            assert_eq!(addrs(&data), range.collect::<Vec<_>>());
            assert!(data.iter().all(|s| s.len > 0));
        } else {
            assert_eq!(result, bad(BadReason::Status));
        }
        chain.fault = Some(crate::ring::ChainFault::Loop);
        assert_eq!(split_request(&chain, &mut data), bad(BadReason::Chain(crate::ring::ChainFault::Loop)));
    }
}

#[test]
fn the_configuration_space_is_laid_out_as_specified() {
    let config = BlkConfig {
        capacity: 0x0102_0304_0506_0708,
        size_max: 0x1111_1111,
        seg_max: 126,
        cylinders: 0x2222,
        heads: 3,
        sectors: 4,
        blk_size: 4096,
        physical_block_exp: 5,
        alignment_offset: 6,
        min_io_size: 0x0708,
        opt_io_size: 9,
        writeback: 1,
        num_queues: 0x0a0b,
        max_discard_sectors: 12,
        max_discard_seg: 13,
        discard_sector_alignment: 14,
        max_write_zeroes_sectors: 15,
        max_write_zeroes_seg: 16,
        write_zeroes_may_unmap: 1,
        max_secure_erase_sectors: 17,
        max_secure_erase_seg: 18,
        secure_erase_sector_alignment: 19,
        ..BlkConfig::default()
    };
    let bytes = config.as_bytes();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(bytes[..8], 0x0102_0304_0506_0708u64.to_le_bytes());
    assert_eq!(bytes[16..24], [0x22, 0x22, 3, 4, 0, 16, 0, 0]);
    assert_eq!(bytes[24..32], [5, 6, 8, 7, 9, 0, 0, 0]);
    assert_eq!(bytes[32..36], [1, 0, 0x0b, 0x0a]);
    for (at, value) in
        [(8, 0x1111_1111), (12, 126), (36, 12), (40, 13), (44, 14), (48, 15), (52, 16), (60, 17)]
    {
        assert_eq!(u32_at(at), value, "at {at}");
    }
    assert_eq!((bytes[56], u32_at(64), u32_at(68)), (1, 18, 19));
}

#[test]
fn ranges_are_parsed() {
    let mut bytes = [0; BLK_RANGE_LEN];
    bytes[..8].copy_from_slice(&7u64.to_le_bytes());
    bytes[8..12].copy_from_slice(&8u32.to_le_bytes());
    bytes[12] = 1;
    assert_eq!(Range::parse(bytes), Range { sector: 7, num_sectors: 8, flags: 1 });
}
