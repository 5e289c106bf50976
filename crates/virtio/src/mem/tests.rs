use super::*;
use crate::testing::{Rng, iterations};

/// Makes a region whose pages are only addresses: these tests follow no pointer.
fn region(guest_addr: u64, size: u64, host: usize) -> Region {
    Region {
        guest_addr,
        user_addr: guest_addr + 0x1000_0000,
        size,
        host: host as *mut u8,
        keep: Arc::new(()),
    }
}

fn table(regions: Vec<Region>) -> Result<GuestMemory, MemError> {
    // SAFETY: nothing follows the pointers.
    unsafe { GuestMemory::new(regions) }
}

#[test]
fn bad_tables_are_refused() {
    let refused = |regions| table(regions).err();
    assert_eq!(refused(vec![region(0, 0, 0x1000)]), Some(MemError::Empty { guest_addr: 0 }));
    assert_eq!(
        refused(vec![region(0x2000, 0x1000, 0x1000), region(0, 0x2001, 0x9000)]),
        Some(MemError::Overlap { guest_addr: 0x2000 })
    );
    let end = u64::MAX - 0xfff;
    let last = Region { user_addr: 0, ..region(0, 0x1001, 0x1000) };
    assert_eq!(
        refused(vec![Region { guest_addr: end, ..last }]),
        Some(MemError::Overflow { guest_addr: end })
    );
    assert_eq!(
        refused(vec![Region { user_addr: end, ..region(0, 0x1001, 0x1000) }]),
        Some(MemError::Overflow { guest_addr: 0 })
    );
    assert_eq!(refused(vec![region(0, 0x1001, end as usize)]), Some(MemError::Overflow { guest_addr: 0 }));
    assert_eq!(refused(vec![region(0, u64::MAX, 1)]), Some(MemError::Overflow { guest_addr: 0 }));
    let many = |n: u64| (0..n).map(|i| region(i * 0x1000, 0x1000, 0x1000)).collect();
    assert_eq!(refused(many(510)), Some(MemError::TooMany(510)));
    assert_eq!(table(many(509)).unwrap().regions().len(), 509);
}

#[test]
fn an_empty_guest_has_nothing() {
    let mem = GuestMemory::empty();
    assert_eq!(mem.translate(&mut RegionHint::default(), 0, 0), None);
    assert!(mem.translate_each(&mut RegionHint(7), 0, 1, |_, _| {}).is_err());
    assert_eq!(mem.user_to_host(0, 1), None);
    assert_eq!(mem.host_to_guest(std::ptr::null()), None);
}

#[test]
fn translations_agree_with_a_simple_search() {
    for seed in 0..iterations(200) {
        let mut rng = Rng::new(seed);
        let (mut at, mut host, mut regions) = (rng.below(3) * 16, 0x10_0000, Vec::new());
        for _ in 0..1 + rng.below(6) {
            let size = 1 + rng.below(64);
            regions.push((at, size, host));
            at += size + if rng.one_in(2) { 0 } else { 1 + rng.below(32) };
            host += 0x1000;
        }
        let mut shuffled: Vec<_> = regions.iter().map(|&(a, s, h)| region(a, s, h)).collect();
        let shift = rng.below(shuffled.len() as u64) as usize;
        shuffled.rotate_left(shift);
        let mem = table(shuffled).unwrap();
        let byte = |guest: u64| {
            regions.iter().find(|r| guest >= r.0 && guest - r.0 < r.1).map(|r| r.2 + (guest - r.0) as usize)
        };
        let mut hint = RegionHint(rng.below(9) as usize);
        for _ in 0..200 {
            let (addr, len) = if rng.one_in(10) {
                (rng.next(), rng.next() >> rng.below(64))
            } else {
                (rng.below(at + 8), rng.below(80))
            };
            let small = len < 1000;
            let one = regions.iter().any(|r| addr >= r.0 && addr - r.0 < r.1 && len <= r.1 - (addr - r.0));
            let found = mem.translate(&mut hint, addr, len).map(|p| p.addr());
            assert_eq!(found, if one { byte(addr) } else { None }, "{addr:#x} {len}");
            let mut got = Vec::new();
            let each = mem.translate_each(&mut hint, addr, len, |p, n| got.extend(p.addr()..p.addr() + n));
            let wanted: Option<Vec<usize>> =
                if small { (0..len).map(|i| byte(addr.checked_add(i)?)).collect() } else { None };
            assert_eq!(each.is_ok(), wanted.is_some());
            if let Some(wanted) = wanted {
                assert_eq!(got, wanted);
            }
            let user = addr.wrapping_add(0x1000_0000);
            assert_eq!(mem.user_to_host(user, len).map(|p| p.addr()), if one { byte(addr) } else { None });
            assert_eq!(mem.user_to_guest(user), byte(addr).map(|_| addr));
            if let Some(host) = byte(addr) {
                assert_eq!(mem.host_to_guest(host as *const u8), Some(addr));
            }
        }
    }
}
