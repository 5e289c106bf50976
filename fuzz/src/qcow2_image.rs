//! Images made of hostile bytes. They are parsed, described, checked, repaired and changed without
//! a panic, and are clean after a successful repair.
//!
//! The bytes are operations on a valid image. Most operations write nearly valid entries of its
//! tables. Some inputs are used as an image unchanged.

use qcow2::check::{Quiet, Repair, check};
use qcow2::create::{Options, Preallocation, create};
use qcow2::header::{Header, Open};
use qcow2::memory::Memory;
use qcow2::resize::{Around, resize};
use qcow2::{Image, Storage, bitmap, info, journal, snapshot};

use crate::bytes::Bytes;

/// Most bytes of a file of a target. Writes for an image fail beyond it.
const FILE_MOST: u64 = 8 << 20;

/// The fuzz target.
pub fn qcow2_image(data: &[u8]) {
    let mut b = Bytes(data);
    let file = match b.below(8) {
        0 => Memory::new(b.take(data.len()).to_vec(), FILE_MOST),
        _ => {
            let Some(file) = good(&mut b) else { return };
            spoil(&mut b, &file);
            file
        }
    };
    let _ = Header::parse(&file.bytes());
    let described = info::info(&file).is_ok();
    let before = file.bytes();
    let first = check(&file, Repair::No, &mut Quiet);
    assert!(file.bytes() == before, "a check without repair wrote");
    let leaks = Memory::new(before.clone(), FILE_MOST);
    if let (Ok(first), Ok(after)) = (first, check(&leaks, Repair::Leaks, &mut Quiet)) {
        // Corruptions may hide leaks, and leaks may hide corruptions.
        assert!(first.corruptions > 0 || after.is_clean(), "{first:?} became {after:?}");
    }
    let repaired = check(&file, Repair::All, &mut Quiet);
    if let Ok(result) = repaired {
        let again = check(&file, Repair::No, &mut Quiet).expect("what was checked can be checked again");
        assert_eq!((again.corruptions, again.leaks), (result.corruptions, result.leaks));
    }
    let clean = described && repaired.is_ok_and(|r| r.is_clean());
    change(&mut b, &file, clean);
}

/// Makes a small image that uses all features.
fn good(b: &mut Bytes<'_>) -> Option<Memory> {
    let file = Memory::new(Vec::new(), FILE_MOST);
    let flags = b.u8();
    let options = Options {
        version: if flags & 1 == 0 { 3 } else { 2 },
        cluster_size: [512, 1024, 4096, 16384][b.below(4)],
        refcount_bits: if flags & 1 == 0 { 1 << b.below(7) } else { 16 },
        extended_l2: flags & 2 != 0,
        lazy_refcounts: flags & 4 != 0 && flags & 1 == 0,
        preallocation: if flags & 8 != 0 { Preallocation::Metadata } else { Preallocation::Off },
        ..Options::new(512 * (1 + u64::from(b.u8())))
    };
    create(&file, None, &options, &mut |_, _| {}).ok()?;
    if flags & 64 != 0 && options.version == 3 {
        // A longer header than any program writes. The bytes behind it are kept, and extensions
        // come later.
        let len = 104 + 8 * (u32::from(b.u16()) % (options.cluster_size as u32 / 8));
        file.write_at(100, &len.to_be_bytes()).ok()?;
        file.write_at(112, &vec![0; options.cluster_size as usize - 112]).ok()?;
    }
    let mut image = Image::open(&file).ok()?;
    if flags & 16 != 0 {
        let _ = snapshot::create(&mut image, "s", (1, 2));
    }
    if flags & 32 != 0 {
        let _ = bitmap::add(&mut image, "b", Some(9), true);
    }
    Some(file)
}

/// Overwrites fields and entries, often with values that are valid elsewhere.
fn spoil(b: &mut Bytes<'_>, file: &Memory) {
    let len = file.bytes().len() as u64;
    for _ in 0..b.below(24) {
        let at = match b.below(4) {
            0 => u64::from(b.u8()),
            1 => u64::from(b.u16()) * 8 % len,
            _ => u64::from(b.u8()) * 512 % len + u64::from(b.u8() % 8) * 8,
        };
        let value = match b.below(5) {
            0 => b.u64(),
            1 => u64::from(b.u8()) * 512,
            2 => (u64::from(b.u8()) * 512) | (1 << 63),
            3 => 1 << (b.u8() % 64),
            _ => u64::from(b.u8()),
        };
        let bytes = value.to_be_bytes();
        let n = 1 + b.below(8);
        let _ = file.write_at(at, &bytes[8 - n..]);
    }
}

/// Opens an image for writing with a journal, writes a generation as a flush does, and closes it.
fn serve(file: &Memory, generation: u64) -> qcow2::Result<()> {
    let id = [1; 16];
    let mut open_header = journal::mark_open(file, id)?;
    open_header.set_generation(generation);
    file.write_at(0, open_header.bytes()).map_err(qcow2::Error::io("cannot write the header"))?;
    let header = Image::open(file)?.header().clone();
    let mark = journal::journal_of(&header);
    assert_eq!(mark, Some(Open::Journal { id, generation }), "a generation went astray");
    journal::mark_closed(file)
}

/// Applies the other changes to an image, valid or not. An image that was clean stays clean.
/// VSHUNT_FUZZ_KEEP names a file in which the result is stored.
fn change(b: &mut Bytes<'_>, file: &Memory, clean: bool) {
    for _ in 0..3 {
        let Ok(mut image) = Image::open(file) else { return };
        let around = Around { data: None, below: None, preallocation: Preallocation::Off };
        let what = b.below(9);
        let done = match what {
            0 => snapshot::create(&mut image, "new", (1, 2)).map(drop),
            1 => snapshot::apply(&mut image, "s"),
            2 => snapshot::delete(&mut image, "s"),
            3 => bitmap::add(&mut image, "new", None, true),
            4 => bitmap::remove(&mut image, "b"),
            5 => bitmap::load(&image, "b").map(drop),
            6 => bitmap::mark_in_use(&mut image),
            7 => serve(file, b.u64()),
            _ => resize(&mut image, u64::from(b.u16()) * 512, &around, &mut |_, _| {}),
        };
        if std::env::var_os("VSHUNT_FUZZ_KEEP").is_some_and(|to| std::fs::write(to, file.bytes()).is_err()) {
            eprintln!("the image could not be kept");
        }
        if clean {
            let r = check(file, Repair::No, &mut Quiet).expect("a clean image can be checked");
            assert!(r.is_clean(), "change {what} ended with {done:?} and left {r:?}");
        }
    }
}
