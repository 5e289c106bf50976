//! Owner, group, persistence and address of an interface.

use super::*;

/// Reads a file of an interface in /sys of this namespace.
fn sys(name: &str, file: &str) -> String {
    std::fs::read_to_string(Path::new("/sys/class/net").join(name).join(file)).unwrap().trim().to_owned()
}

#[test]
fn one_that_persists() {
    in_new_namespace(|| {
        let options = Options {
            address: Some([2, 1, 2, 3, 4, 5]),
            owner: Some(65534),
            group: Some(1234),
            persist: true,
            ..Options::default()
        };
        for _ in 0..2 {
            let mut tap = None;
            wait_until("a free tap", || {
                tap = Tap::open_with("vs0", 2, &options).ok();
                tap.is_some()
            });
            let tap = tap.unwrap();
            assert!(!tap.made());
            assert_eq!(sys("vs0", "address"), "02:01:02:03:04:05");
            assert_eq!((sys("vs0", "owner"), sys("vs0", "group")), ("65534".into(), "1234".into()));
        }
        let tap = open_again("vs0", 2);
        assert_eq!(sys("vs0", "owner"), "65534", "what is not asked for stays");
        drop(tap);
        assert!(is_there("vs0"));
    });
}

#[test]
fn what_fails_leaves_nothing() {
    in_new_namespace(|| {
        // A group address.
        let options = Options { address: Some([3, 0, 0, 0, 0, 1]), persist: true, ..Options::default() };
        let (_, said) = refused_with("vs0", 2, &options);
        assert!(said.contains("vs0 cannot have the address"), "{said}");
        wait_until("its end", || !is_there("vs0"));
    });
}
