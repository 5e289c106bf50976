//! Formats of images that vshunt does not read. An image that begins like one of them is not taken
//! for a raw disk unless the user says so. Also names that do not fit to the format.

use std::path::Path;

/// Bytes of the start of an image that tell its format.
pub(crate) const START_BYTES: usize = 128;

/// The formats by their first bytes: offset, bytes, name. A raw image that begins
/// like this is more likely an image of that format.
const FORMATS: [(usize, &[u8], &str); 9] = [
    (0, b"KDMV", "a VMDK image"),
    (0, b"COWD", "a VMDK image"),
    (0, b"# Disk DescriptorFile", "a VMDK image"),
    (64, b"\x7f\x10\xda\xbe", "a VDI image"),
    (0, b"conectix", "a VHD image"),
    (0, b"vhdxfile", "a VHDX image"),
    (0, b"QED\0", "a QED image"),
    (0, b"WithoutFreeSpace", "a Parallels image"),
    (0, b"WithouFreSpacExt", "a Parallels image"),
];

/// Returns the name of the format that an image begins as, if it is one of these. `start`: its
/// first [`START_BYTES`], or all of a shorter one.
pub(crate) fn format(start: &[u8]) -> Option<&'static str> {
    let begins = |at: usize, bytes: &[u8]| start.get(at..).is_some_and(|s| s.starts_with(bytes));
    FORMATS.iter().find(|(at, bytes, _)| begins(*at, bytes)).map(|(_, _, name)| *name)
}

/// Returns the message for an image whose name has the ending of another format.
pub(crate) fn misnamed(path: &Path, is_qcow2: bool) -> Option<String> {
    let ends = |with: &str| path.extension().is_some_and(|end| end.eq_ignore_ascii_case(with));
    let shown = path.display();
    match is_qcow2 {
        true if ends("raw") => {
            Some(format!("{shown} begins as a qcow2 image and is used as one, in spite of its name"))
        }
        false if ends("qcow2") => {
            Some(format!("{shown} does not begin as a qcow2 image and is used as raw, in spite of its name"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_known_by_its_first_bytes() {
        let mut vdi = [0; START_BYTES];
        vdi[64..68].copy_from_slice(b"\x7f\x10\xda\xbe");
        assert_eq!(format(&vdi), Some("a VDI image"));
        assert_eq!(format(b"KDMV\x01"), Some("a VMDK image"));
        assert_eq!(format(b"QFI\xfb"), None);
        assert_eq!(format(&[]), None);
    }

    #[test]
    fn a_name_that_disagrees_with_the_format_is_told() {
        let told = |name: &str, is_qcow2| misnamed(Path::new(name), is_qcow2).is_some();
        assert!(told("a.raw", true) && told("a.QCOW2", false));
        assert!(!told("a.raw", false) && !told("a.qcow2", true) && !told("a.img", true) && !told("a", false));
    }
}
