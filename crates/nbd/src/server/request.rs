//! Requests of clients: their headers, and what they may ask (proto, "Request message").

use crate::wire::*;
use crate::{BlockSizes, CommandKind, Headers, Violation, command_flag};

/// Error numbers of replies (proto, "Error values").
pub mod errno {
    /// The operation is not permitted.
    pub const EPERM: u32 = 1;
    /// Input or output failed.
    pub const EIO: u32 = 5;
    /// There is no memory.
    pub const ENOMEM: u32 = 12;
    /// The request is wrong.
    pub const EINVAL: u32 = 22;
    /// There is no space, or the range is beyond the end.
    pub const ENOSPC: u32 = 28;
    /// The operation is not supported.
    pub const ENOTSUP: u32 = 95;

    /// Returns the number of the protocol for a positive errno of the system.
    pub fn of(errno: i32) -> u32 {
        match errno {
            1 | 30 => EPERM,
            12 => ENOMEM,
            22 => EINVAL,
            27 | 28 | 122 => ENOSPC,
            95 => ENOTSUP,
            _ => EIO,
        }
    }
}

/// The header of a request, as the client sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bits of [`command_flag`].
    pub flags: u16,
    /// The number of the command.
    pub kind: u16,
    /// Names the request in replies.
    pub cookie: u64,
    /// Start of the range, bytes.
    pub offset: u64,
    /// Length of the range, bytes; with `PAYLOAD_LEN` that of the payload.
    pub len: u64,
}

/// What requests are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Size of the export now, bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub readonly: bool,
    /// Whether discards are offered.
    pub trims: bool,
    /// Whether the client has chosen contexts.
    pub contexts: bool,
    /// The form of requests.
    pub headers: Headers,
    /// The block sizes.
    pub blocks: BlockSizes,
}

/// What a valid request asks for. Its range is in the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// To read.
    Read,
    /// To write the payload.
    Write {
        /// Whether the answer means that it is on stable storage.
        fua: bool,
    },
    /// To end the session. There is no reply.
    Disconnect,
    /// To flush.
    Flush,
    /// To discard.
    Trim {
        /// See `Write`.
        fua: bool,
    },
    /// To write zeroes.
    WriteZeroes {
        /// Whether the space may be released.
        unmap: bool,
        /// See `Write`.
        fua: bool,
    },
    /// To report the state of the range.
    BlockStatus {
        /// Whether one extent is wanted.
        one: bool,
    },
}

impl Request {
    /// Reads the header at the start of `bytes`. Returns it with its length, or nothing if more
    /// bytes are needed; [`REQUEST_BYTES_MAX`](crate::REQUEST_BYTES_MAX) are always enough.
    ///
    /// # Errors
    /// The bytes are no request.
    #[inline]
    pub fn parse(headers: Headers, bytes: &[u8]) -> Result<Option<(Self, usize)>, Violation> {
        let mut from = Bytes(bytes);
        let Some(magic) = from.u32() else { return Ok(None) };
        let wide = headers == Headers::Extended;
        if magic != (if wide { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC }) {
            return Err(Violation("a request without the magic number of requests"));
        }
        let parsed = Self::fields(&mut from, wide);
        Ok(parsed.map(|request| (request, bytes.len() - from.0.len())))
    }

    #[inline]
    fn fields(from: &mut Bytes<'_>, wide: bool) -> Option<Self> {
        Some(Self {
            flags: from.u16()?,
            kind: from.u16()?,
            cookie: from.u64()?,
            offset: from.u64()?,
            len: if wide { from.u64()? } else { u64::from(from.u32()?) },
        })
    }

    /// Returns the command, if it is known.
    pub fn command(&self) -> Option<CommandKind> {
        CommandKind::of(self.kind)
    }

    /// Returns the bytes of the payload that follows the header.
    #[inline]
    pub fn payload(&self, headers: Headers) -> u64 {
        let has = match headers {
            Headers::Extended => self.flags & command_flag::PAYLOAD_LEN != 0,
            Headers::Simple | Headers::Structured => self.kind == CommandKind::Write as u16,
        };
        if has { self.len } else { 0 }
    }

