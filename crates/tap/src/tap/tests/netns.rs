//! Interfaces of other network namespaces.

use std::os::unix::fs::PermissionsExt;

use super::*;

fn in_red() -> Options {
    Options { netns: Some("red".to_owned()), ..Options::default() }
}

#[test]
fn one_in_another_namespace() {
    in_new_namespace(|| {
        ip("netns add red");
        let tap = Tap::open_with("vs0", 2, &in_red()).unwrap();
        assert!(tap.made() && !is_there("vs0"));
        ip("-n red link show vs0");
        assert_eq!(tap.mtu().unwrap(), 1500);
        tap.set_mtu(9000).unwrap();
        assert_eq!(tap.mtu().unwrap(), 9000);
        assert_eq!(tap.queues(3).unwrap().len(), 3, "opened later, there too");
        let before = tap.counters().unwrap();
        tap.inject(&frame(60)).unwrap();
        assert_eq!(tap.counters().unwrap().from_guest_packets - before.from_guest_packets, 1);
        // An interface of the same name in this namespace is a different one.
        let here = Tap::open("vs0", 1).unwrap();
        assert_eq!(here.mtu().unwrap(), 1500);
        assert_eq!(here.counters().unwrap().from_guest_packets, 0);
        let (kind, said) = refused_with("vs0", 1, &in_red());
        assert!(kind == Kind::Busy && said.contains("vs0"), "{said}");
        drop(tap);
        let red = Netns::open(Some("red")).unwrap();
        wait_until("its end", || red.run(|| !is_there("vs0")).unwrap());
        assert!(is_there("vs0"));
    });
}

#[test]
fn one_that_is_there_in_another_namespace() {
    in_new_namespace(|| {
        ip("netns add red");
        ip("-n red tuntap add dev vs0 mode tap multi_queue");
        let by_path = Options { netns: Some("/run/netns/red".to_owned()), ..Options::default() };
        let tap = Tap::open_with("vs0", 2, &by_path).unwrap();
        assert!(!tap.made() && tap.multi_queue());
        ip("netns delete red");
        assert_eq!(tap.mtu().unwrap(), 1500, "the namespace lives as long as we have it");
        drop(tap);
        let own = Options { netns: Some("/proc/thread-self/ns/net".to_owned()), ..Options::default() };
        let tap = Tap::open_with("vs0", 1, &own).unwrap();
        assert!(tap.made() && is_there("vs0"), "the path of our own");
    });
}

#[test]
fn namespaces_that_cannot_be() {
    in_new_namespace(|| {
        let refused = |netns: &str| {
            let options = Options { netns: Some(netns.to_owned()), ..Options::default() };
            refused_with("vs0", 1, &options)
        };
        let (kind, said) = refused("blue");
        assert!(kind == Kind::NotFound && said.contains("ip netns add blue"), "{said}");
        let (kind, said) = refused("/run/netns/blue");
        assert!(kind == Kind::NotFound && said.contains("/run/netns/blue"), "{said}");
        for none in ["/etc/passwd", "/proc/thread-self/ns/uts", "/dev/null"] {
            let (kind, said) = refused(none);
            assert!(
                kind == Kind::Invalid && said.contains(&format!("{none} is no network namespace")),
                "{said}"
            );
        }
        for bad in ["", ".", ".."] {
            assert_eq!(refused(bad).0, Kind::Invalid, "{bad}");
        }
        assert!(!is_there("vs0"));
        ip("netns add red");
        // `ip` makes the folder, and obeys the umask.
        std::fs::set_permissions("/run/netns", std::fs::Permissions::from_mode(0o755)).unwrap();
        drop_privileges();
        let (_, said) = refused("red");
        assert!(said.contains("no permission to enter") && said.contains("CAP_SYS_ADMIN"), "{said}");
    });
}
