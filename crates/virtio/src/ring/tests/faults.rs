//! Faulty chains and broken rings, one by one.

use super::*;
use crate::desc::{DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE};

/// Descriptors of a split ring or table: address, length, flags, next.
fn put_desc(arena: &Arena, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
    arena.put_u64(at, addr);
    arena.put_u64(at + 8, u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48);
}

/// Pops a split chain that starts at descriptor 0.
fn pop_split(arena: &Arena, indirect: bool) -> Chain {
    let features = RingFeatures { indirect, ..Default::default() };
    let (addrs, guest) = arena.ring(RING, 8, features);
    arena.put_u16(guest[1] + 2, 1);
    // SAFETY: the arena outlives the ring.
    let mut ring = unsafe { DeviceRing::new(8, features, addrs, 0) }.unwrap();
    let mut chain = Chain::new();
    assert!(ring.pop(&arena.mem, &mut chain).unwrap());
    let again = (chain.head, chain.segs.clone(), chain.readable, chain.fault);
    assert!(ring.pop_head(&arena.mem, &mut chain, 0).unwrap());
    assert_eq!(again, (chain.head, chain.segs.clone(), chain.readable, chain.fault));
    chain
}

#[test]
fn faults_are_named_and_the_status_is_still_found() {
    const N: u16 = DESC_F_NEXT;
    const W: u16 = DESC_F_WRITE;
    const I: u16 = DESC_F_INDIRECT;
    let status = BUFFERS + 0x100;
    // Values of descriptor 1 and the expected fault. Descriptor 0 is a header and 2 the status.
    for (addr, len, flags, fault) in [
        (BUFFERS + 32, 16, N, None),
        (BUFFERS + 32, 0, N, None),
        (0, 0, N | W, None),
        (1, 16, N, Some(ChainFault::Addr)),
        (u64::MAX - 4, 16, N, Some(ChainFault::Addr)),
        (BUFFERS + 0x1_fff8, 16, N, Some(ChainFault::Addr)),
        (BUFFERS - 1, 16, N | W, Some(ChainFault::Addr)),
    ] {
        let arena = arena();
        put_desc(&arena, RING, BUFFERS, 16, N, 1);
        put_desc(&arena, RING + 16, addr, len, flags, 2);
        put_desc(&arena, RING + 32, status, 1, W, 0);
        let chain = pop_split(&arena, true);
        assert_eq!(chain.fault, fault, "{addr:#x} {len} {flags}");
        assert_eq!(chain.segs.last().unwrap().ptr, arena.host(status));
        assert_eq!(chain.head, Head { id: 0, descs: 3 });
    }
    // Order.
    let arena = arena();
    put_desc(&arena, RING, BUFFERS, 16, N, 1);
    put_desc(&arena, RING + 16, BUFFERS + 64, 16, N | W, 2);
    put_desc(&arena, RING + 32, BUFFERS + 128, 16, N, 3);
    put_desc(&arena, RING + 48, status, 1, W, 0);
    let chain = pop_split(&arena, true);
    assert_eq!((chain.fault, chain.readable, chain.segs.len()), (Some(ChainFault::Order), 1, 3));
    // A loop, and a link out of the table.
    put_desc(&arena, RING + 48, status, 1, N | W, 1);
    put_desc(&arena, RING + 32, BUFFERS + 128, 16, N | W, 3);
    let chain = pop_split(&arena, true);
    assert_eq!((chain.fault, chain.head.descs), (Some(ChainFault::Loop), 8));
    put_desc(&arena, RING + 48, status, 1, N | W, 8);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Addr));
    // Indirect tables: good, not negotiated, chained on, of a bad length, nested, out of memory,
    // misaligned, across a border.
    let table = TABLES;
    put_desc(&arena, table, BUFFERS, 16, N, 2);
    put_desc(&arena, table + 32, status, 1, W, 0);
    put_desc(&arena, RING, table, 48, I, 0);
    assert_eq!(pop_split(&arena, true).fault, None);
    assert_eq!(pop_split(&arena, true).segs.len(), 2);
    assert_eq!(pop_split(&arena, false).fault, Some(ChainFault::Indirect));
    put_desc(&arena, RING + 16, BUFFERS, 1, W, 0);
    put_desc(&arena, RING, table, 48, I | N, 1);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Indirect));
    for (len, fault) in [
        (0, ChainFault::Indirect),
        (47, ChainFault::Indirect),
        (16 * 1025, ChainFault::TooLong),
        (0xffff_fff0, ChainFault::TooLong),
        (32, ChainFault::Addr),
    ] {
        put_desc(&arena, RING, table, len, I, 0);
        assert_eq!(pop_split(&arena, true).fault, Some(fault), "{len}");
    }
    put_desc(&arena, RING, 16, 48, I, 0);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Addr));
    put_desc(&arena, table + 32, status, 1, W | N, 0);
    put_desc(&arena, RING, table, 48, I, 0);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Order));
    put_desc(&arena, table, BUFFERS, 16, N | W, 2);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Loop));
    put_desc(&arena, table + 32, status, 1, I, 0);
    assert_eq!(pop_split(&arena, true).fault, Some(ChainFault::Indirect));
    let odd = BUFFERS + 0x1_0000 - 21;
    let entry = |addr: u64, len: u64, flags: u64, next: u64| {
        [addr.to_le_bytes(), (len | flags << 32 | next << 48).to_le_bytes()].concat()
    };
    let bytes = [entry(BUFFERS, 16, u64::from(N), 1), entry(status, 1, u64::from(W), 0)].concat();
    for (i, byte) in bytes.iter().enumerate() {
        // SAFETY: inside of the two regions.
        unsafe { arena.host(odd + i as u64).write(*byte) };
    }
    put_desc(&arena, RING, odd, 32, I, 0);
    let chain = pop_split(&arena, true);
    assert_eq!((chain.fault, chain.segs.len(), chain.readable), (None, 2, 1));
    assert_eq!(chain.segs[1].ptr, arena.host(status));
}

