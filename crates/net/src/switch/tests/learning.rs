//! The table of stations: learning, moves, ageing, and fair sharing.

use super::super::macs::{AGE_S, Learnt, MACS_MAX, Macs};
use super::*;

fn station(number: u32) -> Address {
    let [a, b, c, d] = number.to_be_bytes();
    Address::new([2, 0, a, b, c, d])
}

#[test]
fn addresses_are_learnt_followed_and_forgotten() {
    let (macs, own) = (Macs::new(), Learnt::new(256));
    assert_eq!(macs.find(station(1), 0, 0), None);
    macs.learn(station(1), 0, 3, &own, 0);
    macs.learn(station(2), 0, 4, &own, 0);
    assert_eq!((macs.find(station(1), 0, 1), macs.find(station(2), 0, 1)), (Some(3), Some(4)));
    // Another VLAN is another network.
    assert_eq!(macs.find(station(1), 7, 1), None);
    macs.learn(station(1), 7, 6, &own, 1);
    assert_eq!((macs.find(station(1), 0, 1), macs.find(station(1), 7, 1)), (Some(3), Some(6)));
    macs.learn(station(1), 0, 5, &own, 2);
    assert_eq!((macs.find(station(1), 0, 2), macs.len(2)), (Some(5), 3));
    assert_eq!([3, 4, 5, 6].map(|port| macs.count(port)), [0, 1, 1, 1]);
    assert_eq!(macs.find(station(2), 0, AGE_S), Some(4));
    assert_eq!(macs.find(station(2), 0, AGE_S + 1), None);
    assert_eq!(macs.find(station(1), 0, AGE_S + 2), Some(5));
    macs.forget(5);
    assert_eq!((macs.find(station(1), 0, 2), macs.count(5)), (None, 0));
    // Neither zero nor a group's address is a station's.
    for bytes in [[0; 6], [1, 0, 0, 0, 0, 1], [0xFF; 6]] {
        macs.learn(Address::new(bytes), 0, 7, &own, 0);
        assert_eq!(macs.find(Address::new(bytes), 0, 0), None);
    }
    assert_eq!(macs.count(7), 0);
}

#[test]
fn a_port_at_its_limit_gives_up_its_own_oldest() {
    let (macs, few, others) = (Macs::new(), Learnt::new(4), Learnt::new(256));
    (0..100).for_each(|number| macs.learn(station(number), 0, 1, &others, 0));
    let known = |number, now| macs.find(station(number), 0, now) == Some(2);
    for number in 1000..1004 {
        macs.learn(station(number), 0, 2, &few, number - 1000);
    }
    // 1000 was the first, and was seen again since.
    macs.learn(station(1000), 0, 2, &few, 9);
    macs.learn(station(1004), 0, 2, &few, 10);
    assert_eq!([1000, 1001, 1002, 1003, 1004].map(|n| known(n, 10)), [true, false, true, true, true]);
    (2000..60_000).for_each(|number| macs.learn(station(number), 0, 2, &few, 11));
    assert_eq!(macs.count(2), 4);
    // The other port loses entries only in full sets that both ports use.
    assert_eq!((0..100).filter(|n| macs.find(station(*n), 0, 11) == Some(1)).count(), 100);
    // Stations that move to another port make room.
    (59_996..60_000).for_each(|number| macs.learn(station(number), 0, 1, &others, 12));
    assert_eq!((macs.count(2), macs.count(1)), (0, 104));
    (1000..1004).for_each(|number| macs.learn(station(number), 0, 2, &few, 12));
    assert_eq!(macs.count(2), 4);
}

#[test]
fn a_full_table_is_shared_fairly() {
    let macs = Macs::new();
    let (all, guest) = (Learnt::new(MACS_MAX as u32), Learnt::new(256));
    (0..100_000).for_each(|number| macs.learn(station(number), 0, 1, &all, 0));
    assert!(macs.count(1) as usize > MACS_MAX * 9 / 10, "{}", macs.count(1));
    // A port with few addresses always gets a place, from the port with most.
    for number in 200_000..200_200 {
        macs.learn(station(number), 0, 2, &guest, 1);
        assert_eq!(macs.find(station(number), 0, 1), Some(2));
    }
    assert_eq!(macs.count(2), 200);
    // And it keeps the place.
    (300_000..400_000).for_each(|number| macs.learn(station(number), 0, 1, &all, 2));
    let kept = (200_000..200_200).filter(|n| macs.find(station(*n), 0, 2) == Some(2)).count();
    assert_eq!(kept, 200);
}

