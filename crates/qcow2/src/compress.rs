//! Compressed clusters: raw deflate, or zstd.
//!
//! Deflate has a window of 4 KiB, as QEMU's: other programs open clusters with `windowBits` -12.
//! `miniz_oxide` unpacks clusters, which come from the writer of the image: it has no unsafe code.
//! `zlib-rs` packs them: it can limit the window.

use zlib_rs::{Deflate, DeflateFlush, Status};

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

/// log2 of the window of deflate, bytes: no distance is larger.
const WINDOW_BITS: u8 = 12;
/// The level of deflate, from 1 to 9. The best one: it makes up for a part of what the small window
/// costs. A cluster is packed once, and read often.
const DEFLATE_LEVEL: i32 = 9;

/// Compresses a cluster. `None`: that does not make it smaller.
pub fn deflate(kind: Compression, from: &[u8]) -> Option<Vec<u8>> {
    let packed = match kind {
        Compression::Zlib => {
            let mut packed = vec![0; from.len()];
            let mut deflate = Deflate::new(DEFLATE_LEVEL, false, WINDOW_BITS);
            match deflate.compress(from, &mut packed, DeflateFlush::Finish) {
                Ok(Status::StreamEnd) => packed.truncate(usize::try_from(deflate.total_out()).ok()?),
                // It does not fit.
                _ => return None,
            }
            packed
        }
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

    /// Unpacks a cluster with a decompressor that remembers 4 KiB only, as programs do that read an
    /// image as a stream. A larger distance leads to other contents, or to an error.
    fn with_small_window(packed: &[u8]) -> Option<Vec<u8>> {
        use miniz_oxide::inflate::{TINFLStatus, core};
        let (mut plain, mut ring) = (Vec::new(), vec![0; 1 << WINDOW_BITS]);
        let (mut state, mut used, mut at) = (core::DecompressorOxide::new(), 0, 0);
        loop {
            let (status, read, made) = core::decompress(&mut state, &packed[used..], &mut ring, at, 0);
            plain.extend_from_slice(&ring[at..at + made]);
            (used, at) = (used + read, (at + made) % ring.len());
            match status {
                TINFLStatus::Done => return Some(plain),
                TINFLStatus::HasMoreOutput => {}
                _ => return None,
            }
        }
    }

    /// Contents whose repetitions are `period` bytes apart.
    fn repeating(len: usize, period: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(period as u64);
        let noise: Vec<u8> = (0..period).map(|at| if at % 32 < 8 { 0 } else { random.u8(..) }).collect();
        noise.iter().copied().cycle().take(len).collect()
    }

    #[test]
    fn no_distance_is_larger_than_the_window_of_qemu() {
        for len in [512, 4096, 1 << 14, 1 << 16, 1 << 18, 2 << 20] {
            for period in [16, 300, 3800, 4000, 4096, 4097, 5000, 8192, 32768] {
                let plain = repeating(len, period);
                // A short cluster without a repetition need not become smaller.
                let Some(packed) = deflate(Compression::Zlib, &plain) else { continue };
                assert!(with_small_window(&packed).is_some_and(|p| p == plain), "{len} {period}");
                let mut back = vec![1; len];
                inflate(Compression::Zlib, &packed, &mut back).unwrap();
                assert!(back == plain, "{len} {period}");
            }
        }
        // The check notices a larger window.
        let (plain, mut packed) = (repeating(1 << 16, 8192), vec![0; 1 << 16]);
        let mut wide = Deflate::new(DEFLATE_LEVEL, false, 15);
        wide.compress(&plain, &mut packed, DeflateFlush::Finish).unwrap();
        assert!(with_small_window(&packed).is_none_or(|p| p != plain));
    }

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
