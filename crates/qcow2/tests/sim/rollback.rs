//! An image is rolled back to an earlier state while its journal stays: an LVM or ZFS rollback, a restore in place.
//!
//! The journal's changes lead to data that the earlier state does not have, so that they must not be applied. Flushes that
//! were complete at the time of the earlier state have to be there.

use super::model::{Model, Time};
use super::{File, Shape, Sim};

/// Turns between two earlier states that are kept.
const KEPT_EVERY: u64 = 40;
/// Flushes that write the map have to end between the kept state and the rollback, at least. The second of them began after
/// the state was kept.
const FLUSHES: u64 = 2;

/// What a rollback brings back.
struct Kept {
    image: Vec<u8>,
    data: Vec<u8>,
    model: Model,
    at: Time,
    /// Flushes that wrote the map before, in this session.
    flushes: u64,
}

impl Sim {
    /// The image as a snapshot of its storage has it now: all that was written, or what a crash would leave.
    fn keep(&mut self, flushes: u64) -> Kept {
        let (at, all) = (self.tick(), self.rng.below(2) == 0);
        let rng = &mut self.rng;
        let [image, data] = [0, 2].map(|file: usize| self.files[file].crashed(|| all || rng.below(2) == 0));
        Kept { image, data, model: self.model.clone(), at, flushes }
    }

    /// Kills the process. The next open finds the earlier state of the image.
    fn roll_back(&mut self, to: Kept) {
        (self.files[0], self.files[2]) = (File::of(to.image), File::of(to.data));
        self.model = to.model;
        self.repair();
        self.reopen();
        self.look(|model, sector, value, _| model.may_survive(sector, value, to.at), "survives a rollback");
    }
}

/// Runs one seed; how many times its image was rolled back.
fn run(seed: u64) -> u32 {
    let shape = Shape::of(seed);
    let records = if shape.records == 0 { 64 } else { shape.records };
    let mut sim = Sim::of(seed, Shape { version: 3, records, faults: 0, ..shape });
    let (mut kept, mut flushes, mut first, mut rolled) = (None::<Kept>, 0, 0, 0);
    for turn in 0..4000 {
        sim.turn();
        let now = sim.shared.as_ref().expect("it has a journal").first_record();
        if now != first {
            (first, flushes) = (now, flushes + 1);
        }
        if turn % KEPT_EVERY == 0 && kept.is_none() {
            kept = Some(sim.keep(flushes));
        }
        let ready = |kept: &mut Kept| flushes >= kept.flushes + FLUSHES;
        if turn % 64 == 63
            && let Some(to) = kept.take_if(ready)
        {
            sim.roll_back(to);
            (flushes, first, rolled) = (0, 0, rolled + 1);
        }
    }
    sim.crashes += 1; // Clusters may leak where what was under way was rolled back.
    sim.close();
    rolled
}

#[test]
fn a_rollback_under_a_journal_loses_nothing_that_was_flushed() {
    let rolled: u32 = (0..24).map(run).sum();
    assert!(rolled > 40, "only {rolled} rollbacks");
}
