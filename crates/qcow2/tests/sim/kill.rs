//! The death of the process: its writes to files and to shared memory stay, and its own memory is
//! lost.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use qcow2::check::{Quiet, Repair};
use qcow2::header::Header;
use qcow2::journal::{self, Changes, Journal, Words};
use qcow2::{Chain, Op, Served, Settings, Storage, make_ready};

use super::{Data, File, Rng, Shape, Sim, below, check, open, sample};

/// The number of this run of the machine.
const BOOT: [u8; 16] = *b"this run, no one";

/// Memory that the next process finds.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) id: [u8; 16],
    lasts: Duration,
    words: Arc<[AtomicU64]>,
}

impl Words for Shared {
    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

impl Shared {
    pub(crate) fn new(shape: &Shape, rng: &mut Rng) -> Option<Self> {
        if shape.records == 0 {
            return None;
        }
        let words = (0..16 + 4 * shape.records).map(|_| AtomicU64::new(0)).collect();
        let id = u128::from(rng.next()) << 64 | u128::from(rng.next());
        Some(Self { id: id.to_be_bytes(), lasts: shape.generation_lasts, words })
    }

    /// Returns the number of the first record that is needed. It grows when a flush has written the
    /// map.
    pub(crate) fn first_record(&self) -> u64 {
        self.words[6].load(Relaxed)
    }

    /// Returns another number once records were put in.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.words[16..].iter().fold(0, |sum, word| sum.rotate_left(7).wrapping_add(word.load(Relaxed)))
    }

    pub(crate) fn journal(&self) -> Journal {
        Journal::new(Box::new(self.clone()), self.id, BOOT).unwrap().with_generations_of(self.lasts)
    }
}

/// The image's file for a process that dies after a number of changes of it.
struct Mortal<'f> {
    file: &'f File,
    left: Cell<u64>,
}

impl Mortal<'_> {
    fn live(&self) -> io::Result<()> {
        let left = self.left.get().checked_sub(1).ok_or_else(|| io::Error::other("killed"))?;
        self.left.set(left);
        Ok(())
    }
}

impl Storage for Mortal<'_> {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.live()?;
        self.file.write_at(offset, buf)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.live()?;
        self.file.set_len(len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.file.allocate(offset, len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.live()?;
        self.file.punch(offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        self.live()?;
        self.file.sync()
    }
}

impl Sim {
    /// Recovers and repairs the image. The process dies after `left` changes of the file.
    fn revive(&self, left: u64) -> qcow2::Result<()> {
        // Everything that the journal refers to has to be stable first.
        self.files[2].sync().unwrap();
        let file = Mortal { file: &self.files[0], left: Cell::new(left) };
        if let Some(shared) = &self.shared {
            journal::recover(&file, shared, BOOT)?;
        }
        let found = qcow2::check::check(&file, Repair::All, &mut Quiet)?;
        assert!(found.is_clean(), "a repair left {found:?}");
        make_ready(&file)
    }

    /// Like [`revive`](Self::revive), and checks that all counts are right then.
    pub(crate) fn repair(&mut self) {
        self.revive(u64::MAX).unwrap();
        let bytes = self.files[0].bytes();
        let leaks = check::check(&bytes).unwrap_or_else(|e| panic!("after a repair: {e}"));
        assert_eq!(leaks, 0, "clusters leak after a repair");
        sample(&bytes, "after a repair", self.kills % 8 == 1);
    }

    /// Opens the image again.
    pub(crate) fn reopen(&mut self) {
        self.shared = Shared::new(&self.shape, &mut self.rng);
        self.chain = open(&self.files[0], &self.shape, self.shared.as_ref());
        self.join();
    }

    /// Returns the contents for a reader that may not write the image, before recovery.
    fn read_through(&mut self) -> Option<Vec<u8>> {
        let mut first = vec![0; 1 << 16];
        self.files[0].read_at(0, &mut first).unwrap();
        let header = Header::parse(&first).unwrap();
        let len = self.files[0].len().unwrap();
        let changes = Changes::read(&header, len, self.shared.as_ref()?, BOOT).unwrap();
        let data = if self.shape.data == Data::Within { 0 } else { 2 };
        let settings = Settings {
            file: 0,
            data,
            cache_bytes: Some(self.shape.cache_bytes),
            writable: false,
            room: false,
        };
        let image = Served::open(&self.files[0], header, settings).unwrap().with_changes(changes).unwrap();
        let before = self.files[0].bytes();
        self.chain = Chain::new(Arc::new(image), below(&self.shape));
        let read = self.single(Op::Read, 0, self.shape.size);
        assert!(self.files[0].bytes() == before, "a reader wrote");
        Some(read)
    }

    /// Kills the process, and possibly those that follow while they recover. Sometimes the power
    /// fails, too.
    pub(crate) fn kill(&mut self) {
        let at = self.tick();
        self.kills += 1;
        let read = self.read_through();
        while self.rng.below(3) == 0 {
            let most = [4, 40, 400][self.rng.below(3) as usize];
            let left = self.rng.below(most);
            match self.revive(left) {
                // There was nothing left to do, or too little to die during it.
                Ok(()) => break,
                Err(qcow2::Error::Io { .. }) => {}
                Err(e) => panic!("{e}"),
            }
        }
        let power = self.rng.below(4) == 0;
        if power {
            let rng = &mut self.rng;
            for file in [0, 2] {
                self.files[file] = File::of(self.files[file].crashed(|| rng.below(2) == 0));
            }
            self.shared = None;
            self.crashes += 1;
        }
        let all = !power;
        self.repair();
        self.reopen();
        if all {
            let whole = read.is_none_or(|read| read == self.single(Op::Read, 0, self.shape.size));
            assert!(whole, "a reader saw something else than what was recovered");
            self.check_sectors(
                |model, sector, value, _| model.may_read(sector, value, at, at),
                "is after a kill",
            );
        } else {
            self.check_sectors(
                |model, sector, value, _| model.may_survive(sector, value, at),
                "survives a kill and a crash",
            );
        }
    }
}
