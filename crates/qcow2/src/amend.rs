//! Changes of an image's options that are changes of its header. Each is one write of the header,
//! so that the image has the old or the new options, wherever the writing stops.

use crate::header::{Header, LAZY_REFCOUNTS, autoclear, incompatible};
use crate::snapshot::read_table;
use crate::status::{Contents, Reader};
use crate::{Error, Image, Result};

/// What is changed. `None` and `default()` leave an option as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// The version, 2 or 3.
    pub version: Option<u32>,
    /// Whether reference counts may be written late.
    pub lazy_refcounts: Option<bool>,
    /// Name and format of the backing file; `Some(None)`: none any more. What the disk reads as may
    /// change.
    pub backing: Option<Option<(String, String)>>,
    /// The name of the data file, which the image has to have.
    pub data_file: Option<String>,
    /// Whether the data file has to stay a raw image.
    pub data_file_raw: Option<bool>,
}

/// Makes the changes, all or none of them.
///
/// # Errors
/// The image was not closed or is corrupt; changes that contradict each other or the image; those
/// of the storage.
pub fn amend(image: &mut Image<'_>, wanted: &Amendment) -> Result<()> {
    let old = &image.header;
    if old.is_open() || old.has(incompatible::CORRUPT) {
        return Err(Error::corrupt("it was not closed, or is marked as corrupt"));
    }
    let mut header = old.clone();
    match wanted.version {
        Some(3) if old.version < 3 => upgrade(image, &mut header)?,
        Some(2) if old.version > 2 => downgrade(image, &mut header, wanted)?,
        _ => {}
    }
    if let Some(lazy) = wanted.lazy_refcounts {
        if lazy && header.version < 3 {
            return Err(Error::invalid("lazy_refcounts needs compat=1.1"));
        }
        header.compatible &= !LAZY_REFCOUNTS;
        header.compatible |= if lazy { LAZY_REFCOUNTS } else { 0 };
    }
    set_data_file(&mut header, wanted)?;
    if let Some(backing) = &wanted.backing {
        if backing.is_some() && header.autoclear & autoclear::RAW_DATA != 0 {
            return Err(Error::invalid(
                "a backing file and data_file_raw contradict each other: the data file would not be all",
            ));
        }
        (header.backing, header.backing_format) = backing.clone().unzip();
    }
    if header == image.header { Ok(()) } else { image.replace_header(header) }
}

fn set_data_file(header: &mut Header, wanted: &Amendment) -> Result<()> {
    if (wanted.data_file.is_some() || wanted.data_file_raw == Some(true))
        && !header.has(incompatible::DATA_FILE)
    {
        return Err(Error::invalid(
            "the image has no data file, and cannot get one; make a copy that has one",
        ));
    }
    if let Some(name) = &wanted.data_file {
        header.data_file = Some(name.clone());
    }
    match wanted.data_file_raw {
        Some(true) if header.autoclear & autoclear::RAW_DATA == 0 => Err(Error::invalid(
            "data_file_raw cannot be switched on: the data file need not have all data; make a copy",
        )),
        Some(false) => {
            header.autoclear &= !autoclear::RAW_DATA;
            Ok(())
        }
        _ => Ok(()),
    }
}

fn upgrade(image: &Image<'_>, header: &mut Header) -> Result<()> {
    if read_table(image)?.0.iter().any(|snapshot| snapshot.disk_size.is_none()) {
        return Err(Error::unsupported(
            "its snapshots do not have what version 3 needs; delete them, or make a copy with compat=1.1",
        ));
    }
    header.version = 3;
    (header.incompatible, header.compatible, header.autoclear) = (0, 0, 0);
    Ok(())
}

fn downgrade(image: &Image<'_>, header: &mut Header, wanted: &Amendment) -> Result<()> {
    let what = if wanted.data_file_raw == Some(true) || header.has(incompatible::DATA_FILE) {
        "a data file"
    } else if header.has(incompatible::EXTENDED_L2) {
        "extended_l2"
    } else if header.has(incompatible::COMPRESSION) {
        "another compression type than zlib"
    } else if header.refcount_order != 4 {
        "another refcount_bits than 16"
    } else if header.bitmaps.is_some() {
        "bitmaps; remove them first"
    } else if !header.extra.is_empty() {
        "unknown header fields"
    } else if has_zeroes(image)? {
        "clusters that read as zeroes"
    } else {
        header.version = 2;
        (header.incompatible, header.compatible, header.autoclear) = (0, 0, 0);
        return Ok(());
    };
    Err(Error::unsupported(format!(
        "version 2 (compat=0.10) cannot store what the image has: {what}; or make a copy with compat=0.10"
    )))
}

