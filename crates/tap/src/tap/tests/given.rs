//! Files that another program opened, and macvtaps.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;

use super::*;
use crate::ifreq::{IFF_MULTI_QUEUE, IFF_NO_PI, IFF_TAP, IFF_VNET_HDR};

const IFF_TUN: u16 = 1;
const GOOD: u16 = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;

fn opened(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Opens a file of an interface as another program does: it is blocking, and attached.
fn joined(name: &str, flags: u16) -> OwnedFd {
    let file = opened(CLONE_DEVICE);
    ifreq::join(&file, name, flags).unwrap();
    file.into()
}

fn adopt(fds: Vec<OwnedFd>) -> Result<Tap> {
    Tap::from_fds(fds, &Options::default())
}

fn refused_fds(fds: Vec<OwnedFd>) -> String {
    adopt(fds).expect_err("not to be had").to_string()
}

#[test]
fn lists_of_descriptors() {
    assert_eq!(parse_fds("7").unwrap(), [7]);
    assert_eq!(parse_fds("7:8:9").unwrap(), [7, 8, 9]);
    for bad in ["", "7:", ":7", "7,8", "x", "-1", "+7", "7:7", "7:99999999999"] {
        assert_eq!(parse_fds(bad).unwrap_err().kind(), Kind::Invalid, "{bad}");
    }
}

#[test]
fn files_of_others() {
    in_new_namespace(|| {
        let tap = adopt((0..3).map(|_| joined("vs0", GOOD | IFF_MULTI_QUEUE)).collect()).unwrap();
        assert_eq!((tap.name(), tap.made(), tap.multi_queue(), tap.queues_max()), ("vs0", false, true, 3));
        assert!(tap.order().is_empty());
        let queues = tap.queues(3).unwrap();
        let e = tap.queues(4).unwrap_err();
        assert!(e.kind() == Kind::Limit && e.to_string().contains("fd=7:8:9"), "{e}");
        ip("link set vs0 up");
        queues[2].attach().unwrap();
        while receive(&queues[2]).is_some() {}
        send("vs0", &frame(60)).unwrap();
        wait_until("the frame", || receive(&queues[2]).is_some_and(|got| got[10..] == frame(60)));
        assert_eq!(tap.mtu().unwrap(), 1500);
        assert!(tap.counters().unwrap().to_guest_packets >= 1);
    });
}

#[test]
fn a_file_of_a_tap_with_one_queue_and_one_that_is_detached() {
    in_new_namespace(|| {
        let tap = adopt(vec![joined("one", GOOD)]).unwrap();
        assert_eq!((tap.multi_queue(), tap.order()), (false, vec![0]));
        let many = joined("many", GOOD | IFF_MULTI_QUEUE);
        ifreq::set_queue(&many, ifreq::IFF_DETACH_QUEUE).unwrap();
        let tap = adopt(vec![many]).unwrap();
        let queue = tap.queues(1).unwrap().remove(0);
        assert!(!queue.attached());
        queue.attach().unwrap();
        assert!(queue.attached() && tap.order() == [0]);
    });
}

#[test]
fn a_file_of_another_namespace() {
    in_new_namespace(|| {
        ip("netns add red");
        let red = Netns::open(Some("red")).unwrap();
        let fd = red.run(|| joined("vs0", GOOD)).unwrap();
        ip("-n red link set vs0 mtu 2000 up");
        let tap = adopt(vec![fd]).unwrap();
        assert_eq!(tap.mtu().unwrap(), 2000);
        tap.inject(&frame(60)).unwrap();
        assert!(tap.counters().unwrap().from_guest_packets >= 1);
        let fd = red.run(|| joined("vs1", GOOD)).unwrap();
        drop_privileges();
        // An interface of the same name in this namespace is not used instead.
        let tap = adopt(vec![fd]).unwrap();
        let e = tap.mtu().unwrap_err();
        assert!(e.to_string().contains("network namespace") && tap.counters().is_none(), "{e}");
    });
}

#[test]
fn files_that_are_not_good() {
    in_new_namespace(|| {
        for path in ["/dev/null", "/etc/passwd"] {
            let said = refused_fds(vec![File::open(path).unwrap().into()]);
            assert!(said.contains("is no tap") && said.contains("IFF_VNET_HDR"), "{said}");
        }
        let many = GOOD | IFF_MULTI_QUEUE;
        let twice = joined("vs0", many);
        let single = joined("vs1", GOOD);
        let cases = [
            (vec![], "no descriptor"),
            (vec![opened(CLONE_DEVICE).into()], "TUNSETIFF"),
            (vec![joined("a", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)], "is of a tun"),
            (vec![joined("b", IFF_TAP | IFF_VNET_HDR)], "IFF_NO_PI"),
            (vec![joined("c", IFF_TAP | IFF_NO_PI)], "IFF_VNET_HDR"),
            (vec![joined("d", many), joined("e", many)], "not of the same tap"),
            (vec![joined("f", many), joined("g", GOOD)], "not of the same tap"),
            (vec![twice.try_clone().unwrap(), twice], "are the same queue"),
            (vec![single.try_clone().unwrap(), single], "are the same queue"),
        ];
        for (fds, want) in cases {
            let said = refused_fds(fds);
            assert!(said.contains(want), "{said}");
        }
    });
}

/// Makes a macvtap `mt0` on one end of a veth pair whose other end is `far`. Returns its file, or
/// `None` if the kernel has none.
fn macvtap(number: u8) -> Option<String> {
    ip("link add near type veth peer name far");
    ip("link set near up");
    ip("link set far up");
    // Its number is that of its file in /dev, which all namespaces share.
    let index = 1_000_000 + 2 * std::process::id() + u32::from(number);
    let made = Command::new("ip")
        .args(format!("link add link near name mt0 index {index} type macvtap mode bridge").split(' '))
        .status()
        .is_ok_and(|status| status.success());
    let device = format!("/dev/tap{index}");
    if !made || !Path::new(&device).exists() {
        println!("skipped: macvtaps, which need the module and its files in /dev");
        return None;
    }
    ip("link set mt0 address 02:00:00:00:00:01 up");
    Some(device)
}

/// Sends frames from `far` to a macvtap's queues, and back.
fn goes_through(tap: &Tap, queues: &[Arc<TapQueue>]) {
    let before = tap.counters().unwrap();
    for header in [HEADER_LONG, HEADER_SHORT] {
        tap.set_header(header).unwrap();
        for queue in queues {
            queue.attach().unwrap();
            while receive(queue).is_some() {}
            send("far", &frame(60)).unwrap();
            wait_until("the frame", || receive(queue).is_some_and(|got| got[header as usize..] == frame(60)));
            queue.detach().unwrap();
            queue.detach().unwrap();
        }
    }
    tap.inject(&frame(70)).unwrap();
    let after = tap.counters().unwrap();
    assert!(after.to_guest_packets - before.to_guest_packets >= 2 * queues.len() as u64);
    assert!(after.from_guest_packets > before.from_guest_packets);
}

#[test]
fn a_macvtap_by_name() {
    in_new_namespace(|| {
        let Some(device) = macvtap(0) else { return };
        let tap = Tap::open("mt0", 2).unwrap();
        assert!(!tap.made() && tap.multi_queue() && tap.order().is_empty());
        goes_through(&tap, &tap.queues(3).unwrap());
        let e = tap.queues(QUEUES_MAX + 1).unwrap_err();
        assert!(e.kind() == Kind::Limit && e.to_string().contains("256"), "{e}");
        let e = tap.set_steering(Steering::Cpu).unwrap_err();
        assert!(e.kind() == Kind::Unsupported && e.to_string().contains("no macvtap"), "{e}");
        drop(tap);
        let (kind, said) = refused_with("mt0", 1, &Options { persist: true, ..Options::default() });
        assert!(kind == Kind::Unsupported && said.contains("leave out persist"), "{said}");
        let address = Options { address: Some([2, 0, 0, 0, 0, 9]), ..Options::default() };
        Tap::open_with("mt0", 1, &address).unwrap();
        assert_eq!(links().find("mt0").unwrap().unwrap().address, address.address);
        // The file of another interface in its place.
        ip("link add link near name mt1 type macvtap mode bridge");
        let other = format!("/dev/tap{}", links().find("mt1").unwrap().unwrap().index);
        let mount = Command::new("mount").args(["--bind", &other, &device]).status();
        assert!(mount.unwrap().success());
        let (_, said) = refused("mt0", 1);
        assert!(said.contains("another network namespace") && said.contains("fd=N"), "{said}");
    });
}

#[test]
fn files_of_a_macvtap() {
    in_new_namespace(|| {
        let Some(device) = macvtap(1) else { return };
        let tap = adopt((0..2).map(|_| opened(&device).into()).collect()).unwrap();
        assert_eq!((tap.name(), tap.queues_max()), ("mt0", 2));
        goes_through(&tap, &tap.queues(2).unwrap());
    });
}
