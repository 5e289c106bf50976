//! The handshake (proto, "Fixed newstyle negotiation", "Option types").
//!
//! It runs on a control thread, on a stream with a time limit. The client asks for extended
//! headers, then for structured replies, then for the context `base:allocation`, then for the
//! export with its block sizes. It does without what the server lacks. With TLS, it asks for that
//! before all else.

use std::fmt;
use std::io::{self, Read, Write};

use super::STRING_BYTES_MAX;
use super::wire::*;

/// Bytes of the longest reply to an option.
const REPLY_BYTES_MAX: u32 = 64 << 10;
/// Most replies to one option.
const REPLIES_MAX: usize = 4096;
/// Names of exports in a message.
const NAMES_MAX: usize = 8;
/// Bytes of the longest data of a read or write if the server names none (proto, "Block size
/// constraints").
const PAYLOAD_BYTES: u32 = 32 << 20;
/// Largest alignment that a server may require (proto, "Block size constraints").
const MINIMUM_MAX: u32 = 64 << 10;

const ALLOCATION: &str = "base:allocation";

/// Transmission flags (proto, "Transmission flags").
pub mod transmission_flag {
    /// The other flags are valid.
    pub const HAS_FLAGS: u16 = 1;
    /// The export refuses writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The server knows flushes.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The server knows FUA.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The server knows discards.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The server knows WriteZeroes.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The server knows reads that may not be answered in parts.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see the same data, and a flush on one is for all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// The form of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    /// Requests of 28 bytes, replies of 16.
    Simple,
    /// Requests of 28 bytes, replies in chunks.
    Structured,
    /// Requests and replies with lengths of 64 bits.
    Extended,
}

impl Headers {
    /// Returns the longest range that a command without a payload can have, bytes.
    pub fn len_max(self) -> u64 {
        match self {
            Self::Extended => i64::MAX.unsigned_abs(),
            Self::Simple | Self::Structured => u64::from(u32::MAX),
        }
    }
}

/// The block sizes of an export, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it: a power of two up to 64 KiB.
    pub minimum: u32,
    /// Multiples of it are fast.
    pub preferred: u32,
    /// The longest data of a read or write.
    pub maximum: u32,
}

/// What client and server have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Size of the export, bytes.
    pub size: u64,
    /// Bits of [`transmission_flag`].
    pub flags: u16,
    /// The form of requests and replies.
    pub headers: Headers,
    /// The block sizes.
    pub blocks: BlockSizes,
    /// The id of `base:allocation`, if the server knows it.
    pub allocation: Option<u32>,
}

impl Settings {
    /// Returns whether all bits of `flag` are set.
    #[inline]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag == flag
    }
}

/// Why there is no connection: a clause about the server, and the remedy where there is one.
#[derive(Debug)]
pub enum HandshakeError {
    /// The stream failed or ended.
    Io(io::Error),
    /// The bytes are not those of an NBD server, or break the protocol.
    Protocol(&'static str),
    /// The server has no such export.
    UnknownExport {
        /// The name that was asked for.
        name: String,
        /// Names that it has, at most eight; empty if it does not tell.
        names: Vec<String>,
    },
    /// The server wants TLS.
    TlsRequired,
    /// The server has no TLS.
    NoTls,
    /// The server refused, for another reason.
    Refused(String),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("closes the connection in the handshake; its log may have the reason")
            }
            Self::Io(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                f.write_str("does not answer in time")
            }
            Self::Io(e) => write!(f, "breaks the handshake off: {e}"),
            Self::Protocol(why) => write!(f, "breaks the protocol: {why}"),
            Self::UnknownExport { name, names } => {
                write!(f, "has no export named \"{}\"", name.escape_debug())?;
                match names.as_slice() {
                    [] => f.write_str("; write its name behind the host, as in nbd://host/NAME"),
                    names => {
                        let shown = |name: &String| format!("\"{}\"", name.escape_debug());
                        let shown: Vec<_> = names.iter().map(shown).collect();
                        write!(f, "; it has {}", shown.join(", "))
                    }
                }
            }
            Self::TlsRequired => f.write_str("requires TLS: write nbds:// or nbds+unix:// in the URI"),
            Self::NoTls => f.write_str(
                "has no TLS: let the server have a certificate, or write nbd:// or nbd+unix:// if everyone on the way may \
                 read and change the data",
            ),
            Self::Refused(why) => write!(f, "refuses: {why}"),
        }
    }
}

