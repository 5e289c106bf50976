//! The headers of replies (proto, "Simple reply message", "Structured reply chunk message").

use std::fmt;

use super::STRING_BYTES_MAX;
use super::handshake::Headers;
use super::wire::*;

/// Bytes of the longest header of a reply with the part of its payload that has a fixed form.
pub const HEADER_BYTES_MAX: usize = 64;
/// Most bytes of a chunk of extents: more than any server sends for one extent.
const STATUS_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of an error chunk: error, length, message, offset.
const ERROR_BYTES_MAX: u64 = STRING_BYTES_MAX as u64 + 64;

/// What a peer did that the protocol does not allow. The connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation(pub &'static str);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Violation {}

/// A reply, or a chunk of one. The lengths are as the server sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// Names the request.
    pub(super) cookie: u64,
    /// No more chunks of this reply follow.
    pub(super) last: bool,
    pub(super) body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// A simple reply. The data of a read without an error follows.
    Simple { error: u32 },
    /// A chunk without content.
    Nothing,
    /// `len` bytes of data follow, which are at `offset` of the export.
    Data { offset: u64, len: u64 },
    /// A range of zeroes.
    Hole { offset: u64, len: u64 },
    /// The first extent of a range; `skip` bytes follow.
    Status { context: u32, len: u64, flags: u64, skip: u64 },
    /// An error; `skip` bytes follow.
    Error { error: u32, skip: u64 },
}

/// Reads the reply at the start of `bytes`. Returns it with the length of what was read, or nothing
/// if more bytes are needed; [`HEADER_BYTES_MAX`] are always enough.
///
/// # Errors
/// The bytes are no reply.
#[inline]
pub(super) fn parse(headers: Headers, bytes: &[u8]) -> Result<Option<(Reply, usize)>, Violation> {
    let mut from = Bytes(bytes);
    let Some(magic) = from.u32() else { return Ok(None) };
    let parsed = match (headers, magic) {
        (Headers::Simple | Headers::Structured, SIMPLE_MAGIC) => simple(&mut from),
        (Headers::Structured, STRUCTURED_MAGIC) | (Headers::Extended, EXTENDED_MAGIC) => {
            return Ok(chunk(headers, &mut from)?.map(|reply| (reply, bytes.len() - from.0.len())));
        }
        _ => return Err(Violation("a reply without the magic number of replies")),
    };
    Ok(parsed.map(|reply| (reply, bytes.len() - from.0.len())))
}

fn simple(from: &mut Bytes<'_>) -> Option<Reply> {
    let error = from.u32()?;
    Some(Reply { cookie: from.u64()?, last: true, body: Body::Simple { error } })
}

fn chunk(headers: Headers, from: &mut Bytes<'_>) -> Result<Option<Reply>, Violation> {
    let Some(head) = chunk_head(headers, from) else { return Ok(None) };
    let Some(body) = chunk_body(head.kind, head.len, from)? else { return Ok(None) };
    let last = head.flags & FLAG_DONE != 0;
    if body == Body::Nothing && !last {
        return Err(Violation("an empty chunk that is not the last one"));
    }
    Ok(Some(Reply { cookie: head.cookie, last, body }))
}

struct ChunkHead {
    flags: u16,
    kind: u16,
    cookie: u64,
    len: u64,
}

fn chunk_head(headers: Headers, from: &mut Bytes<'_>) -> Option<ChunkHead> {
    let (flags, kind, cookie) = (from.u16()?, from.u16()?, from.u64()?);
    let len = if headers == Headers::Extended {
        // The offset of the request, which the cookie tells already.
        from.u64()?;
        from.u64()?
    } else {
        u64::from(from.u32()?)
    };
    Some(ChunkHead { flags, kind, cookie, len })
}

fn chunk_body(kind: u16, len: u64, from: &mut Bytes<'_>) -> Result<Option<Body>, Violation> {
    Ok(match kind {
        TYPE_NONE if len == 0 => Some(Body::Nothing),
        TYPE_OFFSET_DATA if len > 8 => from.u64().map(|offset| Body::Data { offset, len: len - 8 }),
        TYPE_OFFSET_HOLE if len == 12 => hole(from),
        TYPE_BLOCK_STATUS if len >= 12 && (len - 4).is_multiple_of(8) && len <= STATUS_BYTES_MAX => {
            status(from, len - 12)
        }
        TYPE_BLOCK_STATUS_EXT if len >= 24 && (len - 8).is_multiple_of(16) && len <= STATUS_BYTES_MAX => {
            wide_status(from, len - 24)
        }
        _ if kind & TYPE_ERROR != 0 && (6..=ERROR_BYTES_MAX).contains(&len) => {
            let Some(error) = from.u32() else { return Ok(None) };
            let Some(message) = from.u16() else { return Ok(None) };
            if u64::from(message) > len - 6 {
                return Err(Violation("an error message that is longer than its chunk"));
            }
            Some(Body::Error { error, skip: len - 6 })
        }
        _ => return Err(Violation("a chunk whose type or length is wrong")),
    })
}

fn hole(from: &mut Bytes<'_>) -> Option<Body> {
    Some(Body::Hole { offset: from.u64()?, len: u64::from(from.u32()?) })
}

fn status(from: &mut Bytes<'_>, skip: u64) -> Option<Body> {
    let context = from.u32()?;
    Some(Body::Status { context, len: u64::from(from.u32()?), flags: u64::from(from.u32()?), skip })
}

fn wide_status(from: &mut Bytes<'_>, skip: u64) -> Option<Body> {
    let context = from.u32()?;
    // The number of extents, which the length of the chunk tells already.
    from.u32()?;
    Some(Body::Status { context, len: from.u64()?, flags: from.u64()?, skip })
}
