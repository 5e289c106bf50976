use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::super::dispatch::table;
use super::super::receive::FDS_MAX;
use super::*;

const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_KICK: u32 = 12;
const REGION_LEN: usize = 32;

fn header(code: u32, flags: u32, size: usize) -> Vec<u8> {
    [code, flags, size as u32].into_iter().flat_map(u32::to_ne_bytes).collect()
}

fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    Reader::prepare(&near).unwrap();
    (near, far)
}

/// Sends bytes with descriptors.
fn pass(to: &UnixStream, bytes: &[u8], fds: &[impl AsFd], flags: SendFlags) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8 * FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
}

/// Files in memory.
fn files(count: usize) -> Vec<OwnedFd> {
    let file = || rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    (0..count).map(|_| file()).collect()
}

/// The next message of a reader, received by this process.
fn next(reader: &mut Reader, stream: &UnixStream) -> Result<Option<Message>> {
    reader.next(stream, &mut Receiver::new(false))
}

/// Whether all descriptors of a connection's far end are closed.
fn hung_up(near: &UnixStream) -> bool {
    recv_nothing(near).is_ok_and(|n| n == 0)
}

fn recv_nothing(stream: &UnixStream) -> rustix::io::Result<usize> {
    rustix::net::recv(stream, &mut [0u8; 1][..], rustix::net::RecvFlags::DONTWAIT).map(|(n, _)| n)
}

/// What is read of a SET_MEM_TABLE that says `count` regions, has room for `room`, and brings `fds`
/// descriptors.
fn read(count: u32, room: usize, fds: usize) -> Result<(Vec<VhostUserMemoryRegion>, usize)> {
    let (near, far) = pair();
    let mut message = header(SET_MEM_TABLE, FLAG_VERSION | FLAG_NEED_REPLY, 8 + room * REGION_LEN);
    message.extend([count, 0].into_iter().flat_map(u32::to_ne_bytes));
    for i in 0..room as u64 {
        message.extend([i << 30, 4096, i << 31, 8192].into_iter().flat_map(u64::to_ne_bytes));
    }
    pass(&far, &message, &files(fds), SendFlags::empty());
    let mut message = next(&mut Reader::default(), &near)?.expect("all of it was sent");
    assert!(message.need_reply);
    table(&mut message).map(|(regions, files)| (regions, files.len()))
}

#[test]
fn a_memory_table_is_what_its_count_says() {
    for (count, room) in [(0, 0), (1, 1), (1, 2), (2, 2), (0, 2), (32, 32)] {
        let (regions, files) = read(count as u32, room, count).unwrap();
        assert_eq!((regions.len(), files), (count, count));
        for (i, region) in (0u64..).zip(&regions) {
            let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = *region;
            assert_eq!(
                (guest_phys_addr, memory_size, user_addr, mmap_offset),
                (i << 30, 4096, i << 31, 8192)
            );
        }
    }
}

#[test]
fn a_memory_table_that_contradicts_itself_is_refused() {
    for (count, room, fds) in
        [(2, 1, 2), (1, 1, 0), (0, 1, 1), (1, 1, 2), (u32::MAX, 2, 2), (33, 33, 32), (33, 32, 33)]
    {
        assert!(read(count, room, fds).is_err(), "{count} regions in {room} with {fds}");
    }
}

#[test]
fn messages_come_whole_however_they_are_cut_and_each_has_its_descriptors() {
    let kick = [header(SET_VRING_KICK, FLAG_VERSION, 8), 7u64.to_ne_bytes().into()].concat();
    for cut in 1..kick.len() {
        let (near, far) = pair();
        let mut reader = Reader::default();
        pass(&far, &header(GET_FEATURES, FLAG_VERSION, 0), &files(0), SendFlags::empty());
        pass(&far, &kick[..cut], &files(1), SendFlags::empty());
        assert_eq!(reader.deadline(), None);
        let mut first = next(&mut reader, &near).unwrap().unwrap();
        assert_eq!((first.code, first.files().len()), (GET_FEATURES, 0));
        assert!(next(&mut reader, &near).unwrap().is_none(), "{cut}");
        let deadline = reader.deadline().expect("a message has begun");
        assert!(next(&mut reader, &near).unwrap().is_none());
        assert_eq!(reader.deadline(), Some(deadline), "more time was given");
        pass(&far, &kick[cut..], &files(0), SendFlags::empty());
        let mut second = next(&mut reader, &near).unwrap().unwrap();
        assert_eq!((second.code, second.exactly(8).unwrap().u64(0)), (SET_VRING_KICK, 7));
        assert_eq!((second.files().len(), reader.deadline()), (1, None));
    }
}

