//! The FUSE protocol: the layouts and constants of linux/fuse.h that a mount of one file needs.
//!
//! Numbers have the machine's byte order. A test compares the layouts with the C header.

/// Protocol version of the answer to INIT. The kernel uses the smaller one of the two.
pub const MAJOR: u32 = 7;
/// The minor version of the layouts here (Linux 6.14).
pub const MINOR: u32 = 42;
/// The oldest minor version that is served: Linux 4.20, which has `max_pages`.
pub const MINOR_MIN: u32 = 28;

/// The mount's root, its only inode.
pub const ROOT_ID: u64 = 1;

/// Operations of requests (`enum fuse_opcode`).
pub mod op {
    #![allow(missing_docs)]
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
    pub const STATX: u32 = 52;
}

/// Bits of INIT's 64 flags.
pub mod init {
    #![allow(missing_docs)]
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Flags of the reply to OPEN.
pub mod open {
    #![allow(missing_docs)]
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Bits of `valid` in SETATTR.
pub mod fattr {
    #![allow(missing_docs)]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    /// The request is about an open file: it is not by name, and not the truncation of
    /// open(O_TRUNC).
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// Commands of an io_uring entry.
pub mod ring {
    #![allow(missing_docs)]
    pub const REGISTER: u32 = 1;
    pub const COMMIT_AND_FETCH: u32 = 2;
}

/// A layout of the protocol: any bytes of its length are a value of it.
///
/// # Safety
/// The type is `#[repr(C)]` without padding, and consists of integers and arrays of integers only.
pub unsafe trait Plain: Copy + Default {
    /// Reads a value from the start of `bytes`; `None` if there are not enough.
    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<Self>() {
            return None;
        }
        // SAFETY: there are enough bytes, and by the contract of the trait any bytes are a value.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// The bytes of the value.
    fn bytes(&self) -> &[u8] {
        // SAFETY: by the contract of the trait there is no padding, so all bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Declares layouts, with the names and sizes that they have in the C header.
macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident($c:ident) = $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type),* }
        // SAFETY: the type is repr(C) and consists of integers. The assertion below shows that the
        // fields add up to the whole, so there is no padding.
        unsafe impl Plain for $name {}
        impl $name {
            /// The bytes of the value.
            #[inline]
            pub fn to_bytes(self) -> [u8; $bytes] {
                self.bytes().first_chunk().copied().unwrap_or([0; $bytes])
            }
        }
        const _: () = assert!(size_of::<$name>() == $bytes && $bytes == 0 $(+ size_of::<$type>())*);
    )*

    /// C name, size, and the fields' names and offsets.
    #[cfg(test)]
    const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[$(
        (stringify!($c), $bytes, &[$((stringify!($field), std::mem::offset_of!($name, $field))),*])
    ),*];
    };
}

