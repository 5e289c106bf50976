//! Tests with the kernel, each in its own network namespace. They need root, and are skipped
//! without it.

mod given;
mod netns;
mod order;
mod rights;
mod steering;

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;

use vshunt_types::error::Kind;

use super::*;
use crate::open::CLONE_DEVICE;
use crate::parse_fds;

/// Runs `test` on a new thread in a new network namespace, with a /sys that shows it and an empty
/// /run.
fn in_new_namespace(test: impl FnOnce() + Send + 'static) {
    let run = || {
        // SAFETY: this thread gets new namespaces. The call accesses no memory.
        let new = unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) };
        let mount = |args: &[&str]| Command::new("mount").args(args).status().is_ok_and(|s| s.success());
        let can = new == 0
            && Path::new(CLONE_DEVICE).exists()
            && mount(&["--make-rprivate", "/"])
            && mount(&["-t", "sysfs", "sysfs", "/sys"])
            && mount(&["-t", "tmpfs", "tmpfs", "/run"]);
        if !can {
            println!("skipped: taps, which need root and {CLONE_DEVICE}");
            return;
        }
        // Otherwise the host sends frames by itself.
        for which in ["all", "default"] {
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
        }
        test();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs the program `ip` in this namespace.
fn ip(args: &str) {
    assert!(Command::new("ip").args(args.split(' ')).status().unwrap().success(), "ip {args}");
}

fn refused(name: &str, queues: u16) -> (Kind, String) {
    refused_with(name, queues, &Options::default())
}

fn refused_with(name: &str, queues: u16, options: &Options) -> (Kind, String) {
    let e = Tap::open_with(name, queues, options).expect_err("not to be had");
    (e.kind(), e.to_string())
}

/// Returns access to the interfaces of this namespace.
fn links() -> Links {
    Links::new().unwrap()
}

fn is_there(name: &str) -> bool {
    links().find(name).unwrap().is_some()
}

/// Opens a tap that this process had open before: see [`wait_until`].
fn open_again(name: &str, queues: u16) -> Tap {
    let mut tap = None;
    wait_until("a free tap", || match Tap::open(name, queues) {
        Ok(opened) => tap.insert(opened).multi_queue() || queues == 1,
        Err(e) if e.kind() == Kind::Busy => false,
        Err(e) => panic!("{e}"),
    });
    tap.unwrap()
}

/// Gives up all rights of the calling thread.
fn drop_privileges() {
    // SAFETY: the raw call changes only this thread's own credentials, and accesses no memory.
    // libc's function would change all threads.
    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
}

/// Waits until the kernel has closed the files. A child that another test has just forked may have
/// them until it executes another program.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed().as_secs() < 60, "{what} does not come about");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Sends frames out of an interface, as the host does.
struct Wire {
    socket: OwnedFd,
    index: i32,
}

impl Wire {
    fn new(name: &str) -> Self {
        let index = links().find(name).unwrap().unwrap().index;
        let family = rustix::net::AddressFamily::PACKET;
        let (kind, flags) = (rustix::net::SocketType::RAW, rustix::net::SocketFlags::CLOEXEC);
        Self { socket: rustix::net::socket_with(family, kind, flags, None).unwrap(), index }
    }

    fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: an all-zero sockaddr_ll is valid, because it has only numbers.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        (to.sll_family, to.sll_ifindex) = (libc::AF_PACKET as u16, self.index);
        let (fd, len) = (self.socket.as_raw_fd(), size_of::<libc::sockaddr_ll>() as u32);
        // SAFETY: frame and address have the given lengths, and outlive the call.
        let sent =
            unsafe { libc::sendto(fd, frame.as_ptr().cast(), frame.len(), 0, (&raw const to).cast(), len) };
        match sent {
            n if n as usize == frame.len() => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn send(name: &str, frame: &[u8]) -> io::Result<()> {
    Wire::new(name).send(frame)
}

/// Returns the next frame of a queue with its header, if there is one.
fn receive(queue: &TapQueue) -> Option<Vec<u8>> {
    let mut frame = vec![0; 70_000];
    let mut queue = queue;
    match queue.read(&mut frame) {
        Ok(n) => Some(frame[..n].to_vec()),
        Err(e) => {
            assert_eq!(e.kind(), io::ErrorKind::WouldBlock, "{e}");
            None
        }
    }
}

/// Makes an Ethernet frame of `len` bytes, of a type that no program answers.
fn frame(len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| i as u8).collect();
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xB5]);
    frame
}

#[test]
fn names_and_mtus_that_cannot_be() {
    for name in ["", ".", "..", "a/b", "a b", "tap%d", "a:b", "sixteen-bytes-xx"] {
        assert_eq!(check_name(name).unwrap_err().kind(), Kind::Invalid, "{name}");
    }
    check_name("fifteen-bytes-x").unwrap();
    assert!(check_mtu(67).is_err() && check_mtu(65522).is_err());
    check_mtu(68).unwrap();
    check_mtu(65521).unwrap();
}

#[test]
fn offloads_that_make_no_sense_are_left_out() {
    let all = Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: true, uso: true };
    assert_eq!(all.bits(), 0x7F);
    assert_eq!(Offloads { csum: false, ..all }.bits(), 0);
    assert_eq!(Offloads { tso4: false, tso6: false, ..all }.bits(), 0x71, "no ECN without TSO");
}

#[test]
fn one_that_is_made_goes_with_us() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 3).unwrap();
        assert!(tap.made() && tap.multi_queue() && tap.open_queues() == 3);
        assert_eq!(tap.mtu().unwrap(), 1500);
        tap.set_mtu(9000).unwrap();
        assert_eq!(tap.mtu().unwrap(), 9000);
        assert_eq!(tap.counters().unwrap().to_guest_bytes, 0);
        assert!(is_there("vs0"));
        let queue = tap.queues(1).unwrap();
        drop(tap);
        assert!(is_there("vs0"), "a queue is open");
        drop(queue);
        wait_until("its end", || !is_there("vs0"));
    });
}

