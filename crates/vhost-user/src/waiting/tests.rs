use std::mem::MaybeUninit;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};

use super::super::receive::Receiver;
use super::*;

/// A listener, and the path that it listens at, in a folder that is removed with it.
fn listener() -> (UnixListener, std::path::PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    (listener, path, dir)
}

/// Sends a byte with a descriptor.
fn pass(to: &UnixStream, fd: &UnixStream, flags: SendFlags) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[io::IoSlice::new(b"x")], &mut control, flags).unwrap();
}

fn hung_up(stream: &UnixStream) -> bool {
    recv(stream, &mut [0u8; 1][..], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n == 0)
}

#[test]
fn the_end_of_the_connection_that_is_served_does_not_stay_in_one_that_waits() {
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let (listener, path, _dir) = listener();
        let mut waiting = Waiting::new("vm0", Some(&listener));
        let (served, theirs) = UnixStream::pair().unwrap();
        let other = UnixStream::connect(&path).unwrap();
        pass(&other, &theirs, flags);
        // It also has its own end in itself.
        pass(&other, &other, flags);
        drop((theirs, other));
        assert!(!hung_up(&served));
        waiting.update(&mut Receiver::new(false));
        waiting.update(&mut Receiver::new(false));
        assert!(hung_up(&served));
        assert!(waiting.next().is_none());
    }
}

#[test]
fn no_number_of_connections_that_wait_keeps_others_from_being_read() {
    let (listener, path, _dir) = listener();
    let mut waiting = Waiting::new("vm0", Some(&listener));
    let (served, theirs) = UnixStream::pair().unwrap();
    let idle: Vec<_> = (0..=WAITING_MAX).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let last = UnixStream::connect(&path).unwrap();
    pass(&last, &theirs, SendFlags::empty());
    for end in &idle {
        pass(&last, end, SendFlags::empty());
    }
    drop((theirs, last, idle));
    for _ in 0..2 * WAITING_MAX {
        waiting.update(&mut Receiver::new(false));
    }
    assert!(hung_up(&served));
    assert!(waiting.next().is_none());
}

#[test]
fn front_ends_that_wait_are_served_in_their_order_with_what_they_have_sent() {
    use std::io::Write;
    let (listener, path, _dir) = listener();
    let mut waiting = Waiting::new("vm0", Some(&listener));
    let mut ends: Vec<_> = (0..WAITING_MAX).map(|_| UnixStream::connect(&path).unwrap()).collect();
    for (number, end) in (1u32..).zip(&mut ends) {
        for word in [number, 1, 0] {
            end.write_all(&word.to_ne_bytes()).unwrap();
        }
    }
    for _ in 0..=WAITING_MAX {
        waiting.update(&mut Receiver::new(false));
    }
    // The second has left meanwhile.
    drop(ends.remove(1));
    waiting.update(&mut Receiver::new(false));
    for number in [1, 3, 4] {
        let mut next = waiting.next().unwrap();
        assert!(next.reader.is_ready());
        assert_eq!(next.reader.next(&next.stream, &mut Receiver::new(false)).unwrap().unwrap().code, number);
    }
    assert!(waiting.next().is_none());
}
