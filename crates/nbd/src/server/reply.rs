//! Replies of a server, as bytes (proto, "Simple reply message", "Structured reply chunk message").

use crate::wire::*;
use crate::{CommandKind, HEADER_BYTES_MAX, Headers};

/// Most extents that a server reports for one context of one request.
pub const STATUS_EXTENTS_MAX: usize = 1024;

/// The header of a reply without what follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The form of replies.
    pub headers: Headers,
    /// The number of the command.
    pub kind: u16,
    /// Names the request.
    pub cookie: u64,
    /// Start of the range of the request, bytes.
    pub offset: u64,
}

/// Writes big-endian numbers to a header.
struct Writer<'a> {
    to: &'a mut [u8; HEADER_BYTES_MAX],
    len: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some(place) = self.to.get_mut(self.len..self.len + bytes.len()) {
            place.copy_from_slice(bytes);
            self.len += bytes.len();
        }
    }
}

impl Reply {
    /// Writes the header of a reply of `len` bytes of data, which follow it. With 0 bytes this is
    /// the reply of success of any command. Returns the length of the header.
    #[inline]
    pub fn success(&self, len: u32, to: &mut [u8; HEADER_BYTES_MAX]) -> usize {
        let mut out = Writer { to, len: 0 };
        match (self.headers, len) {
            (Headers::Simple, _) => self.simple(&mut out, 0),
            // Only a read needs a structured reply.
            (Headers::Structured, 0) if self.kind != CommandKind::Read as u16 => self.simple(&mut out, 0),
            (_, 0) => self.chunk(&mut out, TYPE_NONE, 0),
            _ => {
                self.chunk(&mut out, TYPE_OFFSET_DATA, u64::from(len) + 8);
                out.put(&self.offset.to_be_bytes());
            }
        }
        out.len
    }

    /// Writes a reply with an error ([`errno`](super::errno)). Returns its length.
    pub fn error(&self, error: u32, to: &mut [u8; HEADER_BYTES_MAX]) -> usize {
        let mut out = Writer { to, len: 0 };
        let kinds = [CommandKind::Read as u16, CommandKind::BlockStatus as u16];
        match self.headers {
            Headers::Simple => self.simple(&mut out, error),
            Headers::Structured if !kinds.contains(&self.kind) => self.simple(&mut out, error),
            Headers::Structured | Headers::Extended => {
                self.chunk(&mut out, TYPE_ERROR | 1, 6);
                out.put(&error.to_be_bytes());
                // There is no message.
                out.put(&0u16.to_be_bytes());
            }
        }
        out.len
    }

    #[inline]
    fn simple(&self, out: &mut Writer<'_>, error: u32) {
        out.put(&SIMPLE_MAGIC.to_be_bytes());
        out.put(&error.to_be_bytes());
        out.put(&self.cookie.to_be_bytes());
    }

    /// Writes the header of the last chunk of a reply.
    #[inline]
    fn chunk(&self, out: &mut Writer<'_>, kind: u16, len: u64) {
        self.chunk_with(out, FLAG_DONE, kind, len);
    }

    fn chunk_with(&self, out: &mut Writer<'_>, flags: u16, kind: u16, len: u64) {
        let wide = self.headers == Headers::Extended;
        out.put(&(if wide { EXTENDED_MAGIC } else { STRUCTURED_MAGIC }).to_be_bytes());
        out.put(&flags.to_be_bytes());
        out.put(&kind.to_be_bytes());
        out.put(&self.cookie.to_be_bytes());
        if wide {
            out.put(&self.offset.to_be_bytes());
            out.put(&len.to_be_bytes());
        } else {
            out.put(&u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
        }
    }
}

/// A range of one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentRun {
    /// Its length, bytes; not 0.
    pub len: u64,
    /// Its flags, for example those of [`allocation`](crate::allocation).
    pub flags: u64,
}

