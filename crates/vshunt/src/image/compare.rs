//! `vshunt image compare`.

use std::path::{Path, PathBuf};

use vshunt_block::{DiskAccess, Extent};

use super::ImageFormat;
use super::access::{self, Wanted};
use super::args::CompareArgs;
use super::chain::{self, Chain, Layer, Part};
use super::file::{For, ImageFile};
use super::progress::Bar;
use crate::outcome::{Failure, Outcome, note, print};

/// Exit codes, as in qemu-img.
const DIFFER: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_MAP: u8 = 3;
const CANNOT_READ: u8 = 4;

/// Unit in which a difference is reported, bytes.
const SECTOR: usize = 512;
/// Longest part that is asked for at once, bytes.
const STEP: u64 = 1 << 40;

pub(super) fn run(args: &CompareArgs, quiet: bool) -> Outcome {
    let sides = [(&args.first, args.first_format), (&args.second, args.second_format)];
    let open = |(path, format): (&PathBuf, _)| Side::open(path, format, args.force_share);
    let (a, b) = open(sides[0]).and_then(|a| Ok((a, open(sides[1])?))).map_err(coded(CANNOT_OPEN))?;
    let verdict = compare(args, a, b, quiet)?;
    if !quiet {
        verdict.lines().try_for_each(|line| print(&format!("{line}\n")))?;
    }
    if verdict.ends_with(SAME) { Ok(()) } else { Err(Failure::Status(DIFFER)) }
}

const SAME: &str = "Images are identical.";

/// Returns a function that prints an error and replaces it by an exit code.
fn coded(code: u8) -> impl Fn(Failure) -> Failure {
    move |e| {
        if matches!(e, Failure::OutputClosed) {
            return e;
        }
        if let Failure::Failed(why) | Failure::Usage(why) = &e {
            note(why);
        }
        Failure::Status(code)
    }
}

/// Compares two disks. Returns the lines that qemu-img prints.
fn compare(args: &CompareArgs, mut a: Side, mut b: Side, quiet: bool) -> Outcome<String> {
    let (common, longest) = (a.size().min(b.size()), a.size().max(b.size()));
    if args.strict && common != longest {
        return Ok("Strict mode: Image size mismatch!".to_owned());
    }
    let layers = if args.strict { Some(open_maps(args).map_err(coded(CANNOT_MAP))?) } else { None };
    let mut maps = match &layers {
        Some((a, b)) => Some(Maps::new(a, b).map_err(coded(CANNOT_MAP))?),
        None => None,
    };
    let mut bar = Bar::bytes("comparing", quiet, args.progress);
    let mut at = 0;
    while at < common {
        let most = match &mut maps {
            None => common - at,
            Some(maps) => match maps.equal(at, common).map_err(coded(CANNOT_MAP))? {
                None => return Ok(format!("Strict mode: Offset {at} block status mismatch!")),
                Some(len) => len,
            },
        };
        let (zero_a, len_a) = a.extent(at, most).map_err(coded(CANNOT_READ))?;
        let (zero_b, len_b) = b.extent(at, most).map_err(coded(CANNOT_READ))?;
        let len = len_a.min(len_b);
        let (len, same) = match (zero_a, zero_b) {
            (true, true) => (len, None),
            (true, false) => b.nonzero(at, len).map_err(coded(CANNOT_READ))?,
            (false, true) => a.nonzero(at, len).map_err(coded(CANNOT_READ))?,
            (false, false) => differs(&mut a, &mut b, at, len).map_err(coded(CANNOT_READ))?,
        };
        if let Some(at) = same {
            return Ok(format!("Content mismatch at offset {at}!"));
        }
        at += len;
        bar.set(at, longest);
    }
    let longer = if a.size() > b.size() { &mut a } else { &mut b };
    while at < longest {
        let (zero, len) = longer.extent(at, longest - at).map_err(coded(CANNOT_READ))?;
        let (len, found) =
            if zero { (len, None) } else { longer.nonzero(at, len).map_err(coded(CANNOT_READ))? };
        if let Some(at) = found {
            return Ok(format!("Warning: Image size mismatch!\nContent mismatch at offset {at}!"));
        }
        at += len;
        bar.set(at, longest);
    }
    let warning = if common == longest { "" } else { "Warning: Image size mismatch!\n" };
    Ok(format!("{warning}{SAME}"))
}