/// Returns whether a table of the disk or of a snapshot has an entry for zeroes.
fn has_zeroes(image: &Image<'_>) -> Result<bool> {
    let h = image.header();
    let mut tables = vec![(h.l1_offset, u64::from(h.l1_size))];
    tables.extend(read_table(image)?.0.iter().map(|s| (s.l1_offset, u64::from(s.l1_size))));
    for (at, entries) in tables {
        // What is behind the end of the disk counts, since the disk may grow.
        let size = entries.saturating_mul(h.l2_entries() << h.cluster_bits).min(i64::MAX as u64);
        let mut reader = Reader::of(Image::open(image.file)?, at, entries, size)?;
        let mut offset = 0;
        while offset < size {
            let part = reader.at(offset, size - offset)?;
            if part.contents == Contents::Zero {
                return Ok(true);
            }
            offset += part.len;
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Storage;
    use crate::check::{Quiet, Repair, check};
    use crate::create::{DataFile, Options, create};
    use crate::memory::Memory;

    fn made(options: &Options) -> Memory {
        let (file, data) = (Memory::new(Vec::new(), 64 << 20), Memory::new(Vec::new(), 64 << 20));
        let data = options.data_file.as_ref().map(|_| &data as &dyn Storage);
        create(&file, data, options, &mut |_, _| ()).unwrap();
        file
    }

    fn amended(file: &Memory, wanted: &Amendment) -> Result<Header> {
        amend(&mut Image::open(file).unwrap(), wanted)?;
        let result = check(file, Repair::No, &mut Quiet)?;
        assert!(result.is_clean());
        Ok(Image::open(file)?.header().clone())
    }

    fn version(version: u32) -> Amendment {
        Amendment { version: Some(version), ..Amendment::default() }
    }

    #[test]
    fn versions_there_and_back_with_all_names() {
        let backing = Some((String::from("below"), String::from("raw")));
        let file = made(&Options { version: 2, backing: backing.clone(), ..Options::new(1 << 20) });
        let old = file.bytes();
        let new = amended(&file, &version(3)).unwrap();
        assert_eq!((new.version, new.backing.as_deref()), (3, Some("below")));
        let lazy = Amendment { lazy_refcounts: Some(true), ..Amendment::default() };
        assert_eq!(amended(&file, &lazy).unwrap().compatible, LAZY_REFCOUNTS);
        let back = amended(&file, &version(2)).unwrap();
        assert_eq!((back.version, back.backing.as_deref()), (2, Some("below")));
        assert_eq!(back.backing_format.as_deref(), Some("raw"));
        assert!(amended(&file, &lazy).unwrap_err().to_string().contains("compat=1.1"));
        assert_eq!(file.bytes().len(), old.len());
    }

    #[test]
    fn one_write_makes_each_change() {
        let file = made(&Options::new(1 << 20));
        for backing in [Some(("x".repeat(1000), "qcow2".to_owned())), Some(("y".into(), "raw".into())), None]
        {
            file.record();
            let wanted = Amendment { backing: Some(backing.clone()), ..Amendment::default() };
            let header = amended(&file, &wanted).unwrap();
            assert_eq!(header.backing.zip(header.backing_format), backing);
            let writes = file.events();
            let count = writes.iter().filter(|e| matches!(e, crate::memory::Event::Write(..))).count();
            assert_eq!(count, 1, "{writes:?}");
        }
        let long =
            Amendment { backing: Some(Some(("x".repeat(1024), "raw".into()))), ..Amendment::default() };
        let before = file.bytes();
        assert!(amended(&file, &long).unwrap_err().to_string().contains("1023"));
        assert_eq!(file.bytes(), before);
    }

    #[test]
    fn what_version_2_cannot_store_is_refused() {
        let plain = Options::new(1 << 20);
        for (options, word) in [
            (Options { extended_l2: true, ..plain.clone() }, "extended_l2"),
            (Options { refcount_bits: 8, ..plain.clone() }, "refcount_bits"),
            (Options { compression: crate::header::Compression::Zstd, ..plain.clone() }, "compression type"),
            (
                Options { data_file: Some(DataFile { name: "d".into(), raw: false }), ..plain.clone() },
                "data file",
            ),
        ] {
            let why = amended(&made(&options), &version(2)).unwrap_err().to_string();
            assert!(why.contains(word) && why.contains("copy"), "{why}");
        }
        let file = made(&plain);
        let header = Image::open(&file).unwrap().header().clone();
        let l2: u64 = 1 << 20;
        file.set_len(l2 + (1 << 16)).unwrap();
        file.write_at(header.l1_offset, &(l2 | crate::entry::COPIED).to_be_bytes()).unwrap();
        file.write_at(l2 + 8 * 100, &crate::entry::ZERO.to_be_bytes()).unwrap();
        let why = amend(&mut Image::open(&file).unwrap(), &version(2)).unwrap_err().to_string();
        assert!(why.contains("zeroes"), "{why}");
    }

    #[test]
    fn data_files() {
        let raw =
            Options { data_file: Some(DataFile { name: "d".into(), raw: true }), ..Options::new(1 << 20) };
        let file = made(&raw);
        let backing = Amendment { backing: Some(Some(("b".into(), "raw".into()))), ..Amendment::default() };
        assert!(amended(&file, &backing).unwrap_err().to_string().contains("data_file_raw"));
        let off = Amendment { data_file_raw: Some(false), ..backing };
        let mut image = Image::open(&file).unwrap();
        amend(&mut image, &off).unwrap();
        assert_eq!((image.header().autoclear, image.header().backing.as_deref()), (0, Some("b")));
        let name = Amendment { data_file: Some("other".into()), ..Amendment::default() };
        amend(&mut image, &name).unwrap();
        assert_eq!(image.header().data_file.as_deref(), Some("other"));
        let on = Amendment { data_file_raw: Some(true), ..Amendment::default() };
        assert!(amend(&mut image, &on).unwrap_err().to_string().contains("copy"));
        let plain = made(&Options::new(1 << 20));
        assert!(amended(&plain, &name).unwrap_err().to_string().contains("no data file"));
    }
}
