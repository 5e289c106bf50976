//! A new generation of the journal in the image's header, between flushes: see [`crate::journal`].
//!
//! Written by a request that put records into the journal, before it completes or goes on. The data that these records name,
//! and all that were put in before, was written by then, so that no state of the image has this generation without that data.
//! Nothing is made stable: the process may be killed, and a crash of the machine takes the journal away.

use super::{Buf, Context, Next, Pending, Request, Step};
use crate::header_copy::Copied;
use crate::journal::Journal;
use crate::lock::Locked;

/// How far it is.
#[derive(Debug)]
pub(super) enum NewGeneration {
    /// One is to be written, unless a flush is under way.
    Due,
    /// It is being written, while no flush runs; with the copy of the header's bytes that has it.
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
                // A flush, which writes one itself, or another request does it.
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

    /// A write of it is over: done again where it may not have the last word. A failed one fails no request, for what the
    /// request wrote is in the image, and the journal fits the old generation and the new one.
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
        super::flush::end_turn(image, None, cx);
    }
}
