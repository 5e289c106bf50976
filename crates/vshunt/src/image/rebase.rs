//! `vshunt image rebase`: an overlay gets another backing file.
//!
//! In the safe mode the overlay first gets everything in which the old and the new backing file
//! differ. A guest reads the same from the overlay during all of that. Then one write of the header
//! names the new backing file.

use std::path::Path;

use qcow2::Image;
use qcow2::amend::{Amendment, amend};
use vshunt_block::{DiskAccess, Extent};

use super::access::{self, Wanted};
use super::args::RebaseArgs;
use super::chain;
use super::info::beside;
use super::progress::Bar;
use super::{ImageFormat, changing, failed, no_qcow2};
use crate::outcome::{Failure, Outcome, note};

/// Bytes that are compared at once, at most.
const CHUNK: u64 = 1 << 20;
/// Longest part that is asked for at once, bytes.
const STEP: u64 = 1 << 40;

pub(super) fn run(args: &RebaseArgs, quiet: bool) -> Outcome {
    let path = &args.file;
    let backing = match (args.backing.as_str(), &args.backing_format) {
        ("", _) => None,
        (name, Some(format)) => Some((name.to_owned(), format.clone())),
        (_, None) => {
            return Err(Failure::Usage(
                "a backing file without its format; give -F raw or -F qcow2: what a guest wrote decides else"
                    .into(),
            ));
        }
    };
    let (file, format) = changing(path, args.format, quiet)?;
    if format != ImageFormat::Qcow2 {
        return Err(no_qcow2(path, "backing files"));
    }
    let before = Image::open(&file).map_err(|e| failed(path, &e))?.header().clone();
    drop(file);
    if !args.unsafe_backing {
        // Elsewhere a disk that reads as zeroes already is not changed by zeroes.
        let stores_zeroes = before.version >= 3 && before.backing.is_some();
        copy(args, backing.as_ref(), stores_zeroes, quiet)?;
    }
    // The locks were those of the disk during the copy.
    let (file, _) = changing(path, Some(ImageFormat::Qcow2), quiet)?;
    let mut image = Image::open(&file).map_err(|e| failed(path, &e))?;
    if image.header().backing != before.backing {
        return Err(Failure::Failed(format!(
            "{} was changed by another process, and is left as it is; start again",
            path.display()
        )));
    }
    amend(&mut image, &Amendment { backing: Some(backing), ..Amendment::default() })
        .map_err(|e| failed(path, &e))
}

/// Copies to the overlay what it would lose by the change.
fn copy(args: &RebaseArgs, backing: Option<&(String, String)>, stores_zeroes: bool, quiet: bool) -> Outcome {
    let path = &args.file;
    let new = backing.map(|(name, format)| below(path, name, format)).transpose()?;
    let overlay = access::open(path, Some(ImageFormat::Qcow2), Wanted::Writing)?;
    if overlay.lost_writes {
        note(&format!("{}: writes before a kill may be missing", path.display()));
    }
    let cluster = overlay.disk.disk().cluster_bytes().unwrap_or(CHUNK);
    let shown = path.display().to_string();
    let mut rebase = Rebase { overlay: overlay.disk, new, cluster, stores_zeroes, shown };
    let mut bar = Bar::bytes("rebasing", quiet, args.progress);
    let done = rebase.run(&mut bar);
    drop(bar);
    let disk = rebase.overlay.disk().clone();
    drop(rebase);
    // An error in the copy is the one that is reported.
    let closed =
        disk.sync().map_err(|e| e.to_string()).and_then(|()| disk.close().map_err(|e| e.to_string()));
    done.and_then(|()| closed.map_err(|e| Failure::Failed(format!("{}: {e}", path.display()))))
}

/// Opens the new backing file. It must not consist of the overlay.
fn below(image: &Path, name: &str, format: &str) -> Outcome<DiskAccess> {
    let format = match format {
        "raw" => ImageFormat::Raw,
        "qcow2" => ImageFormat::Qcow2,
        other => {
            return Err(Failure::Usage(format!(
                "the format {other} of a backing file is not known here; raw and qcow2 are, and -u does not look at it"
            )));
        }
    };
    let path = beside(image, name);
    chain::check_above(image, &[image], &path, format)?;
    Ok(access::open(&path, Some(format), Wanted::Reading)?.disk)
}

struct Rebase {
    overlay: DiskAccess,
    /// The new backing file; `None` reads as zeroes.
    new: Option<DiskAccess>,
    cluster: u64,
    /// Whether zeroes of a whole cluster become an entry of the map.
    stores_zeroes: bool,
    shown: String,
}

impl Rebase {
    fn failed(&self, at: u64, e: &std::io::Error) -> Failure {
        Failure::Failed(format!("{} cannot be rebased, at byte {at}: {e}", self.shown))
    }

    fn run(&mut self, bar: &mut Bar) -> Outcome {
        let (mut at, size) = (0, self.overlay.disk().size_bytes());
        while at < size {
            at += self.part(at, size).map_err(|e| self.failed(at, &e))?;
            bar.set(at, size);
        }
        Ok(())
    }

    /// Handles the part of the disk at `at`. Returns its length.
    fn part(&mut self, at: u64, size: u64) -> std::io::Result<u64> {
        let own = self.overlay.seek(at, (size - at).min(STEP), true)?;
        if own.extent != Extent::Absent {
            return Ok(own.len);
        }
        let old = self.overlay.seek(at, own.len, false)?;
        let (new_zero, new_len) = self.new_extent(at, old.len)?;
        let len = old.len.min(new_len);
        if old.extent == Extent::Zero && new_zero {
            return Ok(len);
        }
        // Up to the end of a cluster, so that whole clusters are written.
        let chunk = CHUNK.max(self.cluster);
        let len = own.len.min(chunk - at % chunk);
        self.compare(at, len)?;
        Ok(len)
    }

    /// Returns whether the new backing file reads as zeroes at `at`, and for how many bytes.
    fn new_extent(&mut self, at: u64, len: u64) -> std::io::Result<(bool, u64)> {
        let Some(new) = &mut self.new else { return Ok((true, len)) };
        let size = new.disk().size_bytes();
        if at >= size {
            return Ok((true, len));
        }
        let found = new.seek(at, len.min(size - at), false)?;
        Ok((found.extent == Extent::Zero, found.len))
    }

    /// Writes to the overlay the clusters of a part in which old and new differ.
    fn compare(&mut self, at: u64, len: u64) -> std::io::Result<()> {
        let old = self.overlay.read(at, len as usize)?.to_vec();
        let mut new = vec![0; len as usize];
        if let Some(disk) = &mut self.new {
            let here = disk.disk().size_bytes().saturating_sub(at).min(len) as usize;
            if here > 0 {
                new[..here].copy_from_slice(disk.read(at, here)?);
            }
        }
        let mut done = 0;
        while done < old.len() {
            let left = self.cluster - (at + done as u64) % self.cluster;
            let end = old.len().min(done + left as usize);
            let bytes = &old[done..end];
            if bytes != &new[done..end] {
                let whole = bytes.len() as u64 == self.cluster;
                match self.stores_zeroes && whole && bytes.iter().all(|b| *b == 0) {
                    true => self.overlay.zero(at + done as u64, bytes.len() as u64)?,
                    false => self.overlay.write(at + done as u64, bytes)?,
                }
            }
            done = end;
        }
        Ok(())
    }
}
