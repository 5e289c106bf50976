//! Replies, from the bytes of a connection to the requests that they answer.
//!
//! A [`Receiver`] takes bytes as they arrive, in pieces of any length. It looks requests up by
//! [`Requests`], and passes data, errors and the ends of replies to it. The bytes of data that have
//! not arrived yet may go straight to their place: [`Receiver::direct`] says where that is.
//!
//! What must never happen: bytes beyond the range of a request are passed on. So a chunk is
//! compared with what its request still expects before any of its bytes are.

use super::handshake::Headers;
use super::reply::{Body, Violation, parse};

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Data.
    Data,
    /// The state of a range.
    Status,
    /// The end of the reply only.
    Nothing,
}

/// A request that waits for its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Names the request in the other methods of [`Requests`].
    pub slot: u32,
    /// What it waits for.
    pub wanted: Wanted,
    /// Start of its range, bytes.
    pub offset: u64,
    /// Length of its range, bytes.
    pub len: u64,
    /// Bytes of its range that have not arrived.
    pub left: u64,
    /// An error has arrived.
    pub failed: bool,
}

/// The requests in flight on a connection.
pub trait Requests {
    /// Returns the request with that cookie, or nothing if there is none.
    fn find(&mut self, cookie: u64) -> Option<Expected>;

    /// Takes the range of a chunk that begins. Returns false if a part of it has been taken since
    /// the request was sent ([`Covered`](super::Covered)).
    fn covers(&mut self, slot: u32, at: u64, len: u64) -> bool;

    /// Takes data for the range of a request, which begins at 0.
    fn data(&mut self, slot: u32, at: u64, bytes: &[u8]);

    /// Takes zeroes for the range of a request, which begins at 0.
    fn zeroes(&mut self, slot: u32, at: u64, len: u64);

    /// Counts bytes as arrived. Called after `data`, after `zeroes`, and for bytes that went
    /// straight to their place.
    fn arrived(&mut self, slot: u32, len: u64);

    /// Takes the first extent of a range: its length, which is positive, and its flags.
    fn status(&mut self, slot: u32, len: u64, flags: u64);

    /// Takes an error of the server: an errno of Linux ([`errno`]).
    fn error(&mut self, slot: u32, errno: i32);

    /// The reply is complete. The request is not found again.
    fn done(&mut self, slot: u32);
}

/// Data that is expected next, and may be read straight to its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direct {
    /// The request.
    pub slot: u32,
    /// The place in the range of the request, which begins at 0.
    pub at: u64,
    /// Bytes, at least 1.
    pub left: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    Data { direct: Direct, last: bool },
    Skip { slot: u32, left: u64, last: bool },
}

/// The reading side of a connection.
#[derive(Debug)]
pub struct Receiver {
    headers: Headers,
    /// The id of `base:allocation`, if the server has agreed to it.
    allocation: Option<u32>,
    state: State,
}

impl Receiver {
    /// Makes the reading side of a connection whose handshake had this result.
    pub fn new(headers: Headers, allocation: Option<u32>) -> Self {
        Self { headers, allocation, state: State::Header }
    }

    /// Returns whether the next bytes are the header of a reply, or of a chunk.
    pub fn is_at_header(&self) -> bool {
        matches!(self.state, State::Header)
    }

    /// Returns the data that is expected next. None: a header is.
    #[inline]
    pub fn direct(&self) -> Option<Direct> {
        match self.state {
            State::Data { direct, .. } => Some(direct),
            _ => None,
        }
    }

    /// Counts bytes that were read straight to the place of [`direct`](Self::direct), at most as
    /// many as it says.
    pub fn received(&mut self, len: u64, requests: &mut impl Requests) {
        let State::Data { direct, last } = &mut self.state else { return };
        let (slot, len) = (direct.slot, len.min(direct.left));
        direct.at += len;
        direct.left -= len;
        let (ended, last) = (direct.left == 0, *last);
        requests.arrived(slot, len);
        if ended {
            self.end(slot, last, requests);
        }
    }

