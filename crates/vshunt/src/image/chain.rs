//! An image with its backing images, for commands that show where its contents are.
//!
//! The contents themselves are read through a [`Disk`](vshunt_block::Disk).

use std::path::{Path, PathBuf};

use qcow2::Storage;
use qcow2::header::incompatible;
use qcow2::status::{Contents, Reader, Status};
use vshunt_block::CHAIN_MAX;

use super::file::{For, ImageFile, id};
use super::info::{beside, check_below, explained, open_data};
use super::{ImageFormat, failed};
use crate::outcome::{Failure, Outcome};

/// Bytes of a sector. A raw disk has whole sectors; the last one may be incomplete in its file.
const SECTOR: u64 = 512;

/// One image of a chain, open.
pub(super) struct Layer {
    pub(super) path: PathBuf,
    file: ImageFile,
    pub(super) format: ImageFormat,
    /// The external data file, with its path.
    data: Option<(PathBuf, ImageFile)>,
}

/// Opens an image and the images below it. Warns the user about each that was not closed.
///
/// # Errors
/// One of them cannot be opened, is in use, or has a backing image of an unknown format.
pub(super) fn open(path: &Path, format: Option<ImageFormat>, share: bool) -> Outcome<Vec<Layer>> {
    let purpose = if share { For::Sharing } else { For::Reading };
    let (mut layers, mut next) = (Vec::new(), Some((path.to_owned(), format)));
    while let Some((path, format)) = next.take() {
        check_below(&path, layers.iter().map(|layer: &Layer| layer.path.as_path()))?;
        let above = layers.last().map(|layer| layer.path.as_path());
        let file = ImageFile::open(&path, purpose).map_err(|e| explained(e, above, &path, format))?;
        let format = match format {
            Some(format) => format,
            None => file.probe(&path)?,
        };
        let mut layer = Layer { path, file, format, data: None };
        if format == ImageFormat::Qcow2 {
            next = below(&mut layer, purpose)?;
        }
        layers.push(layer);
    }
    Ok(layers)
}

/// Refuses to write to `image`, or to another file of it, if it is a part of the images from `path`
/// down. They would lose their contents, and be below themselves.
pub(super) fn check_above(image: &Path, written: &[&Path], path: &Path, format: ImageFormat) -> Outcome {
    let written: Vec<_> = written.iter().filter_map(|file| id(file)).collect();
    let is_written = |path: &Path| id(path).is_some_and(|id| written.contains(&id));
    let (shown, below) = (image.display(), path.display());
    // Also if it is not an image.
    if is_written(path) {
        return Err(Failure::Usage(format!("{shown} cannot be below itself; give another name")));
    }
    let layers = open(path, Some(format), true)?;
    for layer in &layers {
        if is_written(&layer.path) || layer.data.as_ref().is_some_and(|(data, _)| is_written(data)) {
            return Err(Failure::Usage(format!("{below} stands on {shown}, which cannot be above it")));
        }
    }
    if layers.len() > CHAIN_MAX {
        return Err(Failure::Failed(format!(
            "{below} has {CHAIN_MAX} backing images, and an image above it would have more than are read; put it above a copy \
             of all: vshunt image convert -O qcow2 {below} COPY"
        )));
    }
    Ok(())
}

/// Opens the data file of an image, and returns path and format of its backing image.
fn below(layer: &mut Layer, purpose: For) -> Outcome<Option<(PathBuf, Option<ImageFormat>)>> {
    let shown = layer.path.display();
    layer.file.lacking(&layer.path)?;
    let image = qcow2::Image::open(&layer.file).map_err(|e| failed(&layer.path, &e))?;
    let header = image.header();
    let plain = |name: &str| beside(&layer.path, name.strip_prefix("file:").unwrap_or(name));
    let (backing, data) = (header.backing.as_deref().map(plain), header.data_file.as_deref().map(plain));
    let format = match header.backing_format.as_deref() {
        Some("raw") => ImageFormat::Raw,
        Some("qcow2") => ImageFormat::Qcow2,
        Some(other) if backing.is_some() => {
            return Err(Failure::Failed(format!(
                "{shown} has a backing image of format {other}; only raw and qcow2 are supported"
            )));
        }
        None if backing.is_some() => return Err(no_format(&layer.path, header.backing.as_deref())),
        _ => ImageFormat::Raw,
    };
    if let Some(data) = data.filter(|_| header.has(incompatible::DATA_FILE)) {
        let file = open_data(&layer.path, &data, purpose)?;
        layer.data = Some((data, file));
    }
    Ok(backing.map(|path| (path, Some(format))))
}

/// Returns the failure for an image that names a backing image without its format.
pub(super) fn no_format(path: &Path, name: Option<&str>) -> Failure {
    let (shown, name) = (path.display(), name.unwrap_or_default());
    Failure::Failed(format!(
        "{shown} does not name the format of its backing image {name}; set it with 'vshunt image rebase -u -b {name} \
         -F FORMAT {shown}'"
    ))
}

/// A part of a disk, with the fields of QEMU's MapEntry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) start: u64,
    pub(super) len: u64,
    /// The number of the image in the chain; the top has 0.
    pub(super) depth: usize,
    /// Whether that image has it, as data or as zeroes.
    pub(super) present: bool,
    /// Whether it reads as zeroes.
    pub(super) zero: bool,
    /// Whether there is data.
    pub(super) data: bool,
    pub(super) compressed: bool,
    /// Its offset in the file of that image.
    pub(super) offset: Option<u64>,
}

