//! Notifications: eventfds and sockets that a front end passed to be signalled, and eventfds of the
//! daemon.
//!
//! Called by workers (the guest's call descriptor), session threads and other threads of the
//! daemon. A notification must never wait.
//!
//! write(2) to an eventfd waits while the counter is full, unless the file has O_NONBLOCK. A front
//! end controls both: it can fill the counter, and it can clear the flag at any time, also between
//! a check and the write. So an eventfd of a front end is never written to. It is registered with
//! an io_uring of its own. A no-op on that ring makes the kernel signal the eventfd with
//! eventfd_signal(), which adds one and never waits.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;
use vshunt_types::sync::Locked;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};
use rustix::fs::{FileType, fstat};
use rustix::net::SendFlags;
use vshunt_sandbox as sandbox;

/// Entries of a notifier's rings. One no-op is in flight at a time.
const NOTIFIER_ENTRIES: u32 = 1;

/// A descriptor that can be signalled.
pub struct EventFd {
    fd: OwnedFd,
    means: Means,
}

/// The means of signalling.
enum Means {
    /// An eventfd with O_NONBLOCK that no other process has.
    Own,
    /// An eventfd of a front end. The lock guards the io_uring during one notification, and its
    /// holder waits for nothing.
    Uring(Box<Mutex<IoUring>>),
    /// An eventfd of a front end, with an io_uring that is made for each notification.
    UringOnce,
    /// A socket of a front end (User-mode Linux). A notification is a message of eight bytes. It is
    /// dropped if the socket has no room.
    Socket,
}

impl EventFd {
    /// Wraps a front end's eventfd or socket that is signalled often.
    ///
    /// # Errors
    /// The descriptor is neither of these, or no io_uring can be made for it (open files, memory).
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        if is_socket(&fd)? {
            return Ok(Self { fd, means: Means::Socket });
        }
        let uring = permitted_notifier(&fd)?;
        Ok(Self { fd, means: Means::Uring(Box::new(Mutex::new(uring))) })
    }

    /// Wraps a front end's eventfd or socket that is signalled rarely, and never by a worker.
    ///
    /// A notification costs more time than with [`new`](Self::new), and no io_uring stays open. One
    /// is made here to check that the descriptor can be signalled.
    ///
    /// # Errors
    /// The descriptor is neither an eventfd nor a socket, or no io_uring can be made for it (open
    /// files, memory, kernel.io_uring_disabled).
    pub fn rare(fd: OwnedFd) -> io::Result<Self> {
        if is_socket(&fd)? {
            return Ok(Self { fd, means: Means::Socket });
        }
        drop(permitted_notifier(&fd)?);
        Ok(Self { fd, means: Means::UringOnce })
    }

    /// Makes an eventfd that is not passed to another process.
    ///
    /// # Errors
    /// Those of eventfd(2).
    pub fn make() -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, means: Means::Own })
    }

    /// Returns the descriptor, for waiting on it.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Returns whether it was signalled since the last call. Only for an eventfd from
    /// [`make`](Self::make).
    pub fn take(&self) -> bool {
        rustix::io::read(&self.fd, &mut [0u8; 8]).is_ok()
    }

    /// Adds one to the counter, and never waits. A full counter is a notification, too.
    #[inline]
    pub fn signal(&self) {
        match &self.means {
            Means::Own => drop(rustix::io::write(&self.fd, &1u64.to_ne_bytes())),
            Means::Uring(uring) => signal_by(&mut uring.locked()),
            Means::UringOnce => match permitted_notifier(&self.fd) {
                Ok(mut uring) => signal_by(&mut uring),
                // It could be made when the front end passed the descriptor.
                Err(e) => tracing::warn!("a front end is not notified: there is no io_uring for that ({e})"),
            },
            Means::Socket => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = rustix::net::send(&self.fd, &1u64.to_ne_bytes(), flags);
            }
        }
    }
}

/// The descriptor, for passing it on and for waiting on it.
impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Makes a [`notifier`], by an errand if the calling thread lacks the right. With
/// kernel.io_uring_disabled=1 the kernel requires a capability that a session thread does not have.
fn permitted_notifier(fd: &OwnedFd) -> io::Result<IoUring> {
    match notifier(fd) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => sandbox::errand(|| notifier(fd))?,
        made => made,
    }
}

