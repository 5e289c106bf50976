//! Copies a disk that is not in use to another disk, with the copying queues of jobs.

use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::Duration;

use vshunt_block::copy::{Copy, CopyQueue, Side};
use vshunt_block::{Bits, CopyBeforeWrite, Disk, UncleanImage};
use vshunt_engine::{DEFAULT_POLL_US, QueueSet, Settings, Workers, allowed_cpus};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{DiskSpec, Format};

/// log2 of the bytes that are copied at a time: a cluster, which may be compressed.
const BLOCK_SHIFT: u32 = 16;
/// Queues at most. With more, the file is the limit.
const QUEUES_MAX: usize = 8;
/// How often progress is reported.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// An open disk that will be copied. Its locks keep other processes from replacing the image or its
/// backing files.
pub struct ToConvert {
    disk: Arc<Disk>,
    name: String,
}

fn name(spec: &DiskSpec) -> String {
    spec.image()
}

impl ToConvert {
    /// # Errors
    /// The disk cannot be opened.
    pub fn open(from: &DiskSpec) -> Result<Self> {
        Ok(Self { disk: Disk::open(from)?, name: name(from) })
    }

    /// Returns the images, of the disk and its backing files, that were not closed cleanly.
    pub fn readings(&self) -> Vec<UncleanImage> {
        self.disk.unclean_images()
    }

    /// Copies the disk to `to`, which is at least as large, and makes the copy stable. What is
    /// behind the copy stays as it is. `fresh`: `to` reads as zeroes. `progress` gets the bytes
    /// done, and the total. Returns how many bytes `to` is larger.
    ///
    /// # Errors
    /// `to` cannot be opened; `Invalid` if it is smaller; `Io` with the side and the offset that
    /// failed.
    pub fn to(
        self,
        to: &DiskSpec,
        compress: bool,
        fresh: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<u64> {
        let (source, target) = (self.disk, Disk::open(to)?);
        let (from, to_name) = (self.name, name(to));
        let size = source.size_bytes();
        let Some(larger) = target.size_bytes().checked_sub(size) else {
            return Err(Error::invalid(format!(
                "{from} has a disk of {size} bytes and {to_name} one of {}: the target has to be as large, or larger",
                target.size_bytes()
            )));
        };
        debug_assert!(to.format() == Format::Qcow2 || !compress);
        let no_memory = || Error::limit("no memory for the map of what is copied");
        let shift = match compress {
            true => target.cluster_bytes().map_or(BLOCK_SHIFT, u64::trailing_zeros),
            false => BLOCK_SHIFT,
        };
        let todo = Bits::new(size, shift).ok_or_else(no_memory)?;
        todo.set(todo.all());
        let work = CopyBeforeWrite::new(todo).map_err(|e| Error::io("a copy cannot be set up", e))?;
        let copy = Copy::new(source, target.clone(), Arc::new(work), std::thread::current());
        let copy = Arc::new(copy.onto_fresh(fresh).compressed(compress));
        run(&copy, size, progress)?;
        match copy.failure() {
            Some((Side::Source, at, e)) => {
                return Err(Error::io(format_args!("{from} cannot be read at byte {at}"), e));
            }
            Some((Side::Target | Side::Fleece, at, e)) => {
                return Err(Error::io(format_args!("{to_name} cannot be written at byte {at}"), e));
            }
            None => {}
        }
        let synced = target.sync().and_then(|()| target.sync());
        synced.map_err(|e| Error::io(format_args!("{to_name} cannot be made stable"), e))?;
        Ok(larger)
    }
}

/// Runs the queues, each on a worker of its own, until all is copied or one of them fails.
fn run(copy: &Arc<Copy>, size: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let workers = Workers::new(DEFAULT_POLL_US)?;
    let count = allowed_cpus().len().clamp(1, QUEUES_MAX);
    let ids = (0..count)
        .map(|_| workers.create(Some("convert".to_owned()), &Settings::default()))
        .collect::<Result<Vec<_>>>()?;
    let set = QueueSet::new("convert", &workers, &ids)?;
    for index in 0..set.len() {
        set.start(index, Box::new(CopyQueue::new(copy.clone(), set.stats(index).clone())));
    }
    while !copy.over.load(Acquire) {
        std::thread::park_timeout(LOOK_EVERY);
        progress(copy.done.load(Relaxed), size);
    }
    progress(copy.done.load(Relaxed), size);
    for index in 0..set.len() {
        drop(set.stop(index));
    }
    drop(set);
    workers.end_all();
    Ok(())
}