/// Compares the data of both. Returns the bytes that were examined, and the first difference.
fn differs(a: &mut Side, b: &mut Side, at: u64, len: u64) -> Outcome<(u64, Option<u64>)> {
    let len = len.min(DiskAccess::BYTES_MAX as u64) as usize;
    let (a, b) = (a.read(at, len)?, b.read(at, len)?);
    if a == b {
        return Ok((len as u64, None));
    }
    let sector = a.chunks(SECTOR).zip(b.chunks(SECTOR)).position(|(a, b)| a != b);
    Ok((len as u64, sector.map(|sector| at + (sector * SECTOR) as u64)))
}

/// Opens both images with the images below, for the strict mode.
fn open_maps(args: &CompareArgs) -> Outcome<(Vec<Layer>, Vec<Layer>)> {
    let open = |path, format| chain::open(path, format, args.force_share);
    Ok((open(&args.first, args.first_format)?, open(&args.second, args.second_format)?))
}

/// The maps of both images, for the strict mode.
struct Maps<'l>(Chain<'l>, Chain<'l>);

impl<'l> Maps<'l> {
    fn new(a: &'l [Layer], b: &'l [Layer]) -> Outcome<Self> {
        Ok(Self(Chain::new(a, None)?, Chain::new(b, None)?))
    }

    /// Returns for how many bytes, up to `end`, both have the same kind of part at `at`. `None`:
    /// they do not.
    fn equal(&mut self, at: u64, end: u64) -> Outcome<Option<u64>> {
        let Self(a, b) = self;
        let (part_a, part_b) = (a.at(at, end)?, b.at(at, end)?);
        // What an image that is too short leaves to the one above counts as allocated.
        let kind = |chain: &Chain<'_>, p: &Part| {
            (p.data, p.zero, p.present || chain.has_below(p.depth), p.offset.is_some())
        };
        let same = kind(a, &part_a) == kind(b, &part_b);
        Ok(same.then_some(part_a.len.min(part_b.len)))
    }
}

/// One of the two disks.
struct Side {
    disk: DiskAccess,
    shown: String,
    /// The file of a raw image, whose holes need not be read.
    raw: Option<ImageFile>,
}

impl Side {
    fn open(path: &Path, format: Option<ImageFormat>, share: bool) -> Outcome<Self> {
        let opened = access::open(path, format, if share { Wanted::Sharing } else { Wanted::Reading })?;
        let raw = match opened.format {
            // The disk holds the locks.
            ImageFormat::Raw => Some(ImageFile::open(path, For::Sharing)?),
            ImageFormat::Qcow2 => None,
        };
        Ok(Self { disk: opened.disk, shown: path.display().to_string(), raw })
    }

    fn size(&self) -> u64 {
        self.disk.disk().size_bytes()
    }

    fn failed(&self, at: u64, e: &std::io::Error) -> Failure {
        Failure::Failed(format!("{} cannot be read at byte {at}: {e}", self.shown))
    }

    /// Returns whether a part reads as zeroes without being read, and its length.
    fn extent(&mut self, at: u64, len: u64) -> Outcome<(bool, u64)> {
        let found = match &self.raw {
            Some(raw) => raw.run(at, len),
            None => {
                let found = self.disk.seek(at, len.min(STEP), false);
                found.map(|found| (found.extent == Extent::Zero, found.len))
            }
        };
        found.map_err(|e| self.failed(at, &e))
    }

    fn read(&mut self, at: u64, len: usize) -> Outcome<&[u8]> {
        let Self { disk, shown, .. } = self;
        disk.read(at, len).map_err(|e| Failure::Failed(format!("{shown} cannot be read at byte {at}: {e}")))
    }

    /// Searches for the first sector that is not zero. Returns the bytes that were examined, and
    /// its offset.
    fn nonzero(&mut self, at: u64, len: u64) -> Outcome<(u64, Option<u64>)> {
        let len = len.min(DiskAccess::BYTES_MAX as u64) as usize;
        let bytes = self.read(at, len)?;
        let sector = bytes.chunks(SECTOR).position(|sector| sector.iter().any(|b| *b != 0));
        Ok((len as u64, sector.map(|sector| at + (sector * SECTOR) as u64)))
    }
}