/// Makes an io_uring whose completions signal `fd`.
fn notifier(fd: &OwnedFd) -> io::Result<IoUring> {
    // Queues move, so several threads use the io_uring, one at a time. This rules out SINGLE_ISSUER
    // and DEFER_TASKRUN.
    let restricted = sandbox::restricts_rings();
    let mut builder = IoUring::builder();
    if restricted {
        builder.setup_r_disabled();
    }
    let uring = builder.build(NOTIFIER_ENTRIES)?;
    uring.submitter().register_eventfd(fd.as_raw_fd())?;
    if restricted {
        uring.submitter().register_restrictions(&mut [Restriction::sqe_op(opcode::Nop::CODE)])?;
        uring.submitter().register_enable_rings()?;
    }
    Ok(uring)
}

/// Completes a no-op. It completes within the system call that submits it.
#[inline]
fn signal_by(uring: &mut IoUring) {
    // Completions of earlier no-ops are discarded to make room.
    uring.completion().for_each(drop);
    let entry = opcode::Nop::new().build();
    // SAFETY: a no-op names no memory. A full queue still has the no-op of a submission that was
    // interrupted.
    let _ = unsafe { uring.submission().push(&entry) };
    // The submission fails if the kernel is out of memory or a signal came first. The no-op stays
    // in the queue in both cases.
    if uring.submit().is_err() {
        let _ = uring.submit();
    }
}

fn is_socket(fd: &OwnedFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::Socket)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    /// The largest value of an eventfd's counter (eventfd(2)).
    const FULL: u64 = u64::MAX - 1;

    fn count(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(fd, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    /// Signals on a thread of its own, and returns whether that call returned. If not, the thread
    /// is unblocked.
    fn returns(eventfd: &Arc<EventFd>, fd: &OwnedFd) -> bool {
        let theirs = eventfd.clone();
        let thread = std::thread::spawn(move || theirs.signal());
        let limit = Instant::now() + Duration::from_secs(10);
        while !thread.is_finished() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        let in_time = thread.is_finished();
        if !in_time {
            count(fd);
        }
        thread.join().unwrap();
        in_time
    }

    #[test]
    fn a_full_counter_whose_flag_was_cleared_stops_nobody() {
        for make in [EventFd::new, EventFd::rare] {
            let theirs = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let eventfd = Arc::new(make(theirs.try_clone().unwrap()).unwrap());
            eventfd.signal();
            assert_eq!(count(&theirs), 1);
            // The flag belongs to the open file, which both descriptors refer to.
            fcntl_setfl(&theirs, OFlags::empty()).unwrap();
            rustix::io::write(&theirs, &FULL.to_ne_bytes()).unwrap();
            assert!(returns(&eventfd, &theirs), "a notification waits for the front end");
            assert!(returns(&eventfd, &theirs), "a notification waits for the front end");
            assert!(count(&theirs) >= FULL);
            eventfd.signal();
            assert_eq!(count(&theirs), 1, "it counts again");
        }
    }

    #[test]
    fn each_notification_counts_whichever_thread_sends_it() {
        let theirs = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let eventfd = EventFd::new(theirs.try_clone().unwrap()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| eventfd.signal()));
            }
        });
        assert_eq!(count(&theirs), 4000);
    }

    #[test]
    fn a_socket_is_sent_eight_bytes_and_a_full_one_nothing() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let eventfd = Arc::new(EventFd::new(ours.into()).unwrap());
        eventfd.signal();
        let theirs = OwnedFd::from(theirs);
        assert_eq!(count(&theirs), 1);
        let filler = eventfd.clone();
        let thread = std::thread::spawn(move || (0..100_000).for_each(|_| filler.signal()));
        let limit = Instant::now() + Duration::from_secs(30);
        while !thread.is_finished() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(thread.is_finished(), "a notification waits for room in the socket");
        thread.join().unwrap();
        drop(theirs);
        eventfd.signal();
    }

    #[test]
    fn what_is_neither_is_refused() {
        for make in [EventFd::new, EventFd::rare] {
            let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            assert!(make(file).is_err());
        }
    }
}
