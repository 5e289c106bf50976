//! Checks an image: counts all references of its tables, compares them with its reference counts,
//! and repairs it.
//!
//! Each table is read once, however often it is referred to, and a table that overlaps another one
//! is not read. So time is bounded by the data that the file really contains, and memory by the
//! clusters in use (see `counts`).
//!
//! A repair never frees something while a reference to it exists. It changes entries first, then
//! counts, then the flags that say that a count is 1.

mod claim;
mod compare;
mod counts;
mod data;
mod drop;

use crate::header::{Header, incompatible};
use crate::{Image, Result, Storage};

use counts::Counts;
use drop::Defects;

/// The errors to repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// None.
    No,
    /// Only leaks: clusters without a reference are freed.
    Leaks,
    /// All. Invalid entries are replaced by entries that read as zeroes, and snapshots and bitmaps
    /// with invalid tables are removed.
    All,
}

/// The findings, counted like `qemu-img check` counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// Things that could not be checked or repaired.
    pub check_errors: u64,
    /// Errors that can cost data and are not repaired.
    pub corruptions: u64,
    /// Clusters that nothing refers to, or that are counted too often, and are not repaired.
    pub leaks: u64,
    /// Repaired errors.
    pub corruptions_fixed: u64,
    /// Repaired leaks.
    pub leaks_fixed: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters of the disk that are allocated.
    pub allocated_clusters: u64,
    /// Allocated clusters that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Compressed clusters.
    pub compressed_clusters: u64,
    /// The end of the last cluster in use.
    pub image_end_offset: u64,
}

impl CheckResult {
    /// Returns whether nothing is wrong, or everything was repaired.
    pub fn is_clean(&self) -> bool {
        (self.check_errors, self.corruptions, self.leaks) == (0, 0, 0)
    }
}

/// Receives findings and progress.
pub trait Findings {
    /// Receives a sentence about an error. The number of sentences is limited.
    fn found(&mut self, text: &str);

    /// Receives the number of tables read, and of all tables.
    fn progress(&mut self, done: u64, total: u64);
}

/// Ignores findings and progress.
pub struct Quiet;

impl Findings for Quiet {
    fn found(&mut self, _: &str) {}

    fn progress(&mut self, _: u64, _: u64) {}
}

/// Most sentences about errors.
const REPORTS_MAX: u64 = 1000;

/// Checks the image in `file`, and repairs it as `repair` says. After a repair the image is checked
/// again, and the result is that of the second check.
///
/// [`Repair::All`] also repairs a dirty image (lazy refcounts). When nothing is wrong any more, it
/// clears the bits for dirty and corrupt. Everything that is reported as repaired is on stable
/// storage. The changes of a [journal](crate::journal) have to be in the image before a repair,
/// because a repair frees clusters that only the journal refers to; see
/// [`recover`](crate::journal::recover).
///
/// # Errors
/// No image or an unsupported one, an active L1 table outside of the file, and those of the
/// storage.
pub fn check(file: &dyn Storage, repair: Repair, findings: &mut dyn Findings) -> Result<CheckResult> {
    let (mut result, defects) = Checker::run(file, repair, findings)?;
    if repair == Repair::All && defects.any() {
        defects.drop(file)?;
        let (again, _) = Checker::run(file, repair, findings)?;
        result = CheckResult {
            corruptions_fixed: result.corruptions_fixed + again.corruptions_fixed,
            // Their clusters are freed with them, so these leaks are not reported.
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

/// One check of an image.
struct Checker<'w, 's> {
    image: Image<'s>,
    repair: Repair,
    findings: &'w mut dyn Findings,
    reports: u64,
    result: CheckResult,
    counts: Counts,
    /// The refcount table. Invalid entries are 0.
    reftable: Vec<u64>,
    defects: Defects,
    /// Whether the refcount blocks cannot be repaired one by one.
    rebuild: bool,
    active: Vec<u64>,
    /// L2 tables whose entries have to be counted, as often as they are referred to.
    l2: Vec<u64>,
    done: u64,
    total: u64,
}

impl<'w, 's> Checker<'w, 's> {
    fn run(
        file: &'s dyn Storage,
        repair: Repair,
        findings: &'w mut dyn Findings,
    ) -> Result<(CheckResult, Defects)> {
        let image = Image::open(file)?;
        let result = CheckResult { total_clusters: image.header.clusters(), ..CheckResult::default() };
        let mut checker = Self {
            image,
            repair,
            findings,
            reports: 0,
            result,
            counts: Counts::default(),
            reftable: Vec::new(),
            defects: Defects::default(),
            rebuild: false,
            active: Vec::new(),
            l2: Vec::new(),
            done: 0,
            total: 0,
        };
        checker.claim_all()?;
        checker.compare()?;
        checker.check_flags()?;
        if checker.reports > REPORTS_MAX {
            let text = format!("… and {} more", checker.reports - REPORTS_MAX);
            checker.findings.found(&text);
        }
        Ok((checker.result, checker.defects))
    }

    fn step(&mut self) {
        self.done += 1;
        self.findings.progress(self.done.min(self.total), self.total);
    }

    fn report(&mut self, kind: &str, text: std::fmt::Arguments<'_>) {
        self.reports += 1;
        if self.reports <= REPORTS_MAX {
            self.findings.found(&format!("{kind} {text}"));
        }
    }

    /// Reports an error that only [`Repair::All`] repairs. Returns whether to repair it.
    fn corrupt(&mut self, text: std::fmt::Arguments<'_>) -> bool {
        let fix = self.repair == Repair::All;
        if fix {
            self.fixed(text);
        } else {
            self.result.corruptions += 1;
            self.report("ERROR", text);
        }
        fix
    }

    /// Reports an error that was repaired.
    fn fixed(&mut self, text: std::fmt::Arguments<'_>) {
        self.result.corruptions_fixed += 1;
        self.report("Repairing", text);
    }

    /// Reports an error that cannot be repaired.
    fn unrepairable(&mut self, text: std::fmt::Arguments<'_>) {
        self.result.corruptions += 1;
        self.report("ERROR", text);
    }
}

#[cfg(test)]
mod tests;
