//! Crate `virtio-queue` as the oracle for split rings: the same memory, the same chains, the same
//! used ring, the same notifications.

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;

/// Fills the memory of a ring of 16 with random chains of all kinds, valid and invalid.
fn fill(arena: &Arena, vm: &GuestMemoryMmap, rng: &mut Rng) {
    let put = |at: u64, rng: &mut Rng| {
        let addr = match rng.below(6) {
            0 => TABLES + 16 * rng.below(20),
            1 => rng.next(),
            _ => BUFFERS + rng.below(0xf000),
        };
        let indirect = rng.one_in(8);
        let len = if indirect { 16 * rng.below(8) } else { rng.below(0x1000) };
        let flags = if indirect { 4 } else { rng.below(4) };
        let links = if rng.one_in(20) { 30 } else { 16 };
        let word = len | flags << 32 | rng.below(links) << 48;
        for (at, value) in [(at, addr), (at + 8, word)] {
            arena.put_u64(at, value);
            vm.write_obj(value, GuestAddress(at)).unwrap();
        }
    };
    for i in 0..16 {
        put(RING + 16 * i, rng);
    }
    for i in 0..32 {
        put(TABLES + 16 * i, rng);
    }
}

#[test]
fn virtio_queue_agrees() {
    let features = RingFeatures { indirect: true, event_idx: true, packed: false };
    let (mut compared, mut faulty) = (0, 0);
    for seed in 0..iterations(600) {
        let mut rng = Rng::new(seed);
        let arena = arena();
        let ranges = [(RING, 0x2_0000), (BUFFERS, 0x1_0000), (BUFFERS + 0x1_0000, 0x1_0000)];
        let vm = GuestMemoryMmap::from_ranges(&ranges.map(|(a, l)| (GuestAddress(a), l))).unwrap();
        let (addrs, guest) = arena.ring(RING, 16, features);
        // SAFETY: the arena outlives the ring.
        let mut ring = unsafe { DeviceRing::new(16, features, addrs, 0) }.unwrap();
        let mut queue = Queue::new(16).unwrap();
        queue.set_event_idx(true);
        queue.try_set_desc_table_address(GuestAddress(guest[0])).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(guest[1])).unwrap();
        queue.try_set_used_ring_address(GuestAddress(guest[2])).unwrap();
        queue.set_ready(true);
        let both = |at: u64, value: u16| {
            arena.put_u16(at, value);
            vm.write_obj(value, GuestAddress(at)).unwrap();
        };
        let mut chain = Chain::new();
        let (mut avail, mut used) = (0u16, 0u16);
        for _ in 0..40 {
            fill(&arena, &vm, &mut rng);
            let batch = 1 + rng.below(6) as u16;
            for i in 0..batch {
                both(guest[1] + 4 + 2 * u64::from((avail.wrapping_add(i)) % 16), rng.below(16) as u16);
            }
            avail = avail.wrapping_add(batch);
            both(guest[1] + 2, avail);
            let mut heads = Vec::new();
            while ring.pop(&arena.mem, &mut chain).unwrap() {
                let theirs = queue.pop_descriptor_chain(&vm).unwrap();
                assert_eq!(theirs.head_index(), chain.head.id);
                heads.push(chain.head);
                if chain.fault.is_some() {
                    faulty += 1;
                    continue;
                }
                let theirs: Vec<_> = theirs
                    .filter(|d| d.len() != 0)
                    .map(|d| (arena.host(d.addr().0), d.len(), d.is_write_only()))
                    .collect();
                let ours: Vec<_> = chain
                    .segs
                    .iter()
                    .enumerate()
                    .filter(|(_, s)| s.len != 0)
                    .map(|(i, s)| (s.ptr, s.len, i >= chain.readable))
                    .collect();
                // A buffer across the border of two regions is two segments here.
                if ours.len() == theirs.len() {
                    assert_eq!(ours, theirs, "seed {seed}");
                    compared += 1;
                }
            }
            assert!(queue.pop_descriptor_chain(&vm).is_none());
            // The position at which the driver wants its notification.
            both(guest[1] + 4 + 32, used.wrapping_add(rng.below(8) as u16).wrapping_sub(2));
            for head in heads.drain(..) {
                let len = rng.next() as u32;
                ring.push(head, len);
                queue.add_used(&vm, head.id, len).unwrap();
                used = used.wrapping_add(1);
            }
            assert_eq!(ring.publish(), queue.needs_notification(&vm).unwrap(), "seed {seed}");
            assert_eq!(ring.enable_kick(), queue.enable_notification(&vm).unwrap());
            let mut theirs = vec![0; ring_sizes(16, features).device];
            vm.read_slice(&mut theirs, GuestAddress(guest[2])).unwrap();
            assert_eq!(arena.bytes(guest[2], theirs.len()), theirs, "seed {seed}");
            assert_eq!((ring.base() as u16, ring.used_index()), (queue.next_avail(), queue.next_used()));
        }
    }
    assert!(cfg!(miri) || (compared > 5000 && faulty > 5000), "{compared} {faulty}");
}
