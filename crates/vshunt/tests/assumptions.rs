//! What we rely on the kernel for, one test a behaviour; `docs/assumptions.md` says who leans on
//! which.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};

fn ring() -> IoUring {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .build(8)
        .expect("Linux 6.1 or newer, io_uring not switched off")
}

fn push(ring: &mut IoUring, entry: io_uring::squeue::Entry) {
    // SAFETY: the entries of these tests name no memory, or memory that outlives the ring.
    unsafe { ring.submission().push(&entry).unwrap() };
    ring.submit().unwrap();
}

fn next(ring: &mut IoUring) -> cqueue::Entry {
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap()
}

#[test]
fn a_multishot_poll_reports_each_write_of_an_eventfd_that_nobody_reads() {
    let mut ring = ring();
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    push(
        &mut ring,
        opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build().user_data(7),
    );
    for _ in 0..5 {
        rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
        let cqe = next(&mut ring);
        assert_eq!(cqe.user_data(), 7);
        assert!(cqe.result() > 0 && cqueue::more(cqe.flags()));
    }
    ring.submitter().submit().unwrap();
    assert!(ring.completion().next().is_none(), "edges, not a level");
}

#[test]
fn a_multishot_poll_on_a_counter_that_is_not_zero_reports_at_once() {
    let mut ring = ring();
    let fd = eventfd(3, EventfdFlags::NONBLOCK).unwrap();
    push(&mut ring, opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build());
    assert!(next(&mut ring).result() > 0);
}

#[test]
fn a_cancelled_poll_completes_and_the_cancellation_can_be_silent() {
    let mut ring = ring();
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    push(
        &mut ring,
        opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build().user_data(7),
    );
    let cancel = opcode::AsyncCancel::new(7).build().user_data(8);
    push(&mut ring, cancel.flags(io_uring::squeue::Flags::SKIP_SUCCESS));
    let cqe = next(&mut ring);
    assert_eq!((cqe.user_data(), cqe.result()), (7, -libc::ECANCELED));
    assert!(!cqueue::more(cqe.flags()));
    assert!(ring.completion().next().is_none());
}

#[test]
fn the_taskrun_flag_tells_of_completions_that_wait_for_an_enter() {
    let mut ring = ring();
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    push(&mut ring, opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build());
    assert!(!ring.submission().taskrun());
    rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !ring.submission().taskrun() {
        assert!(std::time::Instant::now() < limit, "a spinning worker would not see its kicks");
    }
    assert!(ring.completion().is_empty());
    ring.submit_and_wait(0).unwrap();
    assert!(!ring.completion().is_empty());
}

#[test]
fn a_sparse_table_of_fixed_files_takes_and_forgets_files() {
    let mut ring = ring();
    ring.submitter().register_files_sparse(4).unwrap();
    let fd = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    assert_eq!(ring.submitter().register_files_update(2, &[fd.as_raw_fd()]).unwrap(), 1);
    let mut value = [0u8; 8];
    push(&mut ring, opcode::Read::new(types::Fixed(2), value.as_mut_ptr(), 8).build());
    assert_eq!(next(&mut ring).result(), 8);
    assert_eq!(value, 1u64.to_ne_bytes());
    ring.submitter().register_files_update(2, &[-1]).unwrap();
    push(&mut ring, opcode::Read::new(types::Fixed(2), value.as_mut_ptr(), 8).build());
    assert_eq!(next(&mut ring).result(), -libc::EBADF);
}

#[test]
fn peeking_a_message_s_code_leaves_message_and_descriptors_alone() {
    use rustix::net::{RecvFlags, recv};
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.write_all(&40u32.to_ne_bytes()).unwrap();
    ours.write_all(&[1; 8]).unwrap();
    for _ in 0..2 {
        let mut code = [0u8; 4];
        let (n, _) = recv(&theirs, &mut code, RecvFlags::PEEK | RecvFlags::WAITALL).unwrap();
        assert_eq!((n, u32::from_ne_bytes(code)), (4, 40));
    }
    let mut all = [0u8; 64];
    assert_eq!(recv(&theirs, &mut all, RecvFlags::empty()).unwrap().0, 12);
}

#[test]
fn a_listener_that_is_polled_with_an_eventfd_can_be_told_to_end() {
    let dir = tempfile::tempdir().unwrap();
    let listener = std::os::unix::net::UnixListener::bind(dir.path().join("s")).unwrap();
    let stop = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    let mut fds = [
        rustix::event::PollFd::new(&stop, rustix::event::PollFlags::IN),
        rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN),
    ];
    assert_eq!(rustix::event::poll(&mut fds, None).unwrap(), 1);
    assert!(fds[1].revents().is_empty());
}
