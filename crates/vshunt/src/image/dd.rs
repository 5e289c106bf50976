//! `vshunt image dd`.

use std::path::PathBuf;
use std::time::Instant;

use super::access::{self, Wanted};
use super::args::{CreateArgs, DdArgs};
use super::progress::{Bar, summary};
use super::{ImageFormat, convert, create};
use crate::keyval::parse_size;
use crate::outcome::{Failure, Outcome, print};

/// Bytes that are copied at once, at most.
const CHUNK: u64 = 1 << 20;
/// Bytes of a sector. A disk has whole sectors.
const SECTOR: u64 = 512;
/// The exit code for a copy of an image that may lack completed writes.
const LACKS: u8 = 3;

/// The operands.
struct Operands {
    from: PathBuf,
    to: PathBuf,
    block: u64,
    count: Option<u64>,
    skip: u64,
}

pub(super) fn run(args: &DdArgs, quiet: bool) -> Outcome {
    let operands = operands(&args.operands)?;
    let wanted = if args.force_share { Wanted::Sharing } else { Wanted::Reading };
    let format = access::format_of(&operands.from, args.format, wanted)?;
    convert::not_of(&operands.to, operands.from.clone(), format == ImageFormat::Qcow2)?;
    // Before a file is made, so that an unreadable source replaces nothing.
    let mut source = access::open(&operands.from, Some(format), wanted)?;
    let size = source.disk.disk().size_bytes();
    let start = operands.skip.saturating_mul(operands.block).min(size);
    let most = operands.count.map_or(u64::MAX, |count| count.saturating_mul(operands.block));
    let len = most.min(size - start);
    let target = Target { path: operands.to.clone(), new: !operands.to.exists() };
    let create = CreateArgs {
        format: args.output_format,
        backing: None,
        backing_format: None,
        unsafe_backing: false,
        options: Vec::new(),
        file: Some(operands.to.clone()),
        size: Some(len.next_multiple_of(SECTOR)),
    };
    create::run(create, true)?;
    let (mut bar, begun) = (Bar::bytes("copying", quiet, false), Instant::now());
    let done = copy(&mut source.disk, &operands, args.output_format, start..start + len, &mut bar);
    drop(bar);
    done.inspect_err(|_| target.remove())?;
    if !quiet {
        print(&summary("Copied", len, begun.elapsed()))?;
    }
    if source.lost_writes { Err(Failure::Status(LACKS)) } else { Ok(()) }
}

/// The new file.
struct Target {
    path: PathBuf,
    new: bool,
}

impl Target {
    /// Removes an incomplete copy, unless it replaced a file.
    fn remove(&self) {
        if self.new {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Copies a range of the source to the start of the target, which reads as zeroes if it is a file.
fn copy(
    source: &mut vshunt_block::DiskAccess,
    operands: &Operands,
    format: ImageFormat,
    range: std::ops::Range<u64>,
    bar: &mut Bar,
) -> Outcome {
    let (from, to) = (operands.from.display(), operands.to.display());
    if range.is_empty() {
        return Ok(());
    }
    let mut target = access::open(&operands.to, Some(format), Wanted::Writing)?.disk;
    let fresh = operands.to.metadata().is_ok_and(|m| m.is_file());
    let mut at = range.start;
    while at < range.end {
        let len = CHUNK.min(range.end - at);
        let cannot = |e| Failure::Failed(format!("{from} cannot be read at byte {at}: {e}"));
        let mut bytes = source.read(at, len as usize).map_err(cannot)?.to_vec();
        bytes.resize(len.next_multiple_of(SECTOR) as usize, 0);
        let out = at - range.start;
        if !fresh || bytes.iter().any(|b| *b != 0) {
            let cannot = |e| Failure::Failed(format!("{to} cannot be written at byte {out}: {e}"));
            target.write(out, &bytes).map_err(cannot)?;
        }
        at += len;
        bar.set(at - range.start, range.end - range.start);
    }
    let disk = target.disk().clone();
    drop(target);
    let synced = disk.sync().map_err(|e| Failure::Failed(format!("{to} cannot be made stable: {e}")));
    synced.and_then(|()| disk.close().map_err(|e| Failure::Failed(format!("{to}: {e}"))))
}

/// Parses `if=FILE of=FILE bs=SIZE count=N skip=N`. The last one of a name counts.
fn operands(list: &[String]) -> Outcome<Operands> {
    let (mut from, mut to, mut block, mut count, mut skip) = (None, None, SECTOR, None, 0);
    for operand in list {
        let Some((name, value)) = operand.split_once('=') else {
            return Err(Failure::Usage(format!("{operand}: write if=FILE of=FILE bs=SIZE count=N skip=N")));
        };
        let number = || parse_size(value).map_err(|e| Failure::Usage(format!("{name}: {e}")));
        match name {
            "if" => from = Some(PathBuf::from(value)),
            "of" => to = Some(PathBuf::from(value)),
            "bs" => block = number()?,
            "count" => count = Some(number()?),
            "skip" => skip = number()?,
            _ => {
                return Err(Failure::Usage(format!(
                    "{operand}: the operands are if, of, bs, count and skip"
                )));
            }
        }
    }
    if block == 0 || block > i32::MAX as u64 {
        return Err(Failure::Usage(format!("bs={block} is not from 1 to {}", i32::MAX)));
    }
    match (from, to) {
        (Some(from), Some(to)) => Ok(Operands { from, to, block, count, skip }),
        _ => Err(Failure::Usage("what is copied, and to where? give if=FILE and of=FILE".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_and_their_errors() {
        let list = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let o = operands(&list("if=a of=b=c bs=1M skip=2 count=1k bs=4K")).unwrap();
        assert_eq!((o.block, o.count, o.skip), (4096, Some(1024), 2));
        assert_eq!((o.from, o.to), (PathBuf::from("a"), PathBuf::from("b=c")));
        for (text, word) in [
            ("if=a", "of=FILE"),
            ("of=a", "if=FILE"),
            ("if=a of=b bs=0", "bs=0"),
            ("if=a of=b bs=4G", "bs=4294967296"),
            ("if=a of=b count=x", "count"),
            ("if=a of=b seek=1", "seek=1"),
            ("a b", "if=FILE"),
        ] {
            let Err(Failure::Usage(why)) = operands(&list(text)) else { panic!("{text}") };
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
