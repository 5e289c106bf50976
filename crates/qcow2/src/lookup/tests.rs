use proptest::prelude::*;

use super::*;
use crate::create::Options;
use crate::map::Load;
use crate::served::Settings;
use crate::{Image, Waker, testing};

const CLUSTER_BITS: u32 = 14;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
const NO_WAKER: Waker = Waker { who: 0, token: 0 };
/// Clusters whose entries are random. The first ones end a slice of 256 or of 512 entries.
const ENTRIES: u64 = 6;
const CLUSTERS: u64 = 1024;

/// Makes an image whose first slices are in memory and empty.
fn image(extended: bool) -> Served {
    let preallocation = crate::create::Preallocation::Metadata;
    let options = Options {
        cluster_size: CLUSTER,
        extended_l2: extended,
        preallocation,
        ..Options::new(CLUSTERS * CLUSTER)
    };
    let file = testing::new(&options);
    let header = Image::open(&file).unwrap().header().clone();
    let settings = Settings { file: 0, data: 0, cache_bytes: None, writable: false, room: false };
    let image = Served::open(&file, header, settings).unwrap();
    for slice in 0..2 {
        assert!(matches!(image.map.load(slice, NO_WAKER), Load::Yours));
        assert!(image.map.loaded(slice, Some(&vec![0; image.map.slice_bytes()]), &mut |_| {}));
    }
    image
}

/// Puts entries into the map from cluster `first` on.
fn put(image: &Served, first: u64, entries: &[Entry]) {
    for (cluster, entry) in (first..).zip(entries) {
        assert_eq!(image.map.hold(cluster, 1, NO_WAKER), Some(1));
        image.map.release(cluster, 1, Some(&[*entry]), None, &mut |_| {});
    }
}

/// Returns the contents of one subcluster, from its own bits.
fn of_subcluster(image: &Served, entry: Entry, sub: u64) -> Source {
    let bit = |n: u64| entry.bits >> n & 1 != 0;
    let (allocated, zero) = match image.extended {
        true => (bit(sub), bit(32 + sub)),
        false => (true, image.version >= 3 && entry.word & ZERO != 0),
    };
    match image.host(entry) {
        _ if entry.word & COMPRESSED != 0 => Source::Compressed(entry.word),
        _ if zero => Source::Zero,
        Some(host) if allocated => Source::Data(host + (sub << image.sub_bits())),
        _ => Source::Below,
    }
}

/// Returns the contents from `pos` on, one subcluster after the other, and for how many bytes they
/// hold, at most `len`. With `own`, only what may be overwritten counts as data.
fn walk(image: &Served, pos: u64, len: u64, own: bool) -> (Source, u64) {
    let (unit, slice) = (1 << image.sub_bits(), image.map.slice_of(pos / CLUSTER));
    let at = |pos: u64| {
        let entry = image.map.get(pos / CLUSTER).unwrap();
        let source = of_subcluster(image, entry, pos % CLUSTER / unit);
        match source {
            Source::Data(_) if own && entry.word & COPIED == 0 => Source::Below,
            Source::Data(at) => Source::Data(at + pos % unit),
            other => other,
        }
    };
    let first = at(pos);
    let mut next = (pos / unit + 1) * unit;
    while next < pos + len && image.map.slice_of(next / CLUSTER) == slice {
        let continues = match (first, at(next)) {
            (Source::Compressed(_), _) => !next.is_multiple_of(CLUSTER),
            (Source::Data(at), next_at) => next_at == Source::Data(at + (next - pos)),
            (first, other) => first == other,
        };
        if !continues {
            break;
        }
        next += unit;
    }
    (first, len.min(next - pos))
}

/// Masks with runs of every length, and any others.
fn mask() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(0),
        Just(u32::MAX),
        (0..32u32, 0..32u32).prop_map(|(a, b)| u32::MAX >> a & u32::MAX << b),
        any::<u32>(),
    ]
}

/// Entries whose clusters often follow each other in the data file.
fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let entry = (0..8u64, prop_oneof![3 => Just(None), 1 => (0..4u64).prop_map(Some)], mask(), mask());
    prop::collection::vec(entry, ENTRIES as usize).prop_map(|all| {
        let entry = |(n, (flags, place, allocated, zero)): (u64, (u64, Option<u64>, u32, u32))| {
            let host = place.unwrap_or(8 + n) << CLUSTER_BITS;
            let flags = match flags {
                0 => COMPRESSED,
                1 => ZERO,
                2 => 0,
                _ => COPIED,
            };
            Entry { word: host | flags, bits: u64::from(allocated) | u64::from(zero) << 32 }
        };
        (0..).zip(all).map(entry).collect()
    })
}

proptest! {
    #[test]
    fn a_run_is_what_its_subclusters_are(
        extended: bool,
        external: bool,
        version in 2..=3u32,
        entries in entries(),
        start in 0..ENTRIES * CLUSTER,
        len in 1..ENTRIES * CLUSTER,
    ) {
        let mut image = image(extended);
        (image.external, image.version) = (external, if extended { 3 } else { version });
        let first = image.map.slice_end(0) - 3;
        put(&image, first, &entries);
        let pos = first * CLUSTER + start;
        let len = len.min(ENTRIES * CLUSTER - start);
        prop_assert_eq!(image.run(pos, len), Ok(walk(&image, pos, len, false)));
        let entry = image.map.get(pos / CLUSTER).unwrap();
        let expected = match walk(&image, pos, len, true) {
            (Source::Data(at), n) => Some((at, n)),
            _ => None,
        };
        prop_assert_eq!(image.in_place_run(entry, pos, len), expected);
    }

    #[test]
    fn a_cluster_at_no_place_of_a_cluster_is_refused(within in 0..CLUSTER, off in 1..CLUSTER / 512) {
        let image = image(false);
        put(&image, 0, &[Entry { word: (CLUSTER + off * 512) | COPIED, bits: 0 }]);
        prop_assert_eq!(image.run(within, 1), Err(Miss::Corrupt));
        let (offset, _) = image.in_place_run(image.map.get(0).unwrap(), within, 1).unwrap();
        prop_assert!(!image.fits(offset, within));
    }
}