#[test]
fn broken_rings_say_so() {
    let arena = arena();
    let features = RingFeatures::default();
    let (addrs, guest) = arena.ring(RING, 8, features);
    // SAFETY: the arena outlives the ring.
    let mut ring = unsafe { DeviceRing::new(8, features, addrs, 0) }.unwrap();
    let mut chain = Chain::new();
    arena.put_u16(guest[1] + 2, 9);
    assert_eq!(ring.pop(&arena.mem, &mut chain), Err(Broken::AvailIndex { avail: 9, next: 0 }));
    arena.put_u16(guest[1] + 2, 8);
    arena.put_u16(guest[1] + 4, 8);
    assert_eq!(ring.pop(&arena.mem, &mut chain), Err(Broken::Head { head: 8, size: 8 }));
    assert_eq!(ring.pop_head(&arena.mem, &mut chain, 8), Err(Broken::Head { head: 8, size: 8 }));
    // Packed: all slots are one endless chain.
    let features = RingFeatures { packed: true, ..Default::default() };
    let (addrs, _) = arena.ring(RING, 8, features);
    for slot in 0..8 {
        let flags = DESC_F_AVAIL | DESC_F_NEXT;
        arena.put_u64(RING + 16 * slot, BUFFERS);
        arena.put_u64(RING + 16 * slot + 8, 16 | u64::from(flags) << 48);
    }
    // SAFETY: the test's arena or region outlives the use.
    let mut ring = unsafe { DeviceRing::new(8, features, addrs, 0x8000_8000) }.unwrap();
    assert_eq!(ring.pop(&arena.mem, &mut chain), Err(Broken::Endless { slot: 0 }));
    // Packed: everything is available, and again in the next lap. Only one ring of chains is taken.
    for slot in 0..8 {
        arena.put_u64(RING + 16 * slot + 8, 16 | u64::from(DESC_F_AVAIL) << 48);
    }
    let mut taken = 0;
    while ring.pop(&arena.mem, &mut chain).unwrap() {
        taken += 1;
        for slot in 0..8 {
            arena.put_u64(RING + 16 * slot + 8, 16 | u64::from(DESC_F_AVAIL) << 48);
        }
        if taken == 8 {
            for slot in 0..8 {
                arena.put_u64(RING + 16 * slot + 8, 16 | u64::from(DESC_F_USED) << 48);
            }
        }
    }
    assert_eq!(taken, 8);
    assert!(!ring.has_avail());
}