    /// Compares the request with the export.
    ///
    /// # Errors
    /// The [`errno`] of a request that is refused.
    #[inline]
    pub fn check(&self, rules: &Rules) -> Result<Work, u32> {
        let kind = self.command().ok_or(errno::EINVAL)?;
        self.check_flags(kind, rules)?;
        let fua = self.flags & command_flag::FUA != 0;
        let work = match kind {
            CommandKind::Disconnect => return Ok(Work::Disconnect),
            CommandKind::Flush => return Ok(Work::Flush),
            CommandKind::Read => Work::Read,
            CommandKind::Write => Work::Write { fua },
            CommandKind::Trim if rules.readonly || rules.trims => Work::Trim { fua },
            CommandKind::Trim => return Err(errno::EINVAL),
            CommandKind::WriteZeroes => {
                Work::WriteZeroes { unmap: self.flags & command_flag::NO_HOLE == 0, fua }
            }
            CommandKind::BlockStatus if rules.contexts && self.len > 0 => {
                Work::BlockStatus { one: self.flags & command_flag::REQ_ONE != 0 }
            }
            CommandKind::BlockStatus => return Err(errno::EINVAL),
        };
        let reads = matches!(work, Work::Read | Work::BlockStatus { .. });
        if rules.readonly && !reads {
            return Err(errno::EPERM);
        }
        self.check_range(work, rules)?;
        Ok(work)
    }

    fn check_flags(&self, kind: CommandKind, rules: &Rules) -> Result<(), u32> {
        let mut known = command_flag::FUA;
        known |= match kind {
            CommandKind::Read if rules.headers != Headers::Simple => command_flag::DF,
            CommandKind::WriteZeroes => command_flag::NO_HOLE,
            CommandKind::BlockStatus => command_flag::REQ_ONE,
            // It has no reply, not even one with an error.
            CommandKind::Disconnect => !0,
            _ => 0,
        };
        let wide_write = kind == CommandKind::Write && rules.headers == Headers::Extended;
        if wide_write {
            known |= command_flag::PAYLOAD_LEN;
        }
        let has_len = self.flags & command_flag::PAYLOAD_LEN != 0;
        if self.flags & !known != 0 || (wide_write && !has_len) { Err(errno::EINVAL) } else { Ok(()) }
    }

    fn check_range(&self, work: Work, rules: &Rules) -> Result<(), u32> {
        let block = u64::from(rules.blocks.minimum);
        let end = self.offset.checked_add(self.len).filter(|end| *end <= rules.size);
        if end.is_none() {
            let grows = matches!(work, Work::Write { .. } | Work::WriteZeroes { .. });
            return Err(if grows { errno::ENOSPC } else { errno::EINVAL });
        }
        if !self.offset.is_multiple_of(block) || !self.len.is_multiple_of(block) {
            return Err(errno::EINVAL);
        }
        match work {
            Work::Read | Work::Write { .. } if self.len > u64::from(rules.blocks.maximum) => {
                Err(errno::EINVAL)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Command, REQUEST_BYTES_MAX};

    fn rules(headers: Headers) -> Rules {
        let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 };
        Rules { size: 1 << 30, readonly: false, trims: true, contexts: true, headers, blocks }
    }

    #[test]
    fn what_a_client_encodes_is_read() {
        for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
            let command = Command {
                kind: CommandKind::Write,
                flags: command_flag::FUA,
                cookie: 77,
                offset: 4096,
                len: 8192,
            };
            let mut bytes = [0; REQUEST_BYTES_MAX];
            let len = command.encode(headers, &mut bytes);
            for part in 0..len {
                assert_eq!(Request::parse(headers, &bytes[..part]), Ok(None));
            }
            let (request, used) = Request::parse(headers, &bytes).unwrap().unwrap();
            assert_eq!((used, request.cookie, request.payload(headers)), (len, 77, 8192));
            assert_eq!(request.check(&rules(headers)), Ok(Work::Write { fua: true }));
            bytes[0] ^= 1;
            assert!(Request::parse(headers, &bytes).is_err());
        }
    }

