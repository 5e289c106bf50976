use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

/// What is read of a SET_MEM_TABLE that says `count` regions, has room for `room`, and brings `fds` descriptors.
fn read(count: u32, room: usize, fds: usize) -> io::Result<(Vec<VhostUserMemoryRegion>, usize)> {
    let (near, far) = UnixStream::pair().unwrap();
    let mut message = Vec::new();
    for word in
        [SET_MEM_TABLE, FLAG_VERSION | FLAG_NEED_REPLY, (BODY_LEN + room * REGION_LEN) as u32, count, 0]
    {
        message.extend(word.to_ne_bytes());
    }
    for i in 0..room as u64 {
        for word in [i << 30, 4096, i << 31, 8192] {
            message.extend(word.to_ne_bytes());
        }
    }
    let files: Vec<_> = (0..fds).map(|_| File::open("/dev/null").unwrap()).collect();
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * TABLE_REGIONS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds == 0 || control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(&far, &[io::IoSlice::new(&message)], &mut control, SendFlags::empty()).unwrap();
    // A message that is too short ends here.
    drop(far);
    let message = read_own(&near)?;
    assert!(message.need_reply);
    match message.what {
        Own::MemTable(regions, files) => Ok((regions, files.len())),
        _ => panic!("not the message that was sent"),
    }
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
