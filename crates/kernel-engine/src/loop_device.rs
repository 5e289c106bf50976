//! An image file as a block device: a loop device that the kernel removes when its last user has
//! closed it, also after a kill of this process.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use vshunt_sandbox as sandbox;

// linux/loop.h
const LOOP_SET_CAPACITY: libc::Ioctl = 0x4C07;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
const LO_NAME_SIZE: usize = 64;

/// How often another program may take the free device first.
const TRIES: u32 = 64;

/// struct loop_info64
#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; LO_NAME_SIZE],
    crypt_name: [u8; LO_NAME_SIZE],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// struct loop_config
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo64>() == 232 && size_of::<LoopConfig>() == 304);

/// A loop device; see the module.
pub(super) struct LoopDevice {
    file: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Makes a device for `image`, with logical blocks of `block_size` bytes.
    ///
    /// # Errors
    /// What went wrong with which file of the system.
    pub(super) fn new(image: &File, readonly: bool, direct: bool, block_size: u32) -> Result<Self, String> {
        let at = "/dev/loop-control";
        let control = open(Path::new(at), true).map_err(|e| format!("cannot open {at}: {e}"))?;
        // The name that tools show for the device.
        let name = std::fs::read_link(format!("/proc/self/fd/{}", image.as_raw_fd())).unwrap_or_default();
        let mut flags = LO_FLAGS_AUTOCLEAR;
        flags |= if readonly { LO_FLAGS_READ_ONLY } else { 0 };
        flags |= if direct { LO_FLAGS_DIRECT_IO } else { 0 };
        for _ in 0..TRIES {
            let (file, path) = free(&control, readonly)?;
            match configure(&file, image, &name, flags, block_size) {
                Ok(()) => return Ok(Self { file, path }),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(format!("cannot set up {}: {e}", path.display())),
            }
        }
        Err("other programs took each loop device that was free; try again".to_owned())
    }

    /// Makes the kernel read the image's size again.
    pub(super) fn reload_size(&self) -> io::Result<()> {
        // SAFETY: the call has no argument.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), LOOP_SET_CAPACITY) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the path of the device.
    pub(super) fn path(&self) -> &PathBuf {
        &self.path
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns a device that is not in use. Another program may take it before it is configured.
fn free(control: &File, readonly: bool) -> Result<(File, PathBuf), String> {
    // SAFETY: the call has no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    if number < 0 {
        return Err(format!("no loop device can be had: {}", io::Error::last_os_error()));
    }
    let path = PathBuf::from(format!("/dev/loop{number}"));
    let file = open(&path, !readonly);
    file.map(|file| (file, path.clone())).map_err(|e| format!("cannot open {}: {e}", path.display()))
}

/// Opens a device by an errand. The sandbox has no rule for it, because the device may not have
/// existed before.
fn open(path: &Path, write: bool) -> io::Result<File> {
    sandbox::errand(|| OpenOptions::new().read(true).write(write).open(path))?
}

fn configure(device: &File, image: &File, name: &Path, flags: u32, block_size: u32) -> io::Result<()> {
    // SAFETY: plain numbers and bytes, for which zero is a value.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = image.as_raw_fd() as u32;
    config.block_size = block_size;
    config.info.flags = flags;
    for (to, from) in config.info.file_name[..LO_NAME_SIZE - 1].iter_mut().zip(name.as_os_str().as_bytes()) {
        *to = *from;
    }
    // SAFETY: the kernel reads the struct and keeps nothing of it except a reference to the file.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &config) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
