//! Compressed clusters: raw deflate, or zstd.

use crate::header::Compression;

/// The data is not a compressed cluster.
#[derive(Debug, thiserror::Error)]
#[error("a compressed cluster cannot be unpacked")]
pub struct Garbled;

/// Decompresses a cluster into `to`. `from` may have more bytes than the data.
///
/// # Errors
/// The data is invalid, or yields less than a cluster.
pub fn inflate(kind: Compression, from: &[u8], to: &mut [u8]) -> Result<(), Garbled> {
    let filled = match kind {
        Compression::Zlib => {
            use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
            let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
            let (_, _, filled) = decompress(&mut DecompressorOxide::new(), from, to, 0, flags);
            filled
        }
        Compression::Zstd => {
            // There may be one frame or several. Only they say how long they are; bytes behind them
            // are ignored.
            let mut from = zstd_safe::InBuffer::around(from);
            let mut out = zstd_safe::OutBuffer::around(&mut *to);
            let mut context = zstd_safe::DCtx::create();
            loop {
                let before = (from.pos(), out.pos());
                let left = context.decompress_stream(&mut out, &mut from).map_err(|_| Garbled)?;
                if out.pos() == out.capacity()
                    || (left == 0 && from.pos == from.src.len())
                    || before == (from.pos(), out.pos())
                {
                    break;
                }
            }
            out.pos()
        }
    };
    if filled == to.len() { Ok(()) } else { Err(Garbled) }
}

/// Compresses a cluster. `None`: that does not make it smaller.
pub fn deflate(kind: Compression, from: &[u8]) -> Option<Vec<u8>> {
    let packed = match kind {
        // A level from 1 to 9; `qemu-img` has no option for it, either.
        Compression::Zlib => miniz_oxide::deflate::compress_to_vec(from, 6),
        Compression::Zstd => {
            let mut packed = vec![0; zstd_safe::compress_bound(from.len())];
            let len = zstd_safe::compress(&mut packed[..], from, zstd_safe::CLEVEL_DEFAULT).ok()?;
            packed.truncate(len);
            packed
        }
    };
    (packed.len() < from.len()).then_some(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let plain: Vec<u8> = (0..65536u32).map(|i| (i / 7 % 251) as u8).collect();
        for kind in [Compression::Zlib, Compression::Zstd] {
            let mut packed = deflate(kind, &plain).unwrap();
            let len = packed.len();
            // Bytes that follow it in its sector.
            packed.extend_from_slice(&[0xa5; 300]);
            let mut to = vec![0; plain.len()];
            inflate(kind, &packed, &mut to).unwrap();
            assert!(to == plain, "{kind:?}");
            assert!(inflate(kind, &packed[..len / 2], &mut to).is_err());
            assert!(inflate(kind, &[0x55; 100], &mut to).is_err());
            assert!(inflate(kind, &[], &mut to).is_err());
        }
        let noise: Vec<u8> =
            (0..4096u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8).collect();
        assert!(deflate(Compression::Zstd, &noise).is_none_or(|p| p.len() < noise.len()));
    }
}