impl std::error::Error for HandshakeError {}

impl From<io::Error> for HandshakeError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

type Result<T> = std::result::Result<T, HandshakeError>;

/// A handshake after the greeting. The client sends next.
#[derive(Debug)]
pub struct Greeted {
    no_zeroes: bool,
}

/// Reads the server's greeting from a connected stream, and answers it. Blocks as long as the
/// stream does.
///
/// # Errors
/// The stream ends or fails, or the server breaks the protocol. The stream is of no more use then.
pub fn greet<S: Read + Write>(stream: &mut S) -> Result<Greeted> {
    let mut shake = Shake { stream, no_zeroes: false };
    shake.greet()?;
    Ok(Greeted { no_zeroes: shake.no_zeroes })
}

impl Greeted {
    /// Asks for TLS (proto, "TLS versions"). Afterwards the stream carries TLS, and the handshake
    /// continues in it. Bytes behind the answer cannot be there: the server waits for the client.
    ///
    /// # Errors
    /// As those of [`greet`]; `NoTls` if the server has none.
    pub fn start_tls<S: Read + Write>(&self, stream: &mut S) -> Result<()> {
        let mut shake = Shake { stream, no_zeroes: self.no_zeroes };
        shake.send(OPT_STARTTLS, &[])?;
        let reply = shake.reply(OPT_STARTTLS)?;
        match reply.kind {
            REP_ACK if reply.data.is_empty() => Ok(()),
            REP_ERR_UNSUP | REP_ERR_POLICY => Err(HandshakeError::NoTls),
            kind if kind & REP_ERROR != 0 => Err(HandshakeError::Refused(reply.text())),
            _ => Err(HandshakeError::Protocol("an answer to an option that does not belong to it")),
        }
    }

    /// Asks for an export, and ends the handshake.
    ///
    /// # Errors
    /// The stream ends or fails, the server breaks the protocol, or it refuses. The stream is of no
    /// more use then.
    pub fn negotiate<S: Read + Write>(self, stream: &mut S, export: &str) -> Result<Settings> {
        Shake { stream, no_zeroes: self.no_zeroes }.negotiate(export)
    }
}

/// Does the handshake for an export on a connected stream, without TLS. Blocks as long as the
/// stream does.
///
/// # Errors
/// Those of [`greet`] and [`Greeted::negotiate`].
pub fn negotiate<S: Read + Write>(stream: &mut S, export: &str) -> Result<Settings> {
    greet(stream)?.negotiate(stream, export)
}

/// A reply to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

impl OptionReply {
    fn u16(&self, at: usize) -> Result<u16> {
        self.array(at).map(u16::from_be_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32> {
        self.array(at).map(u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64> {
        self.array(at).map(u64::from_be_bytes)
    }

    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        let bytes = self.data.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().ok_or(HandshakeError::Protocol("an answer to an option that is too short"))
    }

    /// Returns the text of the reply, for messages.
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.data);
        let shown: String = text.chars().take(200).filter(|c| !c.is_control()).collect();
        shown.trim().trim_end_matches('.').to_owned()
    }
}

struct Shake<'a, S> {
    stream: &'a mut S,
    no_zeroes: bool,
}

