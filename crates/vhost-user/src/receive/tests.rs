use std::io::IoSlice;
use std::net::TcpListener;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

/// Sends bytes with descriptors.
fn pass(to: &UnixStream, bytes: &[u8], fds: &[&OwnedFd]) {
    pass_by(to, bytes, fds, SendFlags::empty());
}

fn pass_by(to: &UnixStream, bytes: &[u8], fds: &[&OwnedFd], flags: SendFlags) {
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
}

/// How many bytes can be had, and whether descriptors come with them.
fn seen(stream: &UnixStream, room: usize) -> Option<(usize, bool)> {
    look(stream, room).unwrap().map(|look| (look.bytes, look.fds))
}

fn memory() -> OwnedFd {
    rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

fn file() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

#[test]
fn a_look_tells_of_descriptors_and_takes_nothing() {
    let (near, far) = UnixStream::pair().unwrap();
    assert_eq!(seen(&near, 100), None);
    pass(&far, b"abc", &[]);
    assert_eq!(seen(&near, 100), Some((3, false)));
    assert_eq!(seen(&near, 2), Some((2, false)));
    assert_eq!(read(&near, 2).unwrap(), b"ab");
    pass(&far, b"d", &[&file()]);
    pass(&far, b"e", &[]);
    // What follows a descriptor is another read's.
    for _ in 0..2 {
        assert_eq!(seen(&near, 100), Some((2, true)));
    }
    assert_eq!(read(&near, 1).unwrap(), b"c");
    let (bytes, fds) = Receiver::new(true).receive(&near, 100).unwrap();
    assert_eq!((bytes.as_slice(), fds.len()), (b"d".as_slice(), 1));
    assert_eq!(read(&near, 1).unwrap(), b"e");
    drop(far);
    assert_eq!(seen(&near, 100), Some((0, false)));
}

#[test]
fn what_is_read_without_room_for_descriptors_closes_them() {
    let (near, far) = UnixStream::pair().unwrap();
    let (theirs, other) = UnixStream::pair().unwrap();
    pass(&far, b"abc", &[&theirs.into()]);
    assert_eq!(read(&near, 3).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
    assert_eq!(seen(&other, 1), Some((0, false)), "the socket that was passed is still open");
}

#[test]
fn descriptors_are_taken_whose_close_waits_for_nobody() {
    let (near, far) = UnixStream::pair().unwrap();
    let tcp: OwnedFd = TcpListener::bind("127.0.0.1:0").unwrap().into();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (socket, _) = UnixStream::pair().unwrap();
    let (memory, file) = (memory(), file());
    let all = [&memory, &tcp, &eventfd, &pipe, &socket.into(), &file];
    pass(&far, b"x", &all);
    let (_, fds) = Receiver::new(false).receive(&near, 1).unwrap();
    assert_eq!((fds.taken.len(), fds.refused.len()), (3, 3), "{:?}", fds.refused);
    assert_eq!(fds.refused[2], "/dev/null");
    pass(&far, b"x", &all);
    assert_eq!(Receiver::new(true).receive(&near, 1).unwrap().1.taken.len(), all.len() - 1);
}

#[test]
fn more_descriptors_than_a_message_may_have_are_an_error() {
    let (near, far) = UnixStream::pair().unwrap();
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for count in [FDS_MAX + 1, FDS_MAX + 2, 2 * FDS_MAX] {
        pass(&far, b"x", &vec![&eventfd; count]);
        let e = Receiver::new(false).receive(&near, 1).unwrap_err();
        assert!(e.to_string().contains("too many"), "{e}");
    }
    pass(&far, b"x", &vec![&eventfd; FDS_MAX]);
    assert_eq!(Receiver::new(false).receive(&near, 1).unwrap().1.len(), FDS_MAX);
    let mut fds = Descriptors::default();
    for number in 0..=FDS_MAX {
        let more = Descriptors { taken: Vec::new(), refused: vec!["a file".to_owned()] };
        assert_eq!(fds.append(more).is_ok(), number < FDS_MAX);
    }
}

#[test]
fn names_are_short_and_have_no_control_characters() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a\x1b[2J\n".repeat(20));
    std::fs::write(&path, "").unwrap();
    let name = name(&std::fs::File::open(&path).unwrap().into());
    assert!(name.len() <= NAME_MAX && !name.contains(char::is_control), "{name:?}");
}

#[test]
fn a_socket_is_emptied_before_it_is_taken() {
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let (near, far) = UnixStream::pair().unwrap();
        let (socket, end) = UnixStream::pair().unwrap();
        let (hidden, other) = UnixStream::pair().unwrap();
        let hidden = OwnedFd::from(hidden);
        pass(&end, b"a", &[&hidden]);
        pass_by(&end, b"b", &[&hidden], flags);
        drop(hidden);
        pass(&far, b"x", &[&socket.into()]);
        let (_, fds) = Receiver::new(false).receive(&near, 1).unwrap();
        assert_eq!(fds.taken.len(), 1);
        assert_eq!(seen(&other, 1), Some((0, false)), "what was hidden is still open");
        let more =
            sendmsg(&end, &[IoSlice::new(b"c")], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        assert_eq!(more, Err(Errno::PIPE));
    }
}

#[test]
fn sockets_that_cannot_be_emptied_are_not_taken() {
    use rustix::net::{SocketType, socket};
    let (near, far) = UnixStream::pair().unwrap();
    let listening = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let address = rustix::net::SocketAddrUnix::new(dir.path().join("socket")).unwrap();
    rustix::net::bind(&listening, &address).unwrap();
    rustix::net::listen(&listening, 1).unwrap();
    let datagrams = socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
    let packets = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    for any in [false, true] {
        pass(&far, b"x", &[&listening, &datagrams, &packets]);
        assert_eq!(Receiver::new(any).receive(&near, 1).unwrap().1.refused.len(), 3);
    }
}

#[test]
fn a_connection_that_is_over_is_emptied_while_others_have_it() {
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let (near, far) = UnixStream::pair().unwrap();
        let (hidden, other) = UnixStream::pair().unwrap();
        pass(&far, b"abc", &[]);
        pass_by(&far, b"d", &[&hidden.into()], flags);
        let mut receiver = Receiver::new(false);
        let _kept = near.try_clone().unwrap();
        receiver.close(near);
        assert_eq!(seen(&other, 1), Some((0, false)), "what was hidden is still open");
        assert!(receiver.has_room("e") && !receiver.has_ended());
    }
}