#[test]
fn one_that_was_there_stays() {
    in_new_namespace(|| {
        ip("tuntap add dev vs0 mode tap multi_queue");
        ip("link set vs0 up");
        for _ in 0..3 {
            let tap = open_again("vs0", 2);
            assert!(!tap.made() && tap.multi_queue());
        }
        assert!(is_there("vs0"));
    });
}

#[test]
fn one_with_a_single_queue_is_good_for_one() {
    in_new_namespace(|| {
        ip("tuntap add dev vs1 mode tap");
        ip("link set vs1 up");
        let tap = Tap::open("vs1", 1).unwrap();
        assert!(!tap.multi_queue());
        let queue = tap.queues(1).unwrap().remove(0);
        assert!(queue.attached());
        queue.detach().unwrap();
        assert!(queue.attached(), "the kernel does not detach it");
        while receive(&queue).is_some() {}
        send("vs1", &frame(60)).unwrap();
        // Another CPU may still be processing it.
        wait_until("the frame", || receive(&queue).is_some());
        let e = tap.queues(2).unwrap_err();
        assert!(e.kind() == Kind::Unsupported && e.to_string().contains("multi_queue"), "{e}");
        drop((tap, queue));
        drop(open_again("vs1", 1));
        let mut refusal = None;
        wait_until("a free tap", || {
            refusal = Tap::open("vs1", 2).err();
            refusal.as_ref().is_none_or(|e| e.kind() != Kind::Busy)
        });
        let e = refusal.expect("it has one queue");
        assert!(e.kind() == Kind::Unsupported && e.to_string().contains("give queues=1"), "{e}");
    });
}

#[test]
fn what_is_no_tap_or_in_use_is_refused() {
    in_new_namespace(|| {
        ip("tuntap add dev vs1 mode tun");
        for name in ["lo", "vs1"] {
            let (kind, said) = refused(name, 1);
            assert!(kind == Kind::Invalid && said.contains("is no tap"), "{said}");
        }
        ip("tuntap add dev one mode tap");
        ip("tuntap add dev down mode tap multi_queue");
        for name in ["one", "many", "down"] {
            let _theirs = Tap::open(name, 1).unwrap();
            let (kind, said) = refused(name, 1);
            assert!(kind == Kind::Busy && said.contains(name), "{said}");
        }
    });
}

#[test]
fn a_tap_has_256_queues() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", QUEUES_MAX).unwrap();
        let e = tap.queues(QUEUES_MAX + 1).unwrap_err();
        assert!(e.kind() == Kind::Limit && e.to_string().contains("256"), "{e}");
    });
}

#[test]
fn frames_come_to_queues_that_are_attached() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 2).unwrap();
        let queues = tap.queues(2).unwrap();
        assert!(queues.iter().all(|q| !q.attached()));
        // The kernel may take it, and drops it.
        let _ = send("vs0", &frame(60));
        tap.set_header(HEADER_LONG).unwrap();
        queues[1].attach().unwrap();
        queues[1].attach().unwrap();
        while let Some(other) = receive(&queues[1]) {
            assert_ne!(other.get(12..), Some(&frame(60)[..]), "it came when nobody read");
        }
        send("vs0", &frame(61)).unwrap();
        let got = receive(&queues[1]).unwrap();
        assert_eq!((got.len(), &got[12..]), (73, &frame(61)[..]), "behind a header of 12 bytes");
        assert!(receive(&queues[0]).is_none());
        send("vs0", &frame(62)).unwrap();
        queues[1].detach().unwrap();
        queues[0].attach().unwrap();
        queues[1].attach().unwrap();
        assert!(receive(&queues[1]).is_none(), "what waited is dropped");
        assert!(tap.counters().unwrap().to_guest_packets >= 1);
    });
}

#[test]
fn the_header_and_what_is_injected() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 1).unwrap();
        for header in [HEADER_SHORT, HEADER_LONG] {
            tap.set_header(header).unwrap();
            let before = tap.counters().unwrap();
            tap.inject(&frame(60)).unwrap();
            let after = tap.counters().unwrap();
            assert_eq!(after.from_guest_packets - before.from_guest_packets, 1, "header {header}");
            assert_eq!(after.from_guest_bytes - before.from_guest_bytes, 60);
        }
        ip("link set vs0 down");
        assert!(tap.inject(&frame(60)).unwrap_err().to_string().contains("is it up?"));
    });
}

#[test]
fn offloads_are_as_told() {
    in_new_namespace(|| {
        let tap = Tap::open("vs0", 2).unwrap();
        let all = Offloads { csum: true, tso4: true, tso6: true, ecn: true, ufo: true, uso: tap.has_uso() };
        tap.set_offloads(all).unwrap();
        tap.set_offloads(Offloads::default()).unwrap();
    });
}

#[test]
fn without_a_privilege_it_says_which() {
    // Before udev has opened the device to all users, and after that.
    for (mode, what) in [("600", format!("to open {CLONE_DEVICE}")), ("666", "to make tap vs0".to_owned())] {
        in_new_namespace(move || {
            let own = "cp -a \"$0\" /run/node; chmod \"$1\" /run/node; mount --bind /run/node \"$0\"";
            let made = Command::new("sh").args(["-ec", own, CLONE_DEVICE, mode]).status();
            assert!(made.unwrap().success());
            drop_privileges();
            let (_, said) = refused("vs0", 1);
            assert!(
                said.contains(&format!("no permission {what}")) && said.contains("run as root"),
                "{said}"
            );
        });
    }
}
