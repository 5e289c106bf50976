//! Requests: what the client asks, as bytes (proto, "Request message").

use super::handshake::Headers;
use super::wire::*;

/// Bytes of the longest request header, that of extended headers.
pub const REQUEST_BYTES_MAX: usize = 32;

/// Flags of a command (proto, "Command flags").
pub mod command_flag {
    /// The command is complete when its data is on stable storage.
    pub const FUA: u16 = 1;
    /// WriteZeroes: the range keeps its space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Read: the answer comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// BlockStatus: one extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Extended headers: the length is that of a payload. Every write has it.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The type of a command (proto, "Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum CommandKind {
    /// Reads.
    Read = 0,
    /// Writes; its payload follows.
    Write = 1,
    /// Ends the session. It has no reply.
    Disconnect = 2,
    /// Brings completed writes to stable storage.
    Flush = 3,
    /// Discards.
    Trim = 4,
    /// Zeroes without a payload.
    WriteZeroes = 6,
    /// Asks for the state of a range.
    BlockStatus = 7,
}

impl CommandKind {
    /// Returns the type with this number, if it is known.
    pub(super) fn of(number: u16) -> Option<Self> {
        [
            Self::Read,
            Self::Write,
            Self::Disconnect,
            Self::Flush,
            Self::Trim,
            Self::WriteZeroes,
            Self::BlockStatus,
        ]
        .into_iter()
        .find(|kind| *kind as u16 == number)
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The type.
    pub kind: CommandKind,
    /// Bits of [`command_flag`]. The flag that extended headers need is added by
    /// [`encode`](Self::encode).
    pub flags: u16,
    /// Names the request in the replies.
    pub cookie: u64,
    /// Start of the range, bytes.
    pub offset: u64,
    /// Length of the range, bytes. It has 32 bits without extended headers.
    pub len: u64,
}

/// The command that ends a session.
pub const DISCONNECT: Command =
    Command { kind: CommandKind::Disconnect, flags: 0, cookie: 0, offset: 0, len: 0 };

impl Command {
    /// Writes the header to `to`, and returns its length in bytes. A length that does not fit is
    /// cut to the largest that does; callers keep ranges below [`Headers::len_max`].
    #[inline]
    pub fn encode(&self, headers: Headers, to: &mut [u8; REQUEST_BYTES_MAX]) -> usize {
        let extended = headers == Headers::Extended;
        let mut flags = self.flags;
        if extended && self.kind == CommandKind::Write {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut word = u128::from(magic) << 96;
        word |= u128::from(flags) << 80 | u128::from(self.kind as u16) << 64 | u128::from(self.cookie);
        let (first, rest) = to.split_at_mut(16);
        first.copy_from_slice(&word.to_be_bytes());
        if extended {
            let word = u128::from(self.offset) << 64 | u128::from(self.len);
            rest.copy_from_slice(&word.to_be_bytes());
            return REQUEST_BYTES_MAX;
        }
        debug_assert!(self.len <= headers.len_max());
        let len = u32::try_from(self.len).unwrap_or(u32::MAX);
        let word = u128::from(self.offset) << 64 | u128::from(len) << 32;
        rest.copy_from_slice(&word.to_be_bytes());
        COMPACT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_bytes_of_the_specification() {
        let write = Command {
            kind: CommandKind::Write,
            flags: command_flag::FUA,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1112_1314_1516_1718,
            len: 0x2122_2324,
        };
        let mut bytes = [0xEE; REQUEST_BYTES_MAX];
        for headers in [Headers::Simple, Headers::Structured] {
            assert_eq!(write.encode(headers, &mut bytes), 28);
            assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
            assert_eq!(bytes[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
            assert_eq!(
                bytes[16..28],
                [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24]
            );
        }
        assert_eq!(write.encode(Headers::Extended, &mut bytes), 32);
        assert_eq!(bytes[..8], [0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1]);
        assert_eq!(bytes[24..], [0, 0, 0, 0, 0x21, 0x22, 0x23, 0x24]);
        let zero =
            Command { kind: CommandKind::WriteZeroes, flags: command_flag::NO_HOLE, len: 1 << 40, ..write };
        assert_eq!(zero.encode(Headers::Extended, &mut bytes), 32);
        assert_eq!(bytes[4..8], [0, 2, 0, 6]);
        assert_eq!(bytes[24..], (1u64 << 40).to_be_bytes());
    }
}
