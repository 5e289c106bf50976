//! The thread that asks a file system where the holes of a raw image are, also of the source of a
//! frozen disk. The answer may wait for storage, so no worker asks.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ::nbd::allocation::{HOLE, ZERO};
use ::nbd::server::ExtentRun;
use vshunt_block::Disk;
use vshunt_engine::EventFd;
use vshunt_sandbox::{self as sandbox, ThreadKind};
use vshunt_types::sync::Locked;

/// The answer for one request: extents from the start of its range on, or a negative errno.
pub(crate) type Answer = Result<Vec<ExtentRun>, i32>;

/// Answers for one queue.
pub(crate) struct Answers {
    /// Slots and answers. Held for a push or a swap.
    list: Mutex<Vec<(u16, Answer)>>,
    eventfd: EventFd,
}

impl Answers {
    /// # Errors
    /// Those of eventfd(2).
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { list: Mutex::default(), eventfd: EventFd::make()? })
    }

    /// Returns the eventfd, which is signalled after each answer.
    pub(crate) fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    /// Takes all answers: slots and answers.
    pub(crate) fn take(&self) -> Vec<(u16, Answer)> {
        self.eventfd.take();
        std::mem::take(&mut *self.list.locked())
    }
}

/// What a queue asks.
pub(crate) struct Question {
    pub(crate) answers: Arc<Answers>,
    pub(crate) slot: u16,
    /// The range, bytes.
    pub(crate) range: Range<u64>,
    /// Extents begin and end at multiples of it.
    pub(crate) block: u64,
    /// Most extents.
    pub(crate) most: usize,
}

/// See the module. When it is dropped the thread answers all questions and ends.
pub(crate) struct MapThread {
    questions: Option<Sender<Question>>,
    thread: Option<JoinHandle<()>>,
}

impl MapThread {
    /// Starts the thread for an export.
    ///
    /// # Errors
    /// The system has no thread.
    pub(crate) fn start(export: &str, disk: Arc<Disk>) -> io::Result<Self> {
        let (questions, asked) = channel::<Question>();
        let run = move || {
            for Question { answers, slot, range, block, most } in asked {
                let answer = extents(&disk, range.clone(), block, most)
                    .and_then(|all| without_kept(&disk, range, block, most, all));
                let answer = answer.map_err(|e| -e.raw_os_error().unwrap_or(libc::EIO));
                answers.list.locked().push((slot, answer));
                answers.eventfd.signal();
            }
        };
        let name = format!("{export}/map").chars().take(15).collect();
        let builder = std::thread::Builder::new().name(name);
        let thread = sandbox::spawn(ThreadKind::NbdServer, builder, run)?;
        Ok(Self { questions: Some(questions), thread: Some(thread) })
    }

    /// Has a question answered.
    pub(crate) fn ask(&self, question: Question) {
        if let Some(questions) = &self.questions {
            // The thread receives until the sender is dropped.
            let _ = questions.send(question);
        }
    }
}

impl Drop for MapThread {
    fn drop(&mut self) {
        self.questions = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What lseek(2) finds from an offset on.
enum Found {
    /// Data or a hole, at this offset.
    At(u64),
    /// None of it.
    None,
    /// The image has no map, like a block device.
    NoMap,
}

/// Returns the extents of a raw image. Block devices, and images that are no files, count as data.
fn extents(disk: &Disk, range: Range<u64>, block: u64, most: usize) -> io::Result<Vec<ExtentRun>> {
    let mut runs = Runs::new(range.clone(), block, most);
    let Some(file) = disk.map_image() else {
        runs.add(range.end, 0);
        return Ok(runs.all);
    };
    let seek = |at: u64, whence| -> io::Result<Found> {
        let from = libc::off_t::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: lseek takes no memory. It moves the descriptor's own offset, which no other code
        // uses.
        let found = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
        match u64::try_from(found) {
            Ok(found) => Ok(Found::At(found)),
            Err(_) => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::ENXIO) => Ok(Found::None),
                e if e.raw_os_error() == Some(libc::EINVAL) => Ok(Found::NoMap),
                e => Err(e),
            },
        }
    };
    while let Some(at) = runs.next_at() {
        let data = match seek(at, libc::SEEK_DATA)? {
            Found::At(data) => data.min(range.end),
            Found::None => range.end,
            Found::NoMap => at,
        };
        if data > at {
            runs.add(data / block * block, HOLE | ZERO);
            if data / block * block > at {
                continue;
            }
        }
        let hole = match seek(at, libc::SEEK_HOLE)? {
            Found::At(hole) => hole,
            Found::None | Found::NoMap => range.end,
        };
        let hole = hole.max(at + 1).checked_next_multiple_of(block).unwrap_or(range.end);
        runs.add(hole, 0);
    }
    Ok(runs.all)
}

