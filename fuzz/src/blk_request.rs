//! Headers, data and status split over descriptors at random: `split_request` compared with a
//! simple model.

use virtio::blk::{Header, split_request};
use virtio::ring::{Chain, Seg};

use crate::bytes::Bytes;

/// The fuzz target.
pub fn blk_request(data: &[u8]) {
    let mut b = Bytes(data);
    let readable = b.below(7);
    let writable = b.below(7);
    let shift = b.below(9);
    let lens: Vec<usize> = (0..readable + writable)
        .map(|_| match b.u8() {
            n @ 0..=31 => usize::from(n),
            n => usize::from(n) * 4,
        })
        .collect();
    let mut blocks: Vec<Vec<u8>> = lens.iter().map(|&n| vec![0; n + shift]).collect();
    // The input provides the bytes that the device reads. The first four bytes of a header are
    // often a small number.
    let small = b.u8() & 1 != 0;
    let mut first = true;
    for (block, &len) in blocks.iter_mut().zip(&lens).take(readable) {
        let bytes = b.take(len);
        block[shift..shift + bytes.len()].copy_from_slice(bytes);
        if small && first && len >= 4 {
            block[shift + 1..shift + 4].fill(0);
            block[shift] &= 15;
        }
        first = false;
    }
    let gathered: Vec<u8> =
        blocks.iter().zip(&lens).take(readable).flat_map(|(k, &n)| k[shift..shift + n].to_vec()).collect();
    let mut chain = Chain::new();
    chain.readable = readable;
    chain.segs = blocks
        .iter_mut()
        .zip(&lens)
        .map(|(block, &len)| Seg { ptr: block[shift..].as_mut_ptr(), len: len as u32 })
        .collect();
    let all_writable: usize = lens[readable..].iter().sum();
    let mut segs = Vec::new();
    match split_request(&chain, &mut segs) {
        Ok(request) => {
            assert!(gathered.len() >= 16 && all_writable >= 1);
            let header = Header::parse(gathered[..16].try_into().unwrap());
            assert_eq!((request.kind, request.sector), (header.kind, header.sector));
            let expected = if request.writable { all_writable - 1 } else { gathered.len() - 16 };
            assert_eq!(request.data_len, expected as u64);
            // SAFETY: the blocks live. A segment is in one of them, or the address sanitizer
            // reports it.
            let data: Vec<u8> = segs
                .iter()
                .flat_map(|s| unsafe { std::slice::from_raw_parts(s.ptr, s.len as usize) }.to_vec())
                .collect();
            assert_eq!(data.len(), expected);
            if !request.writable {
                assert_eq!(data, gathered[16..]);
            }
            // SAFETY: `status` is the last writable byte of a living block.
            unsafe { request.status.write(0x5A) };
            let (block, &len) = blocks.iter().zip(&lens).rev().find(|(_, n)| **n > 0).unwrap();
            assert_eq!(block[shift + len - 1], 0x5A);
        }
        Err(e) => {
            assert!(gathered.len() < 16 || all_writable == 0, "refused without reason: {e}");
            assert_eq!(e.status.is_some(), all_writable > 0);
        }
    }
}
