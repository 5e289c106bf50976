//! Standard error as the log's output: it never blocks a thread of the daemon, and never fails.
//!
//! Called by all threads. A line that cannot be written at once is dropped and counted: the disk is
//! full, the reader of a pipe has ended or does not read, a terminal is stopped. Only a write to a
//! regular file can wait, for its file system.
//!
//! What must never happen: an error that ends the daemon. The library would report it to stderr,
//! too, fail again, and panic.

use std::io::{self, IoSlice, Stderr, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::SendFlags;
use vshunt_types::sync::Locked;

/// Bytes of a line at most. A pipe takes a line of this size whole or not at all (PIPE_BUF).
pub(super) const LINE_MAX: usize = 4096;

/// Lines that could not be written since the last one that was.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Returns a line that reports that this many lines are missing.
type Note = fn(u64) -> String;

/// What a write to stderr needs to know.
struct Target {
    kind: FileType,
    note: Note,
}

static TARGET: OnceLock<Target> = OnceLock::new();

/// Looks at stderr once. `note` makes the line that reports missing lines.
pub(super) fn start(note: Note) {
    let kind =
        rustix::fs::fstat(io::stderr()).map_or(FileType::Unknown, |s| FileType::from_raw_mode(s.st_mode));
    let _ = TARGET.set(Target { kind, note });
}

/// Stderr for one line.
pub(super) struct Output;

impl Write for Output {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let stderr: Stderr = io::stderr();
        let (kind, note) = TARGET.get().map_or((FileType::Unknown, None), |t| (t.kind, Some(t.note)));
        put_counted(stderr.as_fd(), kind, line, note, &LEFT_OUT);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line, after the number of lines that are missing before it.
fn put_counted(fd: BorrowedFd<'_>, kind: FileType, line: &[u8], note: Option<Note>, left_out: &AtomicU64) {
    let missing = left_out.swap(0, Relaxed);
    // In one write, so that the line is not missing after the note. A note that does not fit waits.
    let noted = note.filter(|_| missing > 0).map(|note| [note(missing).as_bytes(), line].concat());
    let noted = noted.filter(|both| both.len() <= LINE_MAX);
    let stay = if noted.is_some() { 0 } else { missing };
    match put(fd, kind, noted.as_deref().unwrap_or(line)) {
        true => left_out.fetch_add(stay, Relaxed),
        false => left_out.fetch_add(missing + 1, Relaxed),
    };
}

/// Writes a line if that is possible without waiting. Returns whether it is written.
fn put(fd: BorrowedFd<'_>, kind: FileType, line: &[u8]) -> bool {
    let line = bounded(line);
    let line = line.as_ref();
    let result = match kind {
        FileType::Socket => rustix::net::send(fd, line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
        FileType::Fifo => {
            match rustix::io::pwritev2(fd, &[IoSlice::new(line)], u64::MAX, ReadWriteFlags::NOWAIT) {
                // Linux before 6.4.
                Err(Errno::OPNOTSUPP) => put_if_room(fd, line),
                result => result,
            }
        }
        FileType::CharacterDevice => put_if_room(fd, line),
        _ => rustix::io::write(fd, line),
    };
    result.is_ok()
}

/// Writes if there is room for a line. One thread at a time: another one could take the room.
fn put_if_room(fd: BorrowedFd<'_>, line: &[u8]) -> rustix::io::Result<usize> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.locked();
    let mut ready = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
    match poll(&mut ready, Some(&Timespec::default()))? {
        0 => Err(Errno::AGAIN),
        _ => rustix::io::write(fd, line),
    }
}

/// Returns a line of [`LINE_MAX`] bytes at most.
fn bounded(line: &[u8]) -> std::borrow::Cow<'_, [u8]> {
    match line.len() <= LINE_MAX {
        true => line.into(),
        false => [&line[..LINE_MAX - 4], "…\n".as_bytes()].concat().into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    fn note(missing: u64) -> String {
        format!("{missing} missing\n")
    }

    /// Writes lines into a pipe, a socket or a terminal that nobody reads; it takes no time. Then
    /// reads what is there, and returns it with that of two more lines.
    fn unread(kind: FileType, to: &OwnedFd, mut from: impl Read) -> (String, u64) {
        let left_out = AtomicU64::new(0);
        let started = Instant::now();
        let line = format!("{}\n", "x".repeat(99));
        for _ in 0..20_000 {
            put_counted(to.as_fd(), kind, line.as_bytes(), Some(note), &left_out);
        }
        assert!(started.elapsed() < Duration::from_secs(30));
        let missing = left_out.load(Relaxed);
        let mut read = vec![0; 20_000 * 100];
        let mut text = Vec::new();
        while text.len() < (20_000 - missing as usize) * 100 {
            let n = from.read(&mut read).unwrap();
            text.extend_from_slice(&read[..n]);
        }
        put_counted(to.as_fd(), kind, b"one\n", Some(note), &left_out);
        put_counted(to.as_fd(), kind, b"two\n", Some(note), &left_out);
        let mut last = Vec::new();
        while !last.ends_with(b"two\n") {
            let n = from.read(&mut read).unwrap();
            last.extend_from_slice(&read[..n]);
        }
        assert!(text.chunks(100).all(|chunk| chunk == line.as_bytes()));
        (String::from_utf8(last).unwrap(), missing)
    }

    #[test]
    fn an_output_that_is_not_read_blocks_nothing() {
        let (pipe_from, pipe_to) = io::pipe().unwrap();
        let (socket_from, socket_to) = UnixStream::pair().unwrap();
        let outputs: [(FileType, OwnedFd, Box<dyn Read>); 2] = [
            (FileType::Fifo, pipe_to.into(), Box::new(pipe_from)),
            (FileType::Socket, socket_to.into(), Box::new(socket_from)),
        ];
        for (kind, to, from) in outputs {
            let (last, missing) = unread(kind, &to, from);
            assert!(missing > 0, "{kind:?}");
            assert_eq!(last, format!("{missing} missing\none\ntwo\n"), "{kind:?}");
        }
    }

    #[test]
    fn a_terminal_that_is_not_read_blocks_nothing() {
        // SAFETY: the call takes no memory.
        let leader = unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) };
        assert!(leader >= 0);
        // SAFETY: the descriptor is new, and nothing else owns it.
        let leader = unsafe { OwnedFd::from_raw_fd(leader) };
        let unlocked = 0;
        // SAFETY: the kernel reads one number, which outlives the call.
        assert_eq!(unsafe { libc::ioctl(leader.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) }, 0);
        // SAFETY: this ioctl takes flags by value.
        let terminal =
            unsafe { libc::ioctl(leader.as_raw_fd(), libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY) };
        assert!(terminal >= 0);
        // SAFETY: the descriptor is new, and nothing else owns it.
        let terminal = unsafe { OwnedFd::from_raw_fd(terminal) };
        let left_out = AtomicU64::new(0);
        for _ in 0..2000 {
            put_counted(terminal.as_fd(), FileType::CharacterDevice, &[b'x'; 100], None, &left_out);
        }
        assert!(left_out.load(Relaxed) > 0);
    }

    #[test]
    fn the_reader_of_a_pipe_may_have_ended() {
        let (from, to) = io::pipe().unwrap();
        drop(from);
        let left_out = AtomicU64::new(0);
        put_counted(to.as_fd(), FileType::Fifo, b"line\n", Some(note), &left_out);
        put_counted(to.as_fd(), FileType::Fifo, b"line\n", Some(note), &left_out);
        assert_eq!(left_out.load(Relaxed), 2);
    }

    #[test]
    fn a_line_is_cut_at_the_limit() {
        assert_eq!(bounded(&[b'x'; LINE_MAX]).len(), LINE_MAX);
        let cut = bounded(&[b'x'; LINE_MAX + 1]).into_owned();
        assert!(cut.len() == LINE_MAX && cut.ends_with("x…\n".as_bytes()));
    }
}
