//! Checks an image: counts what its tables refer to, compares that with its reference counts, and repairs.
//!
//! Each table is read once, however often it is referred to, and a table that lies over another is not read: time is
//! bounded by what the file really has, memory by the clusters in use (see `counts`).
//!
//! Repairing never takes a reference away that something may follow, before that something is gone: entries first, then
//! counts, then the flags that say that a count is 1.

mod claim;
mod compare;
mod counts;
mod data;
mod drop;

use crate::header::{Header, incompatible};
use crate::{Image, Result, Storage};

use counts::Counts;
use drop::Trouble;

/// What to do about what is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Nothing.
    No,
    /// Give clusters back that nothing refers to.
    Leaks,
    /// Everything. Entries that cannot be right are made to read as zeroes, snapshots and bitmaps whose
    /// tables cannot be are dropped.
    All,
}

/// What was found, as `qemu-img check` counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// What could not be checked or repaired.
    pub check_errors: u64,
    /// Errors that can cost data, still there.
    pub corruptions: u64,
    /// Clusters that nothing refers to, or that are counted too often; still there.
    pub leaks: u64,
    /// Errors that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those of them that have their place in the file.
    pub allocated_clusters: u64,
    /// Those that do not lie behind the one before.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
    /// Where the last cluster in use ends.
    pub image_end_offset: u64,
}

impl CheckResult {
    /// Nothing wrong, or nothing any more.
    pub fn is_clean(&self) -> bool {
        (self.check_errors, self.corruptions, self.leaks) == (0, 0, 0)
    }
}

/// Is told what is found, and how far it is.
pub trait Findings {
    /// A sentence on something that is wrong. Not all of very many.
    fn found(&mut self, text: &str);

    /// Tables read, of how many.
    fn progress(&mut self, done: u64, total: u64);
}

/// Tells nobody.
pub struct Quiet;

impl Findings for Quiet {
    fn found(&mut self, _: &str) {}

    fn progress(&mut self, _: u64, _: u64) {}
}

/// Sentences on what is wrong, at most.
const SAID_MAX: u64 = 1000;

/// Checks the image in `file`, and repairs it as told. After a repair that found something it is checked again, and
/// the result is what is wrong then.
///
/// A dirty image (lazy refcounts) is repaired by [`Repair::All`]: when nothing is wrong any more, the bits for dirty
/// and corrupt are cleared. What is reported as repaired is on stable storage. What a [journal](crate::journal) has for
/// the image must be in it before a repair, which frees what only the journal names: [`recover`](crate::journal::recover).
///
/// # Errors
/// No image, one that is not understood, an active L1 table out of the file, and the storage's.
pub fn check(file: &dyn Storage, repair: Repair, findings: &mut dyn Findings) -> Result<CheckResult> {
    let (mut result, trouble) = Checker::run(file, repair, findings)?;
    if repair == Repair::All && trouble.any() {
        trouble.drop(file)?;
        let (again, _) = Checker::run(file, repair, findings)?;
        result = CheckResult {
            corruptions_fixed: result.corruptions_fixed + again.corruptions_fixed,
            // What they took is free now: a matter of course.
            leaks_fixed: result.leaks_fixed,
            ..again
        };
    }
    if repair != Repair::No && (result.corruptions_fixed, result.leaks_fixed) != (0, 0) {
        let (again, _) = Checker::run(file, Repair::No, &mut Quiet)?;
        result = CheckResult {
            corruptions_fixed: result.corruptions_fixed,
            leaks_fixed: result.leaks_fixed,
            ..again
        };
    }
    if repair == Repair::All && (result.corruptions, result.check_errors) == (0, 0) {
        clear_bits(file)?;
    }
    Ok(result)
}

fn clear_bits(file: &dyn Storage) -> Result<()> {
    let mut image = Image::open(file)?;
    let bits = incompatible::DIRTY | incompatible::CORRUPT;
    if image.header.incompatible & bits == 0 && image.header.mark.is_none() {
        return Ok(());
    }
    let incompatible = image.header.incompatible & !bits;
    image.replace_header(Header { incompatible, mark: None, ..image.header.clone() })
}

/// One run over an image.
struct Checker<'w, 's> {
    image: Image<'s>,
    repair: Repair,
    findings: &'w mut dyn Findings,
    said: u64,
    result: CheckResult,
    counts: Counts,
    /// The refcount table; entries that cannot be are 0.
    reftable: Vec<u64>,
    trouble: Trouble,
    /// The reference counts are not where they can be repaired one by one.
    rebuild: bool,
    active: Vec<u64>,
    /// L2 tables as often as they are referred to, whose entries are to be counted.
    l2: Vec<u64>,
    done: u64,
    total: u64,
}

impl<'w, 's> Checker<'w, 's> {
    fn run(
        file: &'s dyn Storage,
        repair: Repair,
        findings: &'w mut dyn Findings,
    ) -> Result<(CheckResult, Trouble)> {
        let image = Image::open(file)?;
        let result = CheckResult { total_clusters: image.header.clusters(), ..CheckResult::default() };
        let mut checker = Self {
            image,
            repair,
            findings,
            said: 0,
            result,
            counts: Counts::default(),
            reftable: Vec::new(),
            trouble: Trouble::default(),
            rebuild: false,
            active: Vec::new(),
            l2: Vec::new(),
            done: 0,
            total: 0,
        };
        checker.claim_all()?;
        checker.compare()?;
        checker.check_flags()?;
        if checker.said > SAID_MAX {
            let text = format!("… and {} more", checker.said - SAID_MAX);
            checker.findings.found(&text);
        }
        Ok((checker.result, checker.trouble))
    }

    fn step(&mut self) {
        self.done += 1;
        self.findings.progress(self.done.min(self.total), self.total);
    }

    fn say(&mut self, kind: &str, text: std::fmt::Arguments<'_>) {
        self.said += 1;
        if self.said <= SAID_MAX {
            self.findings.found(&format!("{kind} {text}"));
        }
    }

    /// Something is wrong that only [`Repair::All`] repairs. Whether it is to be repaired.
    fn corrupt(&mut self, text: std::fmt::Arguments<'_>) -> bool {
        let fix = self.repair == Repair::All;
        if fix {
            self.fixed(text);
        } else {
            self.result.corruptions += 1;
            self.say("ERROR", text);
        }
        fix
    }

    /// Something was wrong.
    fn fixed(&mut self, text: std::fmt::Arguments<'_>) {
        self.result.corruptions_fixed += 1;
        self.say("Repairing", text);
    }

    /// Something is wrong that nobody repairs.
    fn hopeless(&mut self, text: std::fmt::Arguments<'_>) {
        self.result.corruptions += 1;
        self.say("ERROR", text);
    }
}

#[cfg(test)]
mod tests;
