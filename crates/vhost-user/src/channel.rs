//! Sockets that a front end passes to the daemon for writing. They must not keep a connection open.
//!
//! A connection ends when the last descriptor of the front end's socket is closed. A hostile front
//! end may pass that socket to the daemon, or queue it in a socket that it passes. Then the daemon
//! itself would keep the connection open, and its export busy, forever.
//!
//! So [`write_only`] shuts down the receiving direction of each socket that is passed, after which
//! nothing can be queued in it, and discards its queue. If the socket is the front end's end of a
//! connection to this daemon, that connection cannot send any more. No other connection is in this
//! state, so the daemon ends every connection that is.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SendFlags, SocketType, getpeername, send};

use super::receive::stop_reading;
use vshunt_types::sync::Locked;

/// All connections of front ends in this process. Guards the list, and the search for connections
/// whose other end stopped receiving. Held for a push or a search.
static CONNECTIONS: Mutex<Vec<Weak<UnixStream>>> = Mutex::new(Vec::new());

/// Registers a connection, so that it ends when its other end is passed to this daemon.
pub(super) fn register(stream: &Arc<UnixStream>) {
    let mut list = CONNECTIONS.locked();
    list.retain(|other| other.strong_count() > 0);
    list.push(Arc::downgrade(stream));
    // Its other end may have been passed before the connection was accepted.
    end_if_peer_stopped_receiving(stream);
}

/// Makes a socket of a front end write-only, so that it keeps nothing open. `own`: the connection
/// of the front end.
///
/// # Errors
/// It is not a connected UNIX stream socket, or it is the other end of `own`, which has ended then.
pub(super) fn write_only(fd: &OwnedFd, own: Option<&UnixStream>) -> io::Result<()> {
    let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
    let is_stream = socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM)
        && socket_acceptconn(fd).is_ok_and(|listens| !listens);
    // A socket that is not connected could be connected to this daemon later. A connected one keeps
    // its peer.
    if !is_stream || getpeername(fd).is_err() {
        return Err(wrong("it is no connected UNIX stream socket"));
    }
    // Another thread that looks at the connections in between would end `own`, which then looks
    // like one whose other end is closed.
    let list = CONNECTIONS.locked();
    // Its queue was emptied when it was received. This shuts the receiving direction down.
    stop_reading(fd);
    let own_end = own.is_some_and(peer_stopped_receiving);
    list.iter().filter_map(Weak::upgrade).for_each(|stream| end_if_peer_stopped_receiving(&stream));
    if own_end { Err(wrong("it is the front end's own end of this connection")) } else { Ok(()) }
}

fn end_if_peer_stopped_receiving(stream: &UnixStream) {
    if peer_stopped_receiving(stream) {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Returns whether the other end is open and its receiving direction is shut down.
fn peer_stopped_receiving(stream: &UnixStream) -> bool {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if send(stream, &[], flags) != Err(rustix::io::Errno::PIPE) {
        return false;
    }
    // A connection whose other end is closed fails to send, too.
    has_hung_up(stream) == Some(false)
}

/// Returns whether the other end is closed, or its sending direction is shut down. None: the system
/// does not tell.
pub(super) fn has_hung_up(stream: &UnixStream) -> Option<bool> {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).ok()?;
    Some(fds.iter().any(|fd| !fd.revents().is_empty()))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{RecvFlags, recv};

    use super::*;

    /// Makes a connection, and registers its first end.
    fn connection() -> (Arc<UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = Arc::new(ours);
        register(&ours);
        (ours, theirs)
    }

    fn ended(stream: &UnixStream) -> bool {
        recv(stream, &mut [0u8; 1][..], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n == 0)
    }

    #[test]
    fn the_other_end_of_a_connection_is_refused_and_the_connection_ends() {
        let (ours, theirs) = connection();
        let (bystander, kept) = connection();
        let handed_over = OwnedFd::from(theirs.try_clone().unwrap());
        assert!(write_only(&handed_over, Some(&ours)).unwrap_err().to_string().contains("own end"));
        assert!(ended(&ours));
        assert!(!ended(&bystander));
        drop((theirs, kept));
        assert!(ended(&bystander));
    }

    #[test]
    fn the_other_end_of_another_connection_ends_that_one() {
        let (ours, _theirs) = connection();
        let (other, others) = connection();
        write_only(&OwnedFd::from(others), Some(&ours)).unwrap();
        assert!(ended(&other));
        assert!(!ended(&ours));
    }

    #[test]
    fn front_ends_that_went_or_do_not_listen_are_nobody_elses_fault() {
        let (ours, _theirs) = connection();
        let (_gone, theirs) = connection();
        let (silent, kept) = connection();
        drop(theirs);
        kept.shutdown(Shutdown::Read).unwrap();
        let (channel, _far) = UnixStream::pair().unwrap();
        write_only(&OwnedFd::from(channel), Some(&ours)).unwrap();
        assert!(!ended(&ours));
        assert!(ended(&silent));
    }

    #[test]
    fn a_connection_whose_end_was_handed_over_before_it_was_accepted_ends() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        write_only(&OwnedFd::from(theirs.try_clone().unwrap()), None).unwrap();
        let ours = Arc::new(ours);
        register(&ours);
        assert!(ended(&ours));
    }

    #[test]
    fn what_waits_in_a_socket_is_closed_and_nothing_can_come_after() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
        let (ours, theirs) = connection();
        let (channel, far) = UnixStream::pair().unwrap();
        let pass = |fd: &UnixStream| {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [fd.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&far, &[io::IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL)
        };
        pass(&theirs).unwrap();
        pass(&theirs).unwrap();
        let channel = OwnedFd::from(channel);
        write_only(&channel, Some(&ours)).unwrap();
        assert!(pass(&theirs).is_err());
        drop(theirs);
        assert!(ended(&ours));
        // The other direction works.
        send(&channel, b"event", SendFlags::NOSIGNAL).unwrap();
        let mut word = [0; 5];
        recv(&far, &mut word[..], RecvFlags::empty()).unwrap();
        assert_eq!(&word, b"event");
    }

    #[test]
    fn other_descriptors_are_refused() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let datagram = OwnedFd::from(std::os::unix::net::UnixDatagram::unbound().unwrap());
        let tcp = OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let lonely = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        for fd in [reader, writer, file, datagram, tcp, lonely] {
            assert!(write_only(&fd, None).is_err());
        }
    }
}
