//! Whether the kernel can serve a disk, and the block device that it uses for that.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use rustix::fs::{Advice, fadvise};
use vhost_kernel::Vhost;
use virtio::vhost::{VHOST_BLK_BACKEND_READONLY, VHOST_BLK_VRINGS_MAX};
use vshunt_block::{Disk, SECTOR_BYTES};
use vshunt_engine::Workers;
use vshunt_types::error::{Error, Result};
use vshunt_types::spec::{Cache, ExportSpec};

use super::inflight;
use super::loop_device::LoopDevice;
use super::workers::DiskWorkers;

const DEVICE: &str = "/dev/vhost-blk";

/// The opened files that the kernel needs to serve a disk.
pub struct DiskPlan {
    pub(super) device: Arc<Vhost>,
    pub(super) block_device: BlockDevice,
    pub(super) readonly: bool,
}

/// A disk that the kernel serves.
pub(super) struct ServedDisk {
    pub(super) device: Arc<Vhost>,
    pub(super) block_device: BlockDevice,
    pub(super) workers: Arc<DiskWorkers>,
    /// Whether the module can record the requests in flight of rings.
    pub(super) tracks: bool,
}

impl ServedDisk {
    /// Sets up the device for an export, with its first worker.
    pub(super) fn new(
        export: &str,
        plan: DiskPlan,
        queues: u16,
        serial: &str,
        workers: &Arc<Workers>,
    ) -> Result<Self> {
        let DiskPlan { device, block_device, readonly } = plan;
        let disk_workers = DiskWorkers::start(export, &device, queues, workers)?;
        let flags = if readonly { VHOST_BLK_BACKEND_READONLY } else { 0 };
        if let Err(e) = device.blk_set_backend(block_device.as_fd(), flags, serial) {
            workers.forget(export);
            return Err(Error::unsupported(format!("export {export}: {e}")));
        }
        let tracks = inflight::is_offered(&device);
        Ok(Self { device, block_device, workers: disk_workers, tracks })
    }
}

impl Drop for ServedDisk {
    fn drop(&mut self) {
        // The last holder closes the device. This may be a control thread that reads the state of a
        // worker.
        if let Err(e) = self.device.blk_clear_backend() {
            tracing::warn!("{e}");
        }
    }
}

/// The block device that contains the data.
pub(super) enum BlockDevice {
    /// The disk is a block device.
    Itself(File),
    /// The image is a file.
    Loop(LoopDevice),
}

impl BlockDevice {
    fn new(disk: &Disk, image: &File, readonly: bool) -> std::result::Result<Self, String> {
        let meta = image.metadata().map_err(|e| e.to_string())?;
        if meta.file_type().is_block_device() {
            let file = image.try_clone().map_err(|e| e.to_string())?;
            let device = Self::Itself(file);
            device.drop_page_cache();
            return Ok(device);
        }
        LoopDevice::new(image, readonly, disk.direct_in_use(), disk.limits().block_size).map(Self::Loop)
    }

    /// Reads the size of the image again.
    pub(super) fn reload_size(&self) -> Result<()> {
        match self {
            Self::Itself(_) => Ok(()),
            Self::Loop(device) => device
                .reload_size()
                .map_err(|e| Error::io(format!("{} cannot be given its size", device.path().display()), e)),
        }
    }

    /// Writes the page cache back and drops it. Requests bypass the cache. The guest has to see
    /// data that programs of the host wrote through it, and old pages must not hide data that the
    /// guest wrote.
    fn drop_page_cache(&self) {
        if let Self::Itself(file) = self {
            if let Err(e) = file.sync_all() {
                tracing::warn!("what was written to the block device before is not stable: {e}");
            }
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
    }
}

impl Drop for BlockDevice {
    fn drop(&mut self) {
        self.drop_page_cache();
    }
}

impl AsFd for BlockDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Itself(file) => file.as_fd(),
            Self::Loop(device) => device.as_fd(),
        }
    }
}

/// Opens the files that the kernel needs to serve `disk` as `spec` demands.
///
/// # Errors
/// The reason why the kernel cannot serve it, in words.
pub fn plan(spec: &ExportSpec, disk: &Disk, queues: u16) -> std::result::Result<DiskPlan, String> {
    let readonly = spec.readonly || disk.readonly();
    let Some(image) = disk.image() else {
        return Err(format!("disk {} is neither a block device nor a raw file", spec.disk));
    };
    if !readonly && !disk.write_observers().is_idle() {
        return Err(format!(
            "disk {} has a job or dirty bitmaps, and writes by the kernel cannot be observed",
            spec.disk
        ));
    }
    if disk.cache() == Cache::Unsafe {
        return Err(format!("disk {} has cache=unsafe, and the kernel leaves out no flush", spec.disk));
    }
    let meta = image.metadata().ok();
    let is_file = meta.as_ref().is_some_and(|m| m.is_file());
    if is_file && meta.is_some_and(|m| !m.len().is_multiple_of(SECTOR_BYTES)) {
        return Err(format!(
            "the image of disk {} ends within a sector, which a loop device leaves out; make it longer: truncate -s %512 FILE",
            spec.disk
        ));
    }
    if !is_file && !disk.direct_in_use() {
        return Err(format!("disk {} has direct=off, and the kernel passes the page cache by", spec.disk));
    }
    if u32::from(queues) > VHOST_BLK_VRINGS_MAX {
        return Err(format!("{queues} queues; {DEVICE} has {VHOST_BLK_VRINGS_MAX}"));
    }
    if spec.poll_us.is_some() {
        return Err("its workers do not poll; leave out poll-us".to_owned());
    }
    let device = Arc::new(Vhost::open(DEVICE).map_err(|e| e.to_string())?);
    let block_device = BlockDevice::new(disk, &image, readonly)?;
    Ok(DiskPlan { device, block_device, readonly })
}
