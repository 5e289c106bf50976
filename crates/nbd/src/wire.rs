//! Numbers of the handshake, which client and server share (proto, "Values").

/// First magic number of a server.
pub(super) const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Begins each option, and is the second magic number of a server.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second magic number of a server with the old handshake.
pub(super) const OLD_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Begins each reply to an option.
pub(super) const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags, of the server and of the client.
pub(super) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(super) const FLAG_NO_ZEROES: u16 = 2;

pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;
pub(super) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
pub(super) const REP_ERROR: u32 = 1 << 31;
pub(super) const REP_ERR_UNSUP: u32 = REP_ERROR + 1;
pub(super) const REP_ERR_POLICY: u32 = REP_ERROR + 2;
pub(super) const REP_ERR_INVALID: u32 = REP_ERROR + 3;
pub(super) const REP_ERR_TLS_REQD: u32 = REP_ERROR + 5;
pub(super) const REP_ERR_UNKNOWN: u32 = REP_ERROR + 6;
pub(super) const REP_ERR_SHUTDOWN: u32 = REP_ERROR + 7;
pub(super) const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR + 8;
pub(super) const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERROR + 10;

pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// Begins a request without extended headers.
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Begins a request with extended headers.
pub(super) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Bytes of a request header without extended headers.
pub(super) const COMPACT_BYTES: usize = 28;

/// Begins a simple reply.
pub(super) const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Begins a chunk of a structured reply.
pub(super) const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
/// Begins a chunk of a reply with extended headers.
pub(super) const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

/// The chunk is the last one of its reply.
pub(super) const FLAG_DONE: u16 = 1;
/// Types of chunks with this bit are errors.
pub(super) const TYPE_ERROR: u16 = 1 << 15;
pub(super) const TYPE_NONE: u16 = 0;
pub(super) const TYPE_OFFSET_DATA: u16 = 1;
pub(super) const TYPE_OFFSET_HOLE: u16 = 2;
pub(super) const TYPE_BLOCK_STATUS: u16 = 5;
pub(super) const TYPE_BLOCK_STATUS_EXT: u16 = 6;

/// Reads big-endian numbers from the front of some bytes.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// Takes a string of the protocol: its length, and its bytes.
    pub(super) fn string(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(text)
    }
}
