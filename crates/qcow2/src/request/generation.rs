//! A new generation of the journal in the image's header, between flushes: see [`crate::journal`].
//!
//! A request that put records into the journal writes it, before the request completes or
//! continues. By then, the data that these records refer to was written, and so was the data of all
//! earlier records. So no state of the image has this generation without that data. Nothing is made
//! stable: after a kill of the process the writes are there, and a crash of the machine removes the
//! journal.

use super::{Buf, Context, Next, Pending, Request, Step};
use crate::header_copy::Copied;
use crate::journal::Journal;
use crate::lock::Locked;

/// The progress of the write.
#[derive(Debug)]
pub(super) enum NewGeneration {
    /// A generation has to be written, unless a flush is running.
    Due,
    /// It is being written, while no flush runs: the generation, and the copy of the header's bytes
    /// that has it.
    Writing(u64, Copied),
}

impl Request {
    pub(super) fn step_generation(&mut self, cx: &mut Context<'_>) -> Next {
        let image = cx.chain.top();
        let (Some(journal), Some(first)) = (&image.journal, &image.header_copy) else {
            self.generation = None;
            return Next::Again;
        };
        if let Some(NewGeneration::Due) = self.generation {
            let running = std::mem::replace(&mut image.flushes.locked().running, true);
            if running {
                // A flush, which writes a generation itself, or another request does it.
                self.generation = None;
                return Next::Again;
            }
            let generation = journal.next_generation();
            self.generation = Some(NewGeneration::Writing(generation, first.set_generation(generation)));
        }
        let Some(NewGeneration::Writing(_, (bytes, _))) = &self.generation else { return Next::Again };
        let range = 0..bytes.len();
        self.meta.set(bytes);
        self.step(Pending::Generation, Step::Write { file: image.file, offset: 0, buf: Buf::Meta, range })
    }

    /// Handles the end of a write. It is repeated if an older write may have come later. If it
    /// failed, no request fails: the data of the request is in the image, and the journal fits the
    /// old generation and the new one.
    pub(super) fn wrote_generation(&mut self, done: bool, cx: &mut Context<'_>) {
        let image = cx.chain.top();
        let Some(NewGeneration::Writing(generation, copied)) = &mut self.generation else { return };
        if let Some(first) = &image.header_copy {
            if !done {
                first.failed(copied.1);
            } else if let Some(again) = first.ended(copied.1) {
                *copied = again;
                return;
            }
        }
        let written = done.then_some(*generation);
        image.journal.iter().for_each(|journal: &Journal| journal.wrote_generation(written));
        self.generation = None;
        super::flush::finish_flush(image, None, cx);
    }
}