/// Returns the bytes of a chunk of `extents` extents, with its header.
pub fn status_bytes(headers: Headers, extents: usize) -> usize {
    match headers {
        Headers::Extended => 32 + 8 + 16 * extents,
        Headers::Simple | Headers::Structured => 20 + 4 + 8 * extents,
    }
}

/// Adds the chunk of a context to `to`: the states of ranges from the offset of the request on.
/// `last`: no other chunk follows. Without extended headers, `len` of each run fits 32 bits.
pub fn add_status(reply: &Reply, context: u32, runs: &[ExtentRun], last: bool, to: &mut Vec<u8>) {
    let mut header = [0; HEADER_BYTES_MAX];
    let mut out = Writer { to: &mut header, len: 0 };
    let wide = reply.headers == Headers::Extended;
    let kind = if wide { TYPE_BLOCK_STATUS_EXT } else { TYPE_BLOCK_STATUS };
    let each: u64 = if wide { 16 } else { 8 };
    let count = u32::try_from(runs.len()).unwrap_or(u32::MAX);
    let fixed = if wide { 8 } else { 4 };
    let flags = if last { FLAG_DONE } else { 0 };
    reply.chunk_with(&mut out, flags, kind, fixed + each * u64::from(count));
    out.put(&context.to_be_bytes());
    if wide {
        out.put(&count.to_be_bytes());
    }
    let len = out.len;
    to.extend_from_slice(header.get(..len).unwrap_or_default());
    for run in runs {
        if wide {
            to.extend_from_slice(&run.len.to_be_bytes());
            to.extend_from_slice(&run.flags.to_be_bytes());
        } else {
            let [len, flags] = [run.len, run.flags].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
            to.extend_from_slice(&len.to_be_bytes());
            to.extend_from_slice(&flags.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::{Body, parse};

    #[test]
    fn what_a_server_writes_a_client_reads() {
        for headers in [Headers::Simple, Headers::Structured, Headers::Extended] {
            let of = |kind: CommandKind| Reply { headers, kind: kind as u16, cookie: 9, offset: 4096 };
            let mut bytes = [0; HEADER_BYTES_MAX];
            let used = of(CommandKind::Read).success(512, &mut bytes);
            let (reply, parsed) = parse(headers, &bytes).unwrap().unwrap();
            assert_eq!((reply.cookie, reply.last, used), (9, true, parsed));
            let wanted = match headers {
                Headers::Simple => Body::Simple { error: 0 },
                _ => Body::Data { offset: 4096, len: 512 },
            };
            assert_eq!(reply.body, wanted);
            let used = of(CommandKind::Flush).success(0, &mut bytes);
            let (reply, parsed) = parse(headers, &bytes).unwrap().unwrap();
            assert_eq!((reply.cookie, reply.last, used), (9, true, parsed));
            for kind in [CommandKind::Read, CommandKind::Write] {
                let used = of(kind).error(28, &mut bytes);
                let (reply, parsed) = parse(headers, &bytes).unwrap().unwrap();
                assert_eq!(used, parsed);
                let error = matches!(reply.body, Body::Simple { error: 28 } | Body::Error { error: 28, .. });
                assert!(error, "{reply:?}");
            }
        }
    }

    #[test]
    fn the_state_of_a_range_is_read_by_a_client() {
        for headers in [Headers::Structured, Headers::Extended] {
            let reply = Reply { headers, kind: CommandKind::BlockStatus as u16, cookie: 3, offset: 0 };
            let runs = [ExtentRun { len: 65536, flags: 3 }, ExtentRun { len: 512, flags: 0 }];
            let mut bytes = Vec::new();
            add_status(&reply, 1, &runs, true, &mut bytes);
            assert_eq!(bytes.len(), status_bytes(headers, 2));
            let (reply, used) = parse(headers, &bytes).unwrap().unwrap();
            let skip = if headers == Headers::Extended { 16 } else { 8 };
            assert_eq!(reply.body, Body::Status { context: 1, len: 65536, flags: 3, skip });
            assert_eq!(bytes.len() - used, usize::try_from(skip).unwrap());
        }
    }
}
