//! An independent check of an image: counts every reference and compares.

use std::collections::HashSet;

use qcow2::entry::{COMPRESSED, COPIED, Compressed, OFFSET};
use qcow2::header::{Header, incompatible};

fn word(image: &[u8], at: u64) -> u64 {
    let at = at as usize;
    image.get(at..at + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().unwrap()))
}

fn count(image: &[u8], h: &Header, cluster: u64) -> u64 {
    let (block, at) = (cluster / h.refblock_entries(), cluster % h.refblock_entries());
    let offset = word(image, h.reftable_offset + block * 8);
    if offset == 0 {
        return 0;
    }
    let bits = 1u64 << h.refcount_order;
    let byte = |i: u64| u64::from(*image.get(i as usize).unwrap_or(&0));
    if bits < 8 {
        return byte(offset + at * bits / 8) >> (at * bits % 8) & ((1 << bits) - 1);
    }
    (0..bits / 8).fold(0, |n, i| n << 8 | byte(offset + at * bits / 8 + i))
}

/// Returns the number of clusters that leak, or an error other than leaks.
pub(crate) fn check(image: &[u8]) -> Result<u64, String> {
    let h = Header::parse(&image[..image.len().min(Header::BYTES_MAX)]).map_err(|e| e.to_string())?;
    let (size, data_file) = (h.cluster_size(), h.has(incompatible::DATA_FILE));
    let mut uses = vec![0u64; image.len().div_ceil(size as usize) + 1];
    let mut note = |what: &str, offset: u64, bytes: u64| {
        for cluster in offset / size..(offset + bytes).div_ceil(size) {
            *uses.get_mut(cluster as usize).ok_or(format!("{what} at {offset:#x} beyond the end"))? += 1;
        }
        Ok::<(), String>(())
    };
    note("header", 0, size)?;
    note("L1", h.l1_offset, u64::from(h.l1_size) * 8)?;
    let table = u64::from(h.reftable_clusters) * size;
    note("refcount table", h.reftable_offset, table)?;
    for i in 0..table / 8 {
        let offset = word(image, h.reftable_offset + i * 8);
        if offset != 0 {
            note("refcount block", offset, 1)?;
        }
    }
    let mut copied = Vec::new();
    for i in 0..u64::from(h.l1_size) {
        let entry = word(image, h.l1_offset + i * 8);
        if entry & OFFSET == 0 {
            continue;
        }
        note("L2", entry & OFFSET, 1)?;
        copied.push((entry & OFFSET, entry & COPIED != 0, "L2"));
        for j in 0..h.l2_entries() {
            let e = word(image, (entry & OFFSET) + j * h.l2_entry_bytes());
            if data_file {
                let at = (i * h.l2_entries() + j) * size;
                if e & COMPRESSED != 0 || e & OFFSET != if e & COPIED != 0 { at } else { 0 } {
                    return Err(format!("entry {e:#x} of the cluster at {at:#x} of a data file"));
                }
            } else if e & COMPRESSED != 0 {
                let c = Compressed::of(e, h.cluster_bits);
                for cluster in c.offset / size..=(c.offset + c.bytes - 1) / size {
                    note("compressed", cluster * size, 1)?;
                }
            } else if e & OFFSET != 0 {
                // A last cluster may end behind the file.
                if e & OFFSET < image.len() as u64 {
                    note("data", e & OFFSET, 1)?;
                }
                copied.push((e & OFFSET, e & COPIED != 0, "data"));
            }
        }
    }
    let mut leaks = 0;
    for (cluster, uses) in uses.iter().enumerate() {
        let counted = count(image, &h, cluster as u64);
        if counted < *uses {
            return Err(format!("cluster {cluster:#x} is counted {counted} times and used {uses} times"));
        }
        leaks += u64::from(counted > *uses);
    }
    for (offset, flag, what) in copied {
        if flag && count(image, &h, offset / size) != 1 {
            let n = count(image, &h, offset / size);
            return Err(format!(
                "{what} at {offset:#x} is said to be its user's alone and is counted {n} times"
            ));
        }
    }
    Ok(leaks)
}

/// Returns the clusters of a disk that are allocated in its data file.
pub(crate) fn mapped(image: &[u8]) -> HashSet<usize> {
    let h = Header::parse(&image[..image.len().min(Header::BYTES_MAX)]).unwrap();
    let table = |n: u64| word(image, h.l1_offset + n / h.l2_entries() * 8) & OFFSET;
    let entry = |n: u64| match table(n) {
        0 => 0,
        at => word(image, at + n % h.l2_entries() * h.l2_entry_bytes()),
    };
    (0..h.clusters()).filter(|n| entry(*n) & COPIED != 0).map(|n| n as usize).collect()
}