#[test]
fn a_reader_that_is_dropped_closes_what_came_with_half_a_message() {
    // Its own end of the connection: without the reader, nobody has it any more.
    let table = header(SET_MEM_TABLE, FLAG_VERSION, 40);
    for len in [1, 8, HEADER_LEN, HEADER_LEN + 20] {
        let (near, far) = pair();
        let bytes = [table.as_slice(), &[0; 40]].concat();
        pass(&far, &bytes[..len], &[&far], SendFlags::empty());
        drop(far);
        let mut reader = Reader::default();
        assert!(next(&mut reader, &near).unwrap().is_none());
        assert!(reader.deadline().is_some());
        assert!(!hung_up(&near));
        drop(reader);
        assert!(hung_up(&near), "{len} bytes");
    }
}

#[test]
fn descriptors_with_an_urgent_byte_are_read_like_others() {
    let (near, far) = pair();
    pass(&far, b"x", &[&far], SendFlags::OOB);
    drop(far);
    let mut reader = Reader::default();
    assert!(next(&mut reader, &near).unwrap().is_none());
    assert!(reader.deadline().is_some());
    drop(reader);
    assert!(hung_up(&near));
}

#[test]
fn more_descriptors_than_a_message_may_have_end_the_connection_and_are_closed() {
    for count in [FDS_MAX + 1, 200] {
        let (near, far) = pair();
        let message = header(SET_MEM_TABLE, FLAG_VERSION, 8);
        pass(&far, &message, &vec![&far; count], SendFlags::empty());
        drop(far);
        let mut reader = Reader::default();
        let why = next(&mut reader, &near).map(|_| ()).unwrap_err().to_string();
        assert!(why.contains("too many descriptors"), "{why}");
        drop(reader);
        assert!(hung_up(&near));
    }
}

#[test]
fn descriptors_in_several_pieces_of_one_message_are_counted_together() {
    let (near, far) = pair();
    let message = [header(SET_MEM_TABLE, FLAG_VERSION, 40), vec![0; 40]].concat();
    for byte in message.chunks(1) {
        pass(&far, byte, &files(1), SendFlags::empty());
    }
    let why = next(&mut Reader::default(), &near).map(|_| ()).unwrap_err().to_string();
    assert!(why.contains("too many descriptors"), "{why}");
}

#[test]
fn headers_that_are_none_and_ends_are_told() {
    let end = |bytes: &[u8]| {
        let (near, far) = pair();
        pass(&far, bytes, &files(0), SendFlags::empty());
        drop(far);
        next(&mut Reader::default(), &near).map(|_| ()).unwrap_err()
    };
    for (flags, size) in
        [(0, 0), (2, 0), (FLAG_VERSION | FLAG_REPLY, 0), (FLAG_VERSION | 16, 0), (1, BODY_MAX + 1)]
    {
        let why = end(&header(GET_FEATURES, flags, size)).to_string();
        assert!(why.contains("malformed"), "{why}");
    }
    assert!(matches!(end(&[1, 0, 0]), Error::SocketError(e) if e.kind() == io::ErrorKind::UnexpectedEof));
    let (near, far) = pair();
    drop(far);
    assert!(matches!(next(&mut Reader::default(), &near), Err(Error::Disconnected)));
}

#[test]
fn what_is_read_ahead_comes_first() {
    let (near, far) = pair();
    let mut reader = Reader::default();
    let ask = header(GET_FEATURES, FLAG_VERSION, 0);
    pass(&far, &[ask.as_slice(), &ask, &ask[..3]].concat(), &files(0), SendFlags::empty());
    reader.read_ahead(&near).unwrap();
    assert!(reader.is_ready());
    pass(&far, &ask[3..], &files(0), SendFlags::empty());
    for _ in 0..3 {
        assert_eq!(next(&mut reader, &near).unwrap().unwrap().code, GET_FEATURES);
    }
    assert!(!reader.is_ready());
    assert!(next(&mut reader, &near).unwrap().is_none());
}

#[test]
fn a_descriptor_whose_close_could_wait_is_named_and_closed() {
    let (near, far) = pair();
    let kick = [header(SET_VRING_KICK, FLAG_VERSION, 8), 0u64.to_ne_bytes().into()].concat();
    pass(&far, &kick, &[File::open("/dev/null").unwrap()], SendFlags::empty());
    let mut message = next(&mut Reader::default(), &near).unwrap().unwrap();
    assert!(message.has_fds() && message.file().is_none());
    assert_eq!(message.refused_fd(), Some("/dev/null"));
}

#[test]
fn messages_of_a_socket_that_passes_credentials_have_no_descriptors() {
    for option in [libc::SO_PASSCRED, libc::SO_PASSSEC, libc::SO_PASSPIDFD] {
        let (near, far) = UnixStream::pair().unwrap();
        set_option(&near, option, true).unwrap();
        pass(&far, &header(GET_FEATURES, FLAG_VERSION, 0), &files(0), SendFlags::empty());
        Reader::prepare(&near).unwrap();
        let mut reader = Reader::default();
        reader.read_ahead(&near).unwrap();
        assert!(!next(&mut reader, &near).unwrap().unwrap().has_fds());
    }
}