impl<S: Read + Write> Shake<'_, S> {
    /// Asks for what is wanted, then for the export.
    fn negotiate(&mut self, export: &str) -> Result<Settings> {
        let mut headers = Headers::Simple;
        for (option, wanted) in
            [(OPT_EXTENDED_HEADERS, Headers::Extended), (OPT_STRUCTURED_REPLY, Headers::Structured)]
        {
            if headers == Headers::Simple && self.ask(option, &[])? {
                headers = wanted;
            }
        }
        let allocation = match headers {
            Headers::Simple => None,
            _ => self.allocation(export)?,
        };
        self.go(export, headers, allocation)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads the server's greeting and answers it.
    fn greet(&mut self) -> Result<()> {
        if self.u64()? != INIT_MAGIC {
            return Err(HandshakeError::Protocol("it does not begin as an NBD server does"));
        }
        match self.u64()? {
            OPTION_MAGIC => {}
            OLD_MAGIC => return Err(HandshakeError::Protocol("it knows the old handshake only")),
            _ => return Err(HandshakeError::Protocol("it does not begin as an NBD server does")),
        }
        let flags = self.u16()?;
        if flags & FLAG_FIXED_NEWSTYLE == 0 {
            return Err(HandshakeError::Protocol("it knows an old handshake only, without options"));
        }
        self.no_zeroes = flags & FLAG_NO_ZEROES != 0;
        let answer = u32::from(flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES));
        Ok(self.stream.write_all(&answer.to_be_bytes())?)
    }

    fn send(&mut self, option: u32, data: &[u8]) -> Result<()> {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let head = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes()];
        Ok(self.stream.write_all(&[&head.concat(), data].concat())?)
    }

    fn reply(&mut self, option: u32) -> Result<OptionReply> {
        if self.u64()? != REPLY_MAGIC {
            return Err(HandshakeError::Protocol("an answer to an option without its magic number"));
        }
        if self.u32()? != option {
            return Err(HandshakeError::Protocol("an answer to another option"));
        }
        let (kind, len) = (self.u32()?, self.u32()?);
        if len > REPLY_BYTES_MAX {
            return Err(HandshakeError::Protocol("an answer to an option that is too long"));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        self.stream.read_exact(&mut data)?;
        match kind {
            REP_ERR_TLS_REQD => Err(HandshakeError::TlsRequired),
            REP_ERR_SHUTDOWN => Err(HandshakeError::Refused("it is shutting down".into())),
            _ => Ok(OptionReply { kind, data }),
        }
    }

    /// Asks for something that the server may lack. Returns whether it has it.
    fn ask(&mut self, option: u32, data: &[u8]) -> Result<bool> {
        self.send(option, data)?;
        match self.reply(option)?.kind {
            REP_ACK => Ok(true),
            kind if kind & REP_ERROR != 0 => Ok(false),
            _ => Err(HandshakeError::Protocol("an answer to an option that does not belong to it")),
        }
    }

    /// Asks for the context `base:allocation`. Returns its id.
    fn allocation(&mut self, export: &str) -> Result<Option<u32>> {
        let data = [&text(export)[..], &1u32.to_be_bytes(), &text(ALLOCATION)].concat();
        self.send(OPT_SET_META_CONTEXT, &data)?;
        let mut id = None;
        for _ in 0..REPLIES_MAX {
            let reply = self.reply(OPT_SET_META_CONTEXT)?;
            match reply.kind {
                REP_ACK => return Ok(id),
                REP_META_CONTEXT => {
                    if reply.data.get(4..) == Some(ALLOCATION.as_bytes()) {
                        id = Some(reply.u32(0)?);
                    }
                }
                // An unknown export is named by the option that asks for it.
                kind if kind & REP_ERROR != 0 => return Ok(None),
                _ => {
                    return Err(HandshakeError::Protocol(
                        "an answer to an option that does not belong to it",
                    ));
                }
            }
        }
        Err(HandshakeError::Protocol("too many answers to an option"))
    }

    /// Asks for the export, and ends the handshake.
    fn go(&mut self, export: &str, headers: Headers, allocation: Option<u32>) -> Result<Settings> {
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_BYTES };
        let mut settings = Settings { size: 0, flags: 0, headers, blocks, allocation };
        let asked = [&text(export)[..], &1u16.to_be_bytes(), &INFO_BLOCK_SIZE.to_be_bytes()].concat();
        self.send(OPT_GO, &asked)?;
        let mut known = false;
        for _ in 0..REPLIES_MAX {
            let reply = self.reply(OPT_GO)?;
            match reply.kind {
                REP_ACK if known => return Ok(settings),
                REP_ACK => return Err(HandshakeError::Protocol("it does not tell the size of the export")),
                REP_INFO => match reply.u16(0)? {
                    INFO_EXPORT => {
                        (settings.size, settings.flags) = (reply.u64(2)?, reply.u16(10)?);
                        known = true;
                    }
                    INFO_BLOCK_SIZE => {
                        settings.blocks = checked(BlockSizes {
                            minimum: reply.u32(2)?,
                            preferred: reply.u32(6)?,
                            maximum: reply.u32(10)?,
                        })?;
                    }
                    _ => {}
                },
                REP_ERR_UNSUP => return self.export_name(export, settings),
                REP_ERR_UNKNOWN => return Err(self.unknown(export)),
                kind if kind & REP_ERROR != 0 => {
                    let why = match (reply.text(), kind) {
                        (text, _) if !text.is_empty() => text,
                        (_, REP_ERR_POLICY) => "its policy does not allow it".into(),
                        _ => format!("the error number is {}", kind & !REP_ERROR),
                    };
                    let _ = self.send(OPT_ABORT, &[]);
                    return Err(HandshakeError::Refused(why));
                }
                _ => {
                    return Err(HandshakeError::Protocol(
                        "an answer to an option that does not belong to it",
                    ));
                }
            }
        }
        Err(HandshakeError::Protocol("too many answers to an option"))
    }

    /// Asks for the export by the older option. A server that refuses closes the connection.
    fn export_name(&mut self, export: &str, settings: Settings) -> Result<Settings> {
        self.send(OPT_EXPORT_NAME, export.as_bytes())?;
        let refused = |e| match e {
            HandshakeError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                HandshakeError::UnknownExport { name: export.to_owned(), names: Vec::new() }
            }
            e => e,
        };
        let size = self.u64().map_err(refused)?;
        let flags = self.u16()?;
        if !self.no_zeroes {
            self.array::<124>()?;
        }
        Ok(Settings { size, flags, ..settings })
    }

    /// Makes the error about an export that the server does not have, with the names of others.
    fn unknown(&mut self, export: &str) -> HandshakeError {
        let names = self.list().unwrap_or_default();
        let _ = self.send(OPT_ABORT, &[]);
        HandshakeError::UnknownExport { name: export.to_owned(), names }
    }

    /// Asks for the names of exports. Returns the first few.
    fn list(&mut self) -> Result<Vec<String>> {
        self.send(OPT_LIST, &[])?;
        let mut names = Vec::new();
        for _ in 0..REPLIES_MAX {
            let reply = self.reply(OPT_LIST)?;
            if reply.kind != REP_SERVER {
                break;
            }
            let len = usize::try_from(reply.u32(0)?).unwrap_or(usize::MAX).min(STRING_BYTES_MAX);
            let name = reply.data.get(4..).and_then(|rest| rest.get(..len)).unwrap_or_default();
            if names.len() < NAMES_MAX && name.len() < 256 {
                names.push(String::from_utf8_lossy(name).into_owned());
            }
        }
        Ok(names)
    }
}

/// Returns a string of the protocol: its length, and its bytes.
fn text(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes()[..], text.as_bytes()].concat()
}

/// Checks block sizes (proto, "Block size constraints").
fn checked(blocks: BlockSizes) -> Result<BlockSizes> {
    let BlockSizes { minimum, preferred, maximum } = blocks;
    let right = minimum.is_power_of_two()
        && minimum <= MINIMUM_MAX
        && preferred.is_power_of_two()
        && preferred >= minimum
        && maximum >= minimum
        && (maximum == u32::MAX || maximum.is_multiple_of(minimum));
    if !right {
        return Err(HandshakeError::Protocol("block sizes that contradict each other"));
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests;
