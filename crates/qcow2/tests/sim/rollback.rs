//! An image that is rolled back to an earlier state while its journal stays: an LVM or ZFS
//! rollback, or a restore in place.
//!
//! The journal's changes refer to data that the earlier state does not have, so they must not be
//! applied. The results of flushes that were complete at the time of the earlier state have to be
//! there.

use std::time::Duration;

use super::model::{Model, Time};
use super::{File, Shape, Sim};

/// Events between two earlier states that are kept.
const KEPT_EVERY: u64 = 40;
/// Least number of flushes that write the map between the kept state and the rollback. The second
/// of them started after the state was kept.
const FLUSHES: u64 = 2;

/// A state to which an image can be rolled back.
struct Kept {
    image: Vec<u8>,
    data: Vec<u8>,
    model: Model,
    at: Time,
    /// Flushes that wrote the map before, in this session.
    flushes: u64,
}

impl Sim {
    /// Keeps the image as a snapshot of its storage has it now: with all writes, or as a crash
    /// would leave it.
    fn keep(&mut self, flushes: u64) -> Kept {
        let (at, all) = (self.tick(), self.rng.below(2) == 0);
        let rng = &mut self.rng;
        let [image, data] = [0, 2].map(|file: usize| self.files[file].crashed(|| all || rng.below(2) == 0));
        Kept { image, data, model: self.model.clone(), at, flushes }
    }

    /// Lets all requests in flight end, and then runs one request at a time until one puts a record
    /// into the journal. Returns false if none did.
    fn puts_a_record(&mut self) -> bool {
        self.finish();
        let put_in = |sim: &Self| sim.shared.as_ref().expect("it has a journal").fingerprint();
        let before = put_in(self);
        (0..200).any(|_| {
            self.start(0);
            self.finish();
            put_in(self) != before
        })
    }

    /// Kills the process. The next open finds the earlier state of the image.
    fn roll_back(&mut self, to: Kept) {
        (self.files[0], self.files[2]) = (File::of(to.image), File::of(to.data));
        self.model = to.model;
        self.repair();
        self.reopen();
        self.check_sectors(
            |model, sector, value, _| model.may_survive(sector, value, to.at),
            "survives a rollback",
        );
    }
}

/// Makes a simulation with a journal that can be rolled back.
fn sim(seed: u64, generation_lasts: Duration) -> Sim {
    let shape = Shape::of(seed);
    let records = if shape.records == 0 { 64 } else { shape.records };
    Sim::of(seed, Shape { version: 3, records, generation_lasts, faults: 0, ..shape })
}

/// Runs one seed. Returns how often its image was rolled back.
fn run(seed: u64) -> u32 {
    let mut sim = sim(seed, Duration::MAX);
    let (mut kept, mut flushes, mut first, mut rolled) = (None::<Kept>, 0, 0, 0);
    for iteration in 0..4000 {
        sim.step();
        let now = sim.shared.as_ref().expect("it has a journal").first_record();
        if now != first {
            (first, flushes) = (now, flushes + 1);
        }
        if iteration % KEPT_EVERY == 0 && kept.is_none() {
            kept = Some(sim.keep(flushes));
        }
        let ready = |kept: &mut Kept| flushes >= kept.flushes + FLUSHES;
        if iteration % 64 == 63
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

/// Runs one seed with generations that each record ends. The image is rolled back to any moment,
/// and only one record has to be put in between. Returns how often it was rolled back.
fn run_any(seed: u64) -> u32 {
    let mut sim = sim(seed, Duration::ZERO);
    let mut rolled = 0;
    for _ in 0..24 {
        for _ in 0..sim.rng.below(600) {
            sim.step();
        }
        let kept = sim.keep(0);
        for _ in 0..sim.rng.below(200) {
            sim.step();
        }
        if sim.puts_a_record() {
            sim.roll_back(kept);
            rolled += 1;
        }
    }
    sim.crashes += 1; // As above.
    sim.close();
    rolled
}

#[test]
fn a_rollback_to_any_moment_is_noticed() {
    let rolled: u32 = (0..24).map(run_any).sum();
    assert!(rolled > 400, "only {rolled} rollbacks");
}

#[test]
fn a_rollback_under_a_journal_loses_nothing_that_was_flushed() {
    let rolled: u32 = (0..24).map(run).sum();
    assert!(rolled > 40, "only {rolled} rollbacks");
}