layouts! {
    /// `fuse_in_header`, before each request.
    InHeader(fuse_in_header) = 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
    }
    /// `fuse_out_header`, before each reply.
    OutHeader(fuse_out_header) = 16 { len: u32, error: i32, unique: u64 }
    /// `fuse_init_in`.
    InitIn(fuse_init_in) = 64 { major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11] }
    /// `fuse_init_out`.
    InitOut(fuse_init_out) = 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
        max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32,
        unused: [u32; 6],
    }
    /// `fuse_attr`.
    Attr(fuse_attr) = 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32,
        ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// `fuse_attr_out`.
    AttrOut(fuse_attr_out) = 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    /// `fuse_setattr_in`.
    SetattrIn(fuse_setattr_in) = 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    /// `fuse_open_in`.
    OpenIn(fuse_open_in) = 8 { flags: u32, open_flags: u32 }
    /// `fuse_open_out`.
    OpenOut(fuse_open_out) = 16 { fh: u64, open_flags: u32, backing_id: i32 }
    /// `fuse_read_in`, and `fuse_write_in`, which has the same fields in the same places.
    TransferIn(fuse_write_in) = 40 {
        fh: u64, offset: u64, size: u32, transfer_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// `fuse_write_out`.
    WriteOut(fuse_write_out) = 8 { size: u32, padding: u32 }
    /// `fuse_fallocate_in`.
    FallocateIn(fuse_fallocate_in) = 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    /// `fuse_lseek_in`.
    LseekIn(fuse_lseek_in) = 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    /// `fuse_lseek_out`.
    LseekOut(fuse_lseek_out) = 8 { offset: u64 }
    /// `fuse_interrupt_in`.
    InterruptIn(fuse_interrupt_in) = 8 { unique: u64 }
    /// `fuse_ioctl_in`.
    IoctlIn(fuse_ioctl_in) = 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    /// `fuse_ioctl_out`.
    IoctlOut(fuse_ioctl_out) = 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    /// `fuse_kstatfs`.
    StatfsOut(fuse_kstatfs) = 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
        padding: u32, spare: [u32; 6],
    }
    /// `fuse_sx_time`.
    StatxTime(fuse_sx_time) = 16 { tv_sec: i64, tv_nsec: u32, reserved: i32 }
    /// `fuse_statx_in`.
    StatxIn(fuse_statx_in) = 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    /// `fuse_statx`.
    Statx(fuse_statx) = 256 {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64,
        size: u64, blocks: u64, attributes_mask: u64, atime: StatxTime, btime: StatxTime, ctime: StatxTime,
        mtime: StatxTime, rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// `fuse_statx_out`.
    StatxOut(fuse_statx_out) = 288 { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    /// `fuse_uring_ent_in_out`.
    RingInOut(fuse_uring_ent_in_out) = 32 { flags: u64, commit_id: u64, payload_sz: u32, padding: u32, reserved: u64 }
    /// `fuse_uring_cmd_req`, in the command bytes of the submission entry.
    RingCommand(fuse_uring_cmd_req) = 24 { flags: u64, commit_id: u64, qid: u16, padding: [u16; 3] }
    /// `fuse_backing_map`.
    BackingMap(fuse_backing_map) = 16 { fd: i32, flags: u32, padding: u64 }
}

/// `fuse_uring_req_header`: the part of an entry beside its payload. In a request `in_out` begins
/// with an [`InHeader`], in a reply with an [`OutHeader`].
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RingHeader {
    /// The header of the request, then of the reply.
    pub in_out: [u8; 128],
    /// The fixed part of the request's arguments.
    pub op_in: [u8; 128],
    /// The length of the payload, and the id that a commit names.
    pub ent: RingInOut,
}
const _: () = assert!(size_of::<RingHeader>() == 288);

/// Bytes of the largest arguments of a request that is served.
pub const ARGS_MAX: usize = size_of::<SetattrIn>();

/// `_IOR(229, 0, uint32_t)`.
pub const DEV_IOC_CLONE: u64 = 0x8004_e500;
/// `_IOW(229, 1, struct fuse_backing_map)`.
pub const DEV_IOC_BACKING_OPEN: u64 = 0x4010_e501;
/// `_IOW(229, 2, uint32_t)`.
pub const DEV_IOC_BACKING_CLOSE: u64 = 0x4004_e502;
/// `_IOR(0x12, 114, size_t)`: the size of a block device. Block tools also ask a file for it.
pub const BLKGETSIZE64: u32 = 0x8008_1272;

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// The name of a field in the header; none for fields whose names differ between versions.
    fn c_field(layout: &str, field: &str) -> Option<&'static str> {
        match (layout, field) {
            ("fuse_write_in", "transfer_flags") => Some("write_flags"),
            // Unused space: its name and its parts change from version to version.
            (_, f) if f.starts_with("unused") || f.starts_with("spare") || f.contains("padding") => None,
            (_, "dummy" | "reserved" | "total_extlen") => None,
            _ => Some(LAYOUTS.iter().flat_map(|l| l.2).find(|f| f.0 == field)?.0),
        }
    }

    #[test]
    fn layouts_are_those_of_the_c_header() {
        let mut code = "#include <stddef.h>\n#include <linux/fuse.h>\n".to_owned();
        for (layout, bytes, fields) in LAYOUTS {
            let _ =
                writeln!(code, "_Static_assert(sizeof(struct {layout}) == {bytes}, \"size of {layout}\");");
            for (field, offset) in *fields {
                if let Some(c) = c_field(layout, field) {
                    let what = format!("offsetof(struct {layout}, {c})");
                    let _ = writeln!(code, "_Static_assert({what} == {offset}, \"{layout}.{c}\");");
                }
            }
        }
        let flags = ["-xc", "-std=gnu11", "-fsyntax-only", "-fmax-errors=0", "-w", "-"];
        let child = Command::new("cc").args(flags).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let Ok(mut child) = child else {
            eprintln!("skipped: the C header, because there is no C compiler `cc`");
            return;
        };
        child.stdin.take().unwrap().write_all(code.as_bytes()).unwrap();
        let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
        let wrong: Vec<&str> = said.lines().filter(|l| l.contains("static assertion failed")).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(!said.contains("No such file"), "{said}");
        // An older header lacks newer fields. These are left out, and a line says so.
        for line in said.lines().filter(|l| l.contains("error:")) {
            eprintln!("skipped: {line}");
        }
    }

    #[test]
    fn numbers_are_those_of_the_c_macros() {
        let ior = |dir: u64, kind: u64, number: u64, size: usize| {
            dir << 30 | (size as u64) << 16 | kind << 8 | number
        };
        assert_eq!(DEV_IOC_CLONE, ior(2, 229, 0, 4));
        assert_eq!(DEV_IOC_BACKING_OPEN, ior(1, 229, 1, size_of::<BackingMap>()));
        assert_eq!(DEV_IOC_BACKING_CLOSE, ior(1, 229, 2, 4));
        assert_eq!(u64::from(BLKGETSIZE64), ior(2, 0x12, 114, 8));
    }

    #[test]
    fn short_messages_are_none() {
        assert!(InHeader::read(&[0; 39]).is_none());
        assert_eq!(InHeader::read(&[1; 40]).unwrap().opcode, 0x0101_0101);
    }
}
