//! The driver alone. `ring::tests` has the tests with a device.

use super::*;
use crate::testing::{Arena, all_features};

#[test]
fn full_rings_and_tables_take_nothing() {
    for features in all_features() {
        let arena = Arena::new(&[(0, 0x4000)]);
        let (addrs, _) = arena.ring(0, 4, features);
        // SAFETY: the arena outlives the ring.
        let mut driver = unsafe { DriverRing::new(4, features, addrs) };
        let seg = DriverSeg { addr: 0x3000, len: 8, writable: true };
        let table = Indirect { ptr: arena.host(0x3800), addr: 0x3800, cap: 2 };
        assert_eq!(driver.add(&[], None, 0), Err(Full));
        assert_eq!(driver.add(&[seg; 5], None, 0), Err(Full));
        assert_eq!(driver.add(&[seg; 3], Some(table), 0), Err(Full));
        assert_eq!(driver.free_descs(), 4);
        driver.add(&[seg; 3], None, 0).unwrap();
        driver.add(&[seg; 2], Some(table), 1).unwrap();
        assert_eq!(driver.free_descs(), 0);
        assert_eq!(driver.add(&[seg], None, 2), Err(Full));
        assert_eq!(driver.add(&[seg; 2], Some(table), 2), Err(Full));
        assert!(driver.publish());
        assert!(!driver.publish());
        assert!(!driver.has_used());
        assert_eq!(driver.poll(), None);
    }
}

#[test]
fn made_up_ids_are_not_believed() {
    let arena = Arena::new(&[(0, 0x4000)]);
    let split = RingFeatures::default();
    let (addrs, guest) = arena.ring(0, 4, split);
    // SAFETY: the arena outlives the ring.
    let mut driver = unsafe { DriverRing::new(4, split, addrs) };
    driver.add(&[DriverSeg { addr: 0x3000, len: 8, writable: true }], None, 7).unwrap();
    let _ = driver.publish();
    for (slot, id) in [(0, 3), (1, 0xffff_ffff), (2, 0)] {
        arena.put_u64(guest[2] + 4 + 8 * slot, id | 5 << 32);
    }
    arena.put_u16(guest[2] + 2, 3);
    assert_eq!(driver.poll(), Some(Used { cookie: 7, len: 5 }));
    assert_eq!(driver.poll(), None);
}

#[test]
fn a_notification_may_wait_for_several() {
    let arena = Arena::new(&[(0, 0x4000)]);
    let split = RingFeatures { event_idx: true, ..RingFeatures::default() };
    let (addrs, guest) = arena.ring(0, 4, split);
    // SAFETY: the arena outlives the ring.
    let mut driver = unsafe { DriverRing::new(4, split, addrs) };
    for cookie in 0..4 {
        driver.add(&[DriverSeg { addr: 0x3000, len: 8, writable: true }], None, cookie).unwrap();
    }
    let _ = driver.publish();
    for slot in 0..4 {
        arena.put_u64(guest[2] + 4 + 8 * slot, slot);
    }
    arena.put_u16(guest[2] + 2, 2);
    assert!(driver.enable_notify() && driver.enable_notify_after(2));
    assert!(!driver.enable_notify_after(3));
    assert_eq!(arena.bytes(guest[1] + 4 + 8, 2), [2, 0], "the third is to be told");
    arena.put_u16(guest[2] + 2, 3);
    assert!(driver.enable_notify_after(3) && !driver.enable_notify_after(4));
}