    /// Takes bytes that have arrived, and returns how many it has used. Those that are left are a
    /// part of a header: pass them again, with more behind them.
    ///
    /// # Errors
    /// What the server sent is no reply to a request in flight.
    #[inline]
    pub fn take(&mut self, bytes: &[u8], requests: &mut impl Requests) -> Result<usize, Violation> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.state {
                State::Header => {
                    let Some((reply, len)) = parse(self.headers, rest)? else { break };
                    rest = rest.get(len..).unwrap_or_default();
                    let found = requests.find(reply.cookie);
                    let Some(found) = found else { return Err(Violation("a reply to no request")) };
                    self.reply(reply.body, reply.last, &found, requests)?;
                }
                State::Data { direct, .. } => {
                    let len = usize::try_from(direct.left).map_or(rest.len(), |left| left.min(rest.len()));
                    let (data, behind) = rest.split_at(len);
                    requests.data(direct.slot, direct.at, data);
                    self.received(len as u64, requests);
                    rest = behind;
                }
                State::Skip { slot, left, last } => {
                    let len = usize::try_from(left).map_or(rest.len(), |left| left.min(rest.len()));
                    rest = rest.get(len..).unwrap_or_default();
                    let left = left - len as u64;
                    self.state = State::Skip { slot, left, last };
                    if left == 0 {
                        self.end(slot, last, requests);
                    }
                }
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// Handles the header of a reply or chunk.
    fn reply(
        &mut self,
        body: Body,
        last: bool,
        found: &Expected,
        requests: &mut impl Requests,
    ) -> Result<(), Violation> {
        let slot = found.slot;
        match body {
            Body::Simple { error: 0 } => match (found.wanted, self.headers) {
                (Wanted::Nothing, _) => self.end(slot, true, requests),
                (Wanted::Data, Headers::Simple) if found.left > 0 => {
                    let direct = Direct { slot, at: found.len - found.left, left: found.left };
                    self.state = State::Data { direct, last: true };
                }
                _ => return Err(Violation("a simple reply to a request that needs another one")),
            },
            Body::Simple { error } => {
                requests.error(slot, errno(error));
                self.end(slot, true, requests);
            }
            Body::Nothing => return self.complete(last, found, requests),
            Body::Data { offset, len } => {
                let at = place(found, offset, len, requests)?;
                self.state = State::Data { direct: Direct { slot, at, left: len }, last };
                if last && len < found.left && !found.failed {
                    return Err(Violation("a reply with less data than was asked for"));
                }
            }
            Body::Hole { offset, len } => {
                let at = place(found, offset, len, requests)?;
                requests.zeroes(slot, at, len);
                requests.arrived(slot, len);
                let found = Expected { left: found.left - len, ..*found };
                return self.complete(last, &found, requests);
            }
            Body::Status { context, len, flags, skip } => {
                if found.wanted != Wanted::Status || Some(context) != self.allocation || len == 0 {
                    return Err(Violation("extents that were not asked for"));
                }
                requests.status(slot, len, flags);
                self.skip(slot, skip, last, requests);
            }
            Body::Error { error, skip } => {
                requests.error(slot, errno(error));
                self.skip(slot, skip, last, requests);
            }
        }
        Ok(())
    }

    /// Ends a chunk without bytes behind it, and its reply if it is the last one.
    fn complete(
        &mut self,
        last: bool,
        found: &Expected,
        requests: &mut impl Requests,
    ) -> Result<(), Violation> {
        if last && found.wanted == Wanted::Data && found.left > 0 && !found.failed {
            return Err(Violation("a reply with less data than was asked for"));
        }
        self.end(found.slot, last, requests);
        Ok(())
    }

    fn skip(&mut self, slot: u32, left: u64, last: bool, requests: &mut impl Requests) {
        match left {
            0 => self.end(slot, last, requests),
            _ => self.state = State::Skip { slot, left, last },
        }
    }

    #[inline]
    fn end(&mut self, slot: u32, last: bool, requests: &mut impl Requests) {
        self.state = State::Header;
        if last {
            requests.done(slot);
        }
    }
}

/// Returns the place of a chunk in the range of its request.
fn place(found: &Expected, offset: u64, len: u64, requests: &mut impl Requests) -> Result<u64, Violation> {
    let at = offset.checked_sub(found.offset).filter(|at| {
        let fits = at.checked_add(len).is_some_and(|end| end <= found.len);
        found.wanted == Wanted::Data && fits && len > 0 && len <= found.left
    });
    let at = at.ok_or(Violation("data that was not asked for"))?;
    // Bytes that never arrive would be counted as data otherwise.
    if !requests.covers(found.slot, at, len) {
        return Err(Violation("chunks that overlap, or too many of them out of order"));
    }
    Ok(at)
}

/// Returns the errno of Linux for an error of the protocol (proto, "Error values"). The numbers are
/// the same; others become EIO.
pub(super) fn errno(error: u32) -> i32 {
    match error {
        1 => 1,     // EPERM
        12 => 12,   // ENOMEM
        22 => 22,   // EINVAL
        28 => 28,   // ENOSPC
        75 => 75,   // EOVERFLOW
        95 => 95,   // EOPNOTSUPP
        108 => 108, // ESHUTDOWN
        _ => 5,     // EIO
    }
}

#[cfg(test)]
mod tests;
