//! Persistent dirty bitmaps of images that are served.

use ::qcow2::bitmap::{self, Bits, flag};
use ::qcow2::create::{Options, create};
use ::qcow2::memory::Memory;
use ::qcow2::{Image, check};

use super::*;

const BYTES: u64 = 4 << 20;

/// Makes an image with an enabled bitmap and a disabled one.
fn bitmapped(dir: &TempDir) -> DiskSpec {
    let file = Memory::new(Vec::new(), BYTES);
    create(&file, None, &Options::new(BYTES), &mut |_, _| {}).unwrap();
    bitmap::add(&mut Image::open(&file).unwrap(), "on", Some(16), true).unwrap();
    bitmap::add(&mut Image::open(&file).unwrap(), "off", Some(16), false).unwrap();
    let path = dir.path().join("disk.qcow2");
    fs::write(&path, file.bytes()).unwrap();
    DiskSpec { format: Some(Format::Qcow2), ..raw_spec(&path) }
}

/// Returns the name and flags of each bitmap in the file.
fn in_file(spec: &DiskSpec) -> Vec<(String, u32)> {
    let file = Memory::new(fs::read(spec.file.as_ref().unwrap()).unwrap(), 16 << 20);
    let list = bitmap::read_directory(&Image::open(&file).unwrap()).unwrap();
    list.iter().map(|b| (b.name(), b.flags)).collect()
}

fn clean(spec: &DiskSpec) {
    let file = Memory::new(fs::read(spec.file.as_ref().unwrap()).unwrap(), 16 << 20);
    let found = check::check(&file, check::Repair::No, &mut check::Quiet).unwrap();
    assert!(found.is_clean(), "{found:?}");
}

fn end(rig: Rig) {
    let Rig { mut uring, handle } = rig;
    handle.detach(&mut uring);
}

const IN_USE: u32 = flag::IN_USE | flag::AUTO;

#[test]
fn the_tracker_of_writes_puts_bitmaps_back() {
    let dir = scratch("/var/tmp");
    let spec = bitmapped(&dir);
    let mut rig = Rig::new(&spec);
    assert_eq!(in_file(&spec), [("on".to_owned(), IN_USE), ("off".to_owned(), flag::IN_USE)]);
    let mut all = rig.disk().take_bitmaps();
    assert_eq!(rig.write(1 << 20, &[7; 4096]), 0);
    all[0].bits.set_range(1 << 20, 4096);
    all[1].enabled = true;
    let bits: Vec<Bits> = all.iter().map(|b| b.bits.clone()).collect();
    rig.disk().put_bitmaps(all);
    end(rig);
    assert_eq!(in_file(&spec), [("on".to_owned(), flag::AUTO), ("off".to_owned(), flag::AUTO)]);
    clean(&spec);
    let rig = Rig::new(&spec);
    let again = rig.disk().take_bitmaps();
    assert!(again.iter().zip(&bits).all(|(a, b)| a.bits == *b && !a.inconsistent));
    end(rig);
    assert_eq!(
        in_file(&spec),
        [("on".to_owned(), IN_USE), ("off".to_owned(), IN_USE)],
        "nobody brought them back"
    );
    let rig = Rig::new(&spec);
    let all = rig.disk().take_bitmaps();
    assert!(all.iter().all(|b| b.inconsistent && (0..b.bits.len()).all(|at| b.bits.get(at))));
    rig.disk().put_bitmaps(all[1..].to_vec());
    end(rig);
    assert_eq!(in_file(&spec), [("off".to_owned(), flag::AUTO)]);
    clean(&spec);
}

#[test]
fn untracked_writes_make_bitmaps_inconsistent() {
    let dir = scratch("/var/tmp");
    let spec = bitmapped(&dir);
    let mut rig = Rig::new(&spec);
    assert_eq!(rig.write(0, &[7; 4096]), 0);
    end(rig);
    assert_eq!(in_file(&spec), [("on".to_owned(), IN_USE), ("off".to_owned(), 0)]);
    clean(&spec);
    // Opening it for reading does not change it.
    let before = fs::read(spec.file.as_ref().unwrap()).unwrap();
    let rig = Rig::new(&DiskSpec { readonly: true, ..spec.clone() });
    assert!(rig.disk().take_bitmaps().is_empty());
    end(rig);
    assert!(fs::read(spec.file.as_ref().unwrap()).unwrap() == before);
}
