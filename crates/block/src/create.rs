//! New images for jobs. A new image is on stable storage before a job writes to it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use qcow2::create::{Options, create};
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::Format;

use super::file_storage::FileStorage;
use super::lock;
use super::path_fd::PathFd;

/// The description of a new image.
pub struct NewImage<'a> {
    /// Path of the file.
    pub path: &'a Path,
    /// `Raw` or `Qcow2`.
    pub format: Format,
    /// Size of the disk, bytes.
    pub size: u64,
    /// Name of the backing image, as it is written to the header, and its format.
    pub backing: Option<(String, Format)>,
    /// Whether an existing file is emptied.
    pub overwrite: bool,
}

impl NewImage<'_> {
    /// Creates the image. If that fails, a new file is removed.
    ///
    /// # Errors
    /// `Exists` if the file exists and `overwrite` is off, `Busy` if another process uses
    /// it, else `Io`.
    pub fn make(&self) -> Result<()> {
        let shown = self.path.display();
        let there = match PathFd::open(self.path) {
            Ok(path_fd) => Some(path_fd),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(format_args!("cannot make {shown}"), e)),
        };
        if there.is_some() && !self.overwrite {
            return Err(Error::exists(format!(
                "{shown} is there already; choose another name, or remove it first"
            )));
        }
        let open = match &there {
            Some(path_fd) => {
                path_fd.check(self.path)?;
                path_fd.reopen(true, 0)
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

    /// Writes the contents of the image.
    fn fill(&self, file: File) -> Result<()> {
        let shown = self.path.display();
        lock::lock(&file, self.path, false)?;
        let wrong = |e: io::Error| Error::io(format_args!("cannot make {shown}"), e);
        let is_file = file.metadata().map_err(wrong)?.is_file();
        if is_file {
            file.set_len(0).map_err(wrong)?;
        }
        match self.format {
            Format::Qcow2 => {
                let backing = self.backing.as_ref().map(|(name, format)| {
                    let format = if *format == Format::Qcow2 { "qcow2" } else { "raw" };
                    (name.clone(), format.to_owned())
                });
                let options = Options { backing, ..Options::new(self.size) };
                let plain = FileStorage::new(file);
                create(&plain, None, &options, &mut |_, _| ())
                    .map_err(|e| Error::invalid(format!("cannot make {shown}: {e}")))?;
                plain.file().sync_all().map_err(wrong)?;
            }
            _ if is_file => {
                file.set_len(self.size).map_err(wrong)?;
                file.sync_all().map_err(wrong)?;
            }
            _ => {
                let bytes = (&file).seek(SeekFrom::End(0)).map_err(wrong)?;
                if bytes != self.size {
                    return Err(Error::invalid(format!(
                        "{shown} has {bytes} bytes, and the disk has {}: a device has to be as large",
                        self.size
                    )));
                }
            }
        }
        if !is_file {
            return Ok(());
        }
        sync_folder(self.path).map_err(|e| Error::io(format_args!("cannot sync the folder of {shown}"), e))
    }
}

/// Brings the entry of a path in its folder to stable storage.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
