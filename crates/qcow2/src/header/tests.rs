use super::*;

pub(crate) fn header() -> Header {
    Header {
        version: 3,
        cluster_bits: 16,
        size: 1 << 30,
        l1_size: 2,
        l1_offset: 0x3_0000,
        reftable_offset: 0x1_0000,
        reftable_clusters: 1,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: 0,
        compatible: LAZY_REFCOUNTS,
        autoclear: 0,
        refcount_order: 4,
        compression: Compression::Zlib,
        backing: Some("base image.qcow2".into()),
        backing_format: Some("qcow2".into()),
        data_file: None,
        bitmaps: Some(BitmapsAt { count: 1, directory_bytes: 40, directory_offset: 0x5_0000 }),
        mark: None,
        unknown: vec![(0x1234_5678, b"kept".to_vec())],
        extra: vec![],
    }
}

#[test]
fn there_and_back() {
    let mut of = vec![header()];
    of.push(Header { compression: Compression::Zstd, incompatible: incompatible::COMPRESSION, ..header() });
    of.push(Header { version: 2, compatible: 0, extra: vec![], ..header() });
    of.push(Header { backing: None, backing_format: None, bitmaps: None, extra: vec![7; 16], ..header() });
    for h in of {
        let bytes = h.encode().unwrap();
        assert_eq!(Header::parse(&bytes).unwrap(), h);
        for len in 0..bytes.len() {
            // A truncated header may be refused, or lack its last parts. Parsing never panics.
            let _ = Header::parse(&bytes[..len]);
        }
    }
}

#[test]
fn what_no_image_has_is_refused() {
    let bytes = header().encode().unwrap();
    let with = |at: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::parse(&bytes).unwrap_err().to_string()
    };
    for (at, value, says) in [
        (0, &[0u8][..], "not a qcow2 image"),
        (7, &[4], "version 4"),
        (7, &[1], "version 1"),
        (23, &[8], "2^8"),
        (23, &[22], "2^22"),
        (35, &[2], "encrypted"),
        (36, &[0xff; 4], "L1 table"),
        (40, &[1], "L1 table"),
        (47, &[1], "L1 table"),
        (48, &[0; 8], "refcount table"),
        (56, &[0xff; 4], "refcount table"),
        (56, &[0; 4], "no refcount table"),
        (24, &[0x7f; 8], "which need"),
        (72, &[0x80], "bit 63"),
        (79, &[8], "compression"),
        (79, &[4], "no name"),
        (99, &[7], "2^7"),
        (103, &[105], "header has"),
        (100, &[1], "header has"),
        (104, &[9], "compression type 9"),
        (16, &[0xff; 4], "name"),
        (8, &[0xff; 8], "name"),
    ] {
        let e = with(at, value);
        assert!(e.contains(says), "{at}: {e}");
    }
}

#[test]
fn encrypted_images_are_refused_by_extension_too() {
    let bytes = Header { unknown: vec![(0x0537_be77, vec![0; 16])], ..header() }.encode().unwrap();
    assert!(Header::parse(&bytes).unwrap_err().to_string().contains("encrypted"));
}