/// A chain of a packed ring: its one descriptor refers to a table of entries (address, flags).
fn pop_table(entries: &[(u64, u16)], flags: u16, all_readable: bool) -> Chain {
    let arena = arena();
    let features = RingFeatures { packed: true, indirect: true, ..Default::default() };
    let (addrs, _) = arena.ring(RING, 8, features);
    for (at, (addr, flags)) in (TABLES..).step_by(16).zip(entries) {
        arena.put_u64(at, *addr);
        arena.put_u64(at + 8, 16 | u64::from(*flags) << 48);
    }
    let flags = DESC_F_AVAIL | DESC_F_INDIRECT | flags;
    arena.put_u64(RING, TABLES);
    let len = 16 * entries.len() as u64;
    arena.put_u64(RING + 8, len | u64::from(flags) << 48);
    // SAFETY: the arena outlives the ring.
    let mut ring = unsafe { DeviceRing::new(8, features, addrs, 0x8000_8000) }.unwrap();
    if all_readable {
        ring.set_all_readable();
    }
    let mut chain = Chain::new();
    assert!(ring.pop(&arena.mem, &mut chain).unwrap());
    chain
}

#[test]
fn a_transmit_ring_ignores_write_flags() {
    const N: u16 = DESC_F_NEXT;
    const W: u16 = DESC_F_WRITE;
    let seen = |chain: &Chain| (chain.fault, chain.segs.len(), chain.readable);
    // The flags of DPDK's virtio-user, and flags in other places. The last buffer crosses a
    // region's end, so the careful walker is used.
    let border = BUFFERS + 0x1_0000 - 8;
    for (flags, last) in
        [([W, 0], BUFFERS + 64), ([0, W], BUFFERS + 64), ([W, W], BUFFERS + 64), ([W, 0], border)]
    {
        let table = [(BUFFERS, flags[0]), (last, flags[1])];
        let buffers = 2 + usize::from(last == border);
        assert_eq!(seen(&pop_table(&table, 0, true)), (None, buffers, buffers), "{flags:?}");
        if flags == [W, 0] {
            assert_eq!(pop_table(&table, 0, false).fault, Some(ChainFault::Order));
        }
    }
    // The same on a split ring.
    let arena = arena();
    for (first, second) in [(W, 0), (0, W), (W, W)] {
        put_desc(&arena, RING, BUFFERS, 16, N | first, 1);
        put_desc(&arena, RING + 16, BUFFERS + 64, 16, second, 0);
        let features = RingFeatures::default();
        let (addrs, guest) = arena.ring(RING, 8, features);
        arena.put_u16(guest[1] + 2, 1);
        // SAFETY: the arena outlives the ring.
        let mut ring = unsafe { DeviceRing::new(8, features, addrs, 0) }.unwrap();
        ring.set_all_readable();
        let mut chain = Chain::new();
        assert!(ring.pop(&arena.mem, &mut chain).unwrap());
        assert_eq!(seen(&chain), (None, 2, 2));
    }
}

#[test]
fn the_write_flag_of_what_refers_to_a_table_is_ignored() {
    const W: u16 = DESC_F_WRITE;
    let table = [(BUFFERS, 0), (BUFFERS + 64, W)];
    for flags in [0, W] {
        let chain = pop_table(&table, flags, false);
        assert_eq!((chain.fault, chain.segs.len(), chain.readable), (None, 2, 1), "packed, {flags}");
    }
    let arena = arena();
    put_desc(&arena, TABLES, BUFFERS, 16, DESC_F_NEXT, 1);
    put_desc(&arena, TABLES + 16, BUFFERS + 64, 16, W, 0);
    // Alone, and after another buffer of the ring.
    for flags in [0, W] {
        put_desc(&arena, RING, TABLES, 32, DESC_F_INDIRECT | flags, 0);
        let chain = pop_split(&arena, true);
        assert_eq!((chain.fault, chain.segs.len(), chain.readable), (None, 2, 1), "split, {flags}");
        put_desc(&arena, RING, BUFFERS + 128, 16, DESC_F_NEXT, 1);
        put_desc(&arena, RING + 16, TABLES, 32, DESC_F_INDIRECT | flags, 0);
        let chain = pop_split(&arena, true);
        assert_eq!((chain.fault, chain.segs.len(), chain.readable), (None, 3, 2), "split, behind, {flags}");
    }
}