    #[test]
    fn what_is_refused_and_why() {
        let of = |kind, offset, len, flags| Request { flags, kind, cookie: 0, offset, len };
        let simple = rules(Headers::Simple);
        let end = 1u64 << 30;
        let cases = [
            (of(0, 0, 512, 0), Ok(Work::Read)),
            (of(0, end - 512, 512, 0), Ok(Work::Read)),
            (of(0, end, 0, 0), Ok(Work::Read)),
            (of(0, end, 512, 0), Err(errno::EINVAL)),
            (of(0, u64::MAX - 511, 512, 0), Err(errno::EINVAL)),
            (of(0, 0, 513, 0), Err(errno::EINVAL)),
            (of(0, 1, 512, 0), Err(errno::EINVAL)),
            (of(0, 0, (1 << 20) + 512, 0), Err(errno::EINVAL)),
            (of(0, 0, 512, command_flag::DF), Err(errno::EINVAL)),
            (of(1, end, 512, 0), Err(errno::ENOSPC)),
            (of(1, 0, 512, 1 << 9), Err(errno::EINVAL)),
            (of(1, 0, 512, command_flag::PAYLOAD_LEN), Err(errno::EINVAL)),
            (of(3, 9, 9, 0), Ok(Work::Flush)),
            (of(2, 0, 0, 1 << 9), Ok(Work::Disconnect)),
            (of(4, 0, end, 0), Ok(Work::Trim { fua: false })),
            (of(4, 512, end, 0), Err(errno::EINVAL)),
            (of(6, 512, end, 0), Err(errno::ENOSPC)),
            (of(6, 0, end, command_flag::NO_HOLE), Ok(Work::WriteZeroes { unmap: false, fua: false })),
            (of(6, 0, 512, 1 << 4), Err(errno::EINVAL)),
            (of(7, 0, 512, command_flag::REQ_ONE), Ok(Work::BlockStatus { one: true })),
            (of(7, 0, 0, 0), Err(errno::EINVAL)),
            (of(5, 0, 512, 0), Err(errno::EINVAL)),
            (of(99, 0, 512, 0), Err(errno::EINVAL)),
        ];
        for (request, wanted) in cases {
            assert_eq!(request.check(&simple), wanted, "{request:?}");
        }
        let readonly = Rules { readonly: true, trims: false, contexts: false, ..simple };
        for kind in [1, 4, 6] {
            assert_eq!(of(kind, 0, 512, 0).check(&readonly), Err(errno::EPERM));
        }
        assert_eq!(of(7, 0, 512, 0).check(&readonly), Err(errno::EINVAL));
        let untrimmed = Rules { trims: false, ..simple };
        assert_eq!(of(4, 0, 512, 0).check(&untrimmed), Err(errno::EINVAL));
        let wide = rules(Headers::Extended);
        assert_eq!(of(1, 0, 512, 0).check(&wide), Err(errno::EINVAL));
        assert_eq!(of(1, 0, 512, 0).payload(Headers::Extended), 0);
        assert_eq!(of(0, 0, 512, command_flag::DF).check(&wide), Ok(Work::Read));
        assert_eq!(of(0, 0, 512, command_flag::PAYLOAD_LEN).payload(Headers::Extended), 512);
    }

    #[test]
    fn each_error_of_the_system_has_one_of_the_protocol() {
        for (system, wanted) in [
            (libc_like::EROFS, errno::EPERM),
            (libc_like::ENOSPC, errno::ENOSPC),
            (libc_like::EIO, errno::EIO),
            (libc_like::EFBIG, errno::ENOSPC),
            (libc_like::EOPNOTSUPP, errno::ENOTSUP),
            (61, errno::EIO),
        ] {
            assert_eq!(errno::of(system), wanted);
        }
    }

    /// The numbers of Linux.
    mod libc_like {
        pub(super) const EIO: i32 = 5;
        pub(super) const EFBIG: i32 = 27;
        pub(super) const ENOSPC: i32 = 28;
        pub(super) const EROFS: i32 = 30;
        pub(super) const EOPNOTSUPP: i32 = 95;
    }
}
