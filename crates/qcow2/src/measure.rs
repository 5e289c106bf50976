//! How large a new image becomes, before it is made. The numbers are those of `qemu-img measure`.

use crate::bitmap::{Bitmap, flag};
use crate::create::{Options, Preallocation};
use crate::header::L1_BYTES_MAX;
use crate::{Error, Result};

/// Bytes of a bitmap's entry in the directory, without its name.
const BITMAP_ENTRY: u64 = 24;

/// The sizes of a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Bytes of the image with the data that it gets.
    pub required: u64,
    /// Bytes of the image when all of the disk is written.
    pub fully_allocated: u64,
}

/// Counts the clusters of a new image that get data. Ranges are added in the order of the disk.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    cluster: u64,
    bytes: u64,
    end: u64,
}

impl Needed {
    /// Starts with no data, for clusters of `cluster` bytes.
    pub fn new(cluster: u64) -> Self {
        Self { cluster, bytes: 0, end: 0 }
    }

    /// Adds data of `len` bytes at `offset`.
    pub fn add(&mut self, offset: u64, len: u64) {
        let first = offset.max(self.end) / self.cluster * self.cluster;
        let end = offset.saturating_add(len).checked_next_multiple_of(self.cluster).unwrap_or(u64::MAX);
        if end > self.end {
            self.bytes += end - first.max(self.end);
            self.end = end;
        }
    }

    /// Returns the bytes of the clusters.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Returns the sizes of an image with these options. `data` is the bytes of its data; `None`: all
/// of the disk.
///
/// # Errors
/// Options that contradict each other, a disk that is too large.
pub fn measure(options: &Options, data: Option<u64>) -> Result<Measured> {
    options.check()?;
    let cluster = options.cluster_size;
    let size = options.size.next_multiple_of(cluster);
    let entry = if options.extended_l2 { 16 } else { 8 };
    let tables = (size / cluster).div_ceil(cluster / entry);
    if tables * 8 > L1_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a disk of {} bytes is too large for clusters of {cluster} bytes; give a larger cluster_size",
            options.size
        )));
    }
    let map = cluster + tables * cluster + (tables * 8).next_multiple_of(cluster);
    let counts = counts_bytes((map + size) / cluster, cluster, options.refcount_bits);
    let all = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full);
    let data = data.filter(|_| !all).map_or(size, |data| data.min(size));
    Ok(Measured { required: map + counts + data, fully_allocated: map + counts + size })
}

/// Returns the bytes of the refcount table and blocks for `clusters`, and for their own clusters.
fn counts_bytes(clusters: u64, cluster: u64, bits: u64) -> u64 {
    let (mut blocks, mut table) = (0, 0);
    loop {
        let more = (clusters + blocks + table).div_ceil(cluster * 8 / bits);
        let (before, of) = ((blocks, table), more.div_ceil(cluster / 8));
        (blocks, table) = (more, of);
        if (blocks, table) == before {
            return (blocks + table) * cluster;
        }
    }
}

/// Returns the bytes of these bitmaps of a disk of `size` bytes in an image with clusters of
/// `cluster` bytes. Bitmaps that were in use are not copied.
pub fn bitmaps_bytes(list: &[Bitmap], size: u64, cluster: u64) -> u64 {
    let (mut bytes, mut directory) = (0, 0);
    for bitmap in list.iter().filter(|bitmap| !bitmap.has(flag::IN_USE)) {
        let clusters = size.div_ceil(1 << bitmap.granularity_bits).div_ceil(8).div_ceil(cluster);
        bytes += clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        directory += (BITMAP_ENTRY + bitmap.name.len() as u64).next_multiple_of(8);
    }
    bytes + u64::next_multiple_of(directory, cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_images() {
        // Numbers of qemu-img.
        for (size, required, all) in
            [(10 << 20, 327_680, 10_813_440), (1 << 40, 168_034_304, 1_099_679_662_080)]
        {
            let measured = measure(&Options::new(size), Some(0)).unwrap();
            assert_eq!((measured.required, measured.fully_allocated), (required, all));
            let full = Options { preallocation: Preallocation::Full, ..Options::new(size) };
            assert_eq!(measure(&full, Some(0)).unwrap().required, all);
        }
        let wrong = Options { cluster_size: 1000, ..Options::new(1 << 20) };
        assert!(measure(&wrong, None).is_err());
        let large = Options { cluster_size: 512, ..Options::new(1 << 40) };
        assert!(measure(&large, None).unwrap_err().to_string().contains("larger cluster_size"));
        assert!(measure(&Options::new(u64::MAX), None).is_err());
    }

    #[test]
    fn data_is_counted_in_clusters() {
        let mut needed = Needed::new(100);
        needed.add(10, 10);
        needed.add(30, 60);
        assert_eq!(needed.bytes(), 100);
        needed.add(99, 2);
        assert_eq!(needed.bytes(), 200);
        needed.add(450, 50);
        assert_eq!(needed.bytes(), 300);
    }
}