impl Part {
    /// Returns whether `next` continues this part.
    pub(super) fn joins(&self, next: &Self) -> bool {
        let continues = match (self.offset, next.offset) {
            (None, None) => true,
            (Some(at), Some(next)) => at.checked_add(self.len) == Some(next),
            _ => false,
        };
        let kind = |p: &Self| (p.depth, p.present, p.zero, p.data, p.compressed);
        continues && kind(self) == kind(next)
    }
}

/// The tables of one image of a chain.
enum Tables<'l> {
    Raw { size: u64 },
    Qcow2 { reader: Box<Reader<'l>>, preallocated: bool, last: Option<(u64, Status)> },
}

/// Returns the part at `offset`. `last` is the one that was read last, with its start: a long part
/// is read once, also if the images below have many short ones there.
fn read(
    reader: &mut Reader<'_>,
    last: &mut Option<(u64, Status)>,
    offset: u64,
    most: u64,
) -> qcow2::Result<Status> {
    let here = last.filter(|(start, part)| (*start..start + part.len).contains(&offset));
    let (start, part) = match here {
        Some(here) => here,
        None => *last.insert((offset, reader.at(offset, most)?)),
    };
    let before = offset - start;
    Ok(Status { len: (part.len - before).min(most), offset: part.offset.map(|at| at + before), ..part })
}

/// A chain, with its tables.
pub(super) struct Chain<'l> {
    layers: &'l [Layer],
    tables: Vec<Tables<'l>>,
}

impl<'l> Chain<'l> {
    /// Reads the tables of open images. `snapshot`: id or name of an internal snapshot of the top
    /// image, whose contents are examined in place of the disk's.
    pub(super) fn new(layers: &'l [Layer], snapshot: Option<&str>) -> Outcome<Self> {
        let mut tables = Vec::new();
        for (depth, layer) in layers.iter().enumerate() {
            let snapshot = snapshot.filter(|_| depth == 0);
            tables.push(layer.tables(snapshot)?);
        }
        Ok(Self { layers, tables })
    }

    /// Returns the size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size_of(0)
    }

    fn size_of(&self, depth: usize) -> u64 {
        match &self.tables[depth] {
            Tables::Raw { size } => *size,
            Tables::Qcow2 { reader, .. } => reader.size(),
        }
    }

    /// Returns whether an image of the chain is below the one with this number.
    pub(super) fn has_below(&self, depth: usize) -> bool {
        depth + 1 < self.layers.len()
    }

    /// Returns the file that the offset of a part is in.
    pub(super) fn file(&self, part: &Part) -> &Path {
        let layer = &self.layers[part.depth];
        layer.data.as_ref().map_or(&layer.path, |(path, _)| path)
    }

    /// Returns the part that starts at `offset`, which is within the disk, up to `end` at most. The
    /// next part may continue it.
    pub(super) fn at(&mut self, offset: u64, end: u64) -> Outcome<Part> {
        let mut len = end - offset;
        for depth in 0..self.layers.len() {
            len = len.min(self.size_of(depth) - offset);
            let mut part = self.alone(depth, offset, len)?;
            let below = (depth + 1 < self.layers.len()).then(|| self.size_of(depth + 1));
            if part.present || below.is_none_or(|size| size <= offset) {
                // What no image has reads as zeroes.
                part.zero |= !part.present;
                return Ok(part);
            }
            len = part.len;
        }
        unreachable!("the loop ends at the last image")
    }

    /// Returns what one image has.
    fn alone(&mut self, depth: usize, offset: u64, len: u64) -> Outcome<Part> {
        let layer = &self.layers[depth];
        let cannot = |e| Failure::Failed(format!("cannot read {}: {e}", layer.path.display()));
        let part = Part {
            start: offset,
            len,
            depth,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset: Some(offset),
        };
        match &mut self.tables[depth] {
            Tables::Raw { .. } => {
                let (zero, len) = layer.file.run(offset, len).map_err(cannot)?;
                Ok(Part { len, zero, data: !zero, ..part })
            }
            Tables::Qcow2 { reader, preallocated, last } => {
                let found = read(reader, last, offset, len).map_err(|e| failed(&layer.path, &e))?;
                let mut part = Part {
                    len: found.len,
                    present: found.contents != Contents::Absent,
                    zero: found.contents == Contents::Zero,
                    data: found.contents == Contents::Data,
                    compressed: found.compressed,
                    offset: found.offset,
                    ..part
                };
                if let Some(at) = part.offset.filter(|_| *preallocated && part.data) {
                    let file = layer.data.as_ref().map_or(&layer.file, |(_, file)| file);
                    (part.zero, part.len) = file.run(at, part.len).map_err(cannot)?;
                }
                Ok(part)
            }
        }
    }
}

impl Layer {
    /// Reads the first tables of the image.
    fn tables(&self, snapshot: Option<&str>) -> Outcome<Tables<'_>> {
        let cannot = |e| Failure::Failed(format!("cannot read {}: {e}", self.path.display()));
        if self.format == ImageFormat::Raw {
            let size = self.file.len().map_err(cannot)?;
            let size = size.checked_next_multiple_of(SECTOR).unwrap_or(size);
            return Ok(Tables::Raw { size });
        }
        let reader = match snapshot {
            Some(which) => Reader::of_snapshot(&self.file, which),
            None => Reader::new(&self.file),
        };
        let reader = reader.map_err(|e| failed(&self.path, &e))?;
        let space = self.file.space().map_err(cannot)?;
        let preallocated = reader.is_preallocated(space).map_err(|e| failed(&self.path, &e))?;
        Ok(Tables::Qcow2 { reader: Box::new(reader), preallocated, last: None })
    }

    /// Returns the image's file.
    pub(super) fn storage(&self) -> &ImageFile {
        &self.file
    }
}
