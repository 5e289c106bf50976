//! The FUSE protocol as the kernel speaks it: layouts and constants of linux/fuse.h, those that a mount of one file
//! needs. Numbers are in the machine's own order. A test holds the layouts against the C header.

/// Protocol version that we answer with; the kernel goes on with the smaller of the two.
pub const MAJOR: u32 = 7;
/// The newest minor version whose messages these are (Linux 6.14).
pub const MINOR: u32 = 42;
/// The oldest that we speak: Linux 4.20 with `max_pages`.
pub const MINOR_MIN: u32 = 28;

/// The mount's root, its only inode.
pub const ROOT_ID: u64 = 1;

/// What a request asks for.
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

/// How an open file behaves.
pub mod open {
    #![allow(missing_docs)]
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// What SETATTR sets.
pub mod fattr {
    #![allow(missing_docs)]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    /// The caller has an open file: not by name, and not the truncation that open(O_TRUNC) asks for.
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

/// A layout of the header: plain numbers, any bytes are a value of it.
///
/// # Safety
/// `#[repr(C)]`, without padding, of integers and arrays of them only.
pub unsafe trait Plain: Copy + Default {
    /// Reads one from the start of `bytes`; `None` if they are too few.
    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < size_of::<Self>() {
            return None;
        }
        // SAFETY: there are enough bytes, and any are a value (the trait's promise).
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: no padding (the trait's promise), so all bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Declares layouts and how long the header says that they are.
macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident($c:ident) = $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[allow(missing_docs)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type),* }
        // SAFETY: repr(C) of integers; the assertion rules padding out, for the fields add up to the whole.
        unsafe impl Plain for $name {}
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

/// `fuse_uring_req_header`: what lies beside an entry's payload. In a request `in_out` begins with an [`InHeader`], in a
/// reply with an [`OutHeader`]; `op_in` is the fixed part of the request's arguments.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RingHeader {
    /// Header of the request, then of the reply.
    pub in_out: [u8; 128],
    /// Arguments.
    pub op_in: [u8; 128],
    /// Payload's length, and the id to commit by.
    pub ent: RingInOut,
}
const _: () = assert!(size_of::<RingHeader>() == 288);

/// The largest arguments of a request that we read.
pub const ARGS_MAX: usize = size_of::<SetattrIn>();

/// `_IOR(229, 0, uint32_t)`.
pub const DEV_IOC_CLONE: u64 = 0x8004_e500;
/// `_IOW(229, 1, struct fuse_backing_map)`.
pub const DEV_IOC_BACKING_OPEN: u64 = 0x4010_e501;
/// `_IOW(229, 2, uint32_t)`.
pub const DEV_IOC_BACKING_CLOSE: u64 = 0x4004_e502;
/// `_IOR(0x12, 114, size_t)`: a block device's size, which tools ask a file for, too.
pub const BLKGETSIZE64: u32 = 0x8008_1272;

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    /// Fields that are named otherwise in the header, or that older headers have under another name.
    fn c_field(layout: &str, field: &str) -> Option<&'static str> {
        match (layout, field) {
            ("fuse_write_in", "transfer_flags") => Some("write_flags"),
            // What is left over: its name and division change from version to version.
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
        // An older header lacks what is newer: that much is left out, and said.
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