#[test]
fn workers_that_learn_at_once_keep_the_count() {
    let macs = Macs::new();
    let owns = [Learnt::new(64), Learnt::new(1000)];
    std::thread::scope(|scope| {
        for worker in 0..4u32 {
            let (macs, owns) = (&macs, &owns);
            scope.spawn(move || {
                for iteration in 0..20_000u32 {
                    let port = (iteration + worker) % 2;
                    let number = iteration.wrapping_mul(2_654_435_761) % 3000;
                    macs.learn(station(number), 0, port as u16, &owns[port as usize], iteration / 1000);
                }
            });
        }
    });
    let counts = [macs.count(0), macs.count(1)];
    assert_eq!(counts[0] + counts[1], macs.len(20) as u32);
    // Each running worker may be between two steps.
    assert!(counts[0] <= 64 + 4 && counts[1] <= 1000 + 4, "{counts:?}");
    (0..2).for_each(|port| macs.forget(port));
    assert_eq!((macs.count(0), macs.count(1), macs.len(20)), (0, 0, 0));
}

#[test]
fn all_stations_are_listed() {
    for _ in 0..20 {
        // Each table has another secret.
        let (macs, all) = (Macs::new(), Learnt::new(MACS_MAX as u32));
        let known = |number: u32| super::super::macs::Known {
            address: station(number.wrapping_mul(0x9E37_79B9)),
            vlan: (number % 4095) as u16,
            port: (number % 256) as u16,
            age_s: 0,
        };
        for known in (0..500).map(known) {
            macs.learn(known.address, known.vlan, known.port, &all, 7);
        }
        let key = |known: &super::super::macs::Known| (known.address.number(), known.vlan);
        let (mut want, mut found) = ((0..500).map(known).collect::<Vec<_>>(), macs.all(7));
        want.sort_by_key(key);
        found.sort_by_key(key);
        assert_eq!(found, want);
        assert!(macs.all(10).iter().all(|known| known.age_s == 3));
        assert_eq!(macs.all(7 + AGE_S + 1), []);
    }
}

#[test]
fn a_switch_tells_addresses_by_configuration_and_learnt_ones() {
    use vshunt_types::spec::{AddressOrigin, Mac, NetAddress};
    let switch = Switch::new("s");
    let mac = |last: u8| [2, 0, 0, 0, 0, last];
    let fixed = switch.join(1, PortOptions { mac: Some(mac(9)), ..guest("fixed") }).unwrap();
    let (b, a) = (switch.join(1, guest("b")).unwrap(), switch.join(1, guest("a")).unwrap());
    // 4 is learnt before it is known as the host's.
    for (port, from) in [(&b, 1), (&a, 2), (&a, 1), (&b, 4), (&fixed, 9)] {
        let info = inspect(&frame(false, 0, (from, 5), (7, 6), 6));
        switch.route(&switch.view(), port, &info, 0, switch.now_s()).unwrap();
    }
    switch.set_hosts(&b, vec![mac(4)]);
    let shown = |n: &NetAddress| (n.address, n.vlan, n.export.clone(), n.origin, n.age_s.is_some());
    let want = [
        (4, "b", AddressOrigin::Host, false),
        (9, "fixed", AddressOrigin::Configured, false),
        (1, "a", AddressOrigin::Learnt, true),
        (2, "a", AddressOrigin::Learnt, true),
    ];
    let want = want.map(|(last, port, origin, aged)| (Mac(mac(last)), None, port.to_owned(), origin, aged));
    assert_eq!(switch.stations().iter().map(shown).collect::<Vec<_>>(), want);
    // The stations of a removed port are not listed.
    switch.leave(a.index);
    assert!(switch.stations().iter().all(|n| n.export != "a"));
}