/// Returns extents of a frozen disk, from those of its source now: blocks that were written
/// meanwhile count as data. The extents of other disks stay as they are.
fn without_kept(
    disk: &Disk,
    range: Range<u64>,
    block: u64,
    most: usize,
    now: Vec<ExtentRun>,
) -> io::Result<Vec<ExtentRun>> {
    let (mut at, mut runs) = (range.start, Runs::new(range, block, most));
    for ExtentRun { len, flags } in now {
        let end = at + len;
        while let Some(kept) = disk.kept(at..end)? {
            if runs.next_at().is_some() {
                runs.add(kept.start, flags);
            }
            if runs.next_at().is_some() {
                runs.add(kept.end, 0);
            }
            if runs.next_at().is_none() {
                return Ok(runs.all);
            }
            at = kept.end;
        }
        if runs.next_at().is_some() {
            runs.add(end, flags);
        }
        at = end;
    }
    Ok(runs.all)
}

/// Extents of a range, joined where their flags are the same.
pub(crate) struct Runs {
    range: Range<u64>,
    block: u64,
    at: u64,
    most: usize,
    pub(crate) all: Vec<ExtentRun>,
}

impl Runs {
    /// For a range that is not empty. `block`: multiples of it are where extents may begin.
    pub(crate) fn new(range: Range<u64>, block: u64, most: usize) -> Self {
        debug_assert!(range.start.is_multiple_of(block) && range.end.is_multiple_of(block));
        Self { at: range.start, range, block, most, all: Vec::new() }
    }

    /// Returns what it was made with.
    pub(crate) fn question(self) -> (Range<u64>, u64, usize) {
        (self.range, self.block, self.most)
    }

    /// Returns where the next extent begins, if there is room for one more and something left.
    pub(crate) fn next_at(&self) -> Option<u64> {
        (self.at < self.range.end && self.all.len() < self.most).then_some(self.at)
    }

    /// Adds the extent up to `end`, which is cut to the range.
    pub(crate) fn add(&mut self, end: u64, flags: u64) {
        let end = end.min(self.range.end);
        if end <= self.at {
            return;
        }
        let len = end - self.at;
        self.at = end;
        match self.all.last_mut() {
            Some(last) if last.flags == flags => last.len += len,
            _ => self.all.push(ExtentRun { len, flags }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vshunt_types::spec::{DiskSpec, Format};

    use super::*;

    #[test]
    fn holes_of_a_file_are_found_within_the_range() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.img");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_at(&[1; 65536], 1 << 20).unwrap();
        let spec =
            DiskSpec { name: "d".into(), format: Some(Format::Raw), file: Some(path), ..DiskSpec::default() };
        let disk = Disk::open(&spec).unwrap();
        let hole = HOLE | ZERO;
        let found = |range, most| {
            let runs = extents(&disk, range, 512, most).unwrap();
            runs.iter().map(|run| (run.len, run.flags)).collect::<Vec<_>>()
        };
        assert_eq!(found(0..4 << 20, 9), [(1 << 20, hole), (65536, 0), ((3 << 20) - 65536, hole)]);
        assert_eq!(found(0..4 << 20, 1), [(1 << 20, hole)]);
        assert_eq!(found(1 << 20..(1 << 20) + 512, 9), [(512, 0)]);
        assert_eq!(found((1 << 20) - 512..(1 << 20) + 512, 9), [(512, hole), (512, 0)]);
    }

    #[test]
    fn extents_of_the_same_state_are_joined() {
        let mut runs = Runs::new(0..4096, 512, 2);
        runs.add(512, 0);
        runs.add(512, 3);
        runs.add(1024, 0);
        runs.add(2048, 3);
        assert_eq!(runs.next_at(), None);
        runs.add(u64::MAX, 3);
        let all: Vec<_> = runs.all.iter().map(|run| (run.len, run.flags)).collect();
        assert_eq!(all, [(1024, 0), (3072, 3)]);
    }
}
