//! New images for jobs: made, and stable, before anything is written to them.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use qcow2::create::{Options, create};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::Format;

use super::Seen;
use super::qcow2::Plain;

/// A file that is made.
pub struct NewImage<'a> {
    /// Where.
    pub path: &'a Path,
    /// `Raw` or `Qcow2`.
    pub format: Format,
    /// Bytes of the disk.
    pub size: u64,
    /// Name, as it is to be written, and format of the image below.
    pub backing: Option<(String, Format)>,
    /// A file that is there is emptied.
    pub overwrite: bool,
}

impl NewImage<'_> {
    /// Makes it; what was begun and failed is removed again, if it was not there before.
    ///
    /// # Errors
    /// `Exists` if it is there and may not be replaced, `Busy` if another uses it, `Io` else.
    pub fn make(&self) -> Result<()> {
        let shown = self.path.display();
        let there = match Seen::find(self.path) {
            Ok(seen) => Some(seen),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(format_args!("cannot make {shown}"), e)),
        };
        if there.is_some() && !self.overwrite {
            return Err(Error::exists(format!(
                "{shown} is there already; choose another name, or remove it first"
            )));
        }
        let open = match &there {
            Some(seen) => {
                seen.check(self.path)?;
                seen.open(true, 0)
            }
            None => OpenOptions::new().read(true).write(true).create_new(true).open(self.path),
        };
        let file = open.map_err(|e| Error::io(format_args!("cannot make {shown}"), e))?;
        let made = self.fill(file);
        if made.is_err() && there.is_none() {
            let _ = std::fs::remove_file(self.path);
        }
        made
    }

    fn fill(&self, file: File) -> Result<()> {
        let shown = self.path.display();
        super::lock_image(&file, self.path, false)?;
        let wrong = |e: io::Error| Error::io(format_args!("cannot make {shown}"), e);
        file.set_len(0).map_err(wrong)?;
        match self.format {
            Format::Qcow2 => {
                let backing = self.backing.as_ref().map(|(name, format)| {
                    let format = if *format == Format::Qcow2 { "qcow2" } else { "raw" };
                    (name.clone(), format.to_owned())
                });
                let options = Options { backing, ..Options::new(self.size) };
                let plain = Plain::new(file);
                create(&plain, None, &options, &mut |_, _| ())
                    .map_err(|e| Error::invalid(format!("cannot make {shown}: {e}")))?;
                plain.file().sync_all().map_err(wrong)?;
            }
            _ => {
                file.set_len(self.size).map_err(wrong)?;
                file.sync_all().map_err(wrong)?;
            }
        }
        sync_folder(self.path).map_err(|e| Error::io(format_args!("cannot sync the folder of {shown}"), e))
    }
}

/// Makes a name stable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
