//! The handshake of a server (proto, "Fixed newstyle negotiation", "Option types").
//!
//! It takes one option after the other, and only when the client has taken the answers to the one
//! before. So a client that sends options and does not read costs one buffer.

use crate::wire::*;
use crate::{BlockSizes, Headers, STRING_BYTES_MAX, Violation, transmission_flag};

use super::ALLOCATION;

/// Most bytes of the data of an option. The longest name and some hundred context names fit.
pub const OPTION_BYTES_MAX: usize = 64 << 10;
/// Bytes of the header of an option.
const OPTION_HEADER: usize = 16;
/// Most options in one handshake. A client needs about ten.
const OPTIONS_MAX: u32 = 1000;
/// Largest alignment that a client may assume without asking for the block sizes (proto, "Block
/// size constraints").
const MINIMUM_UNASKED: u32 = 512;
const _: () = assert!(OPTION_BYTES_MAX > 2 * STRING_BYTES_MAX);

/// What a server offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The name of the export. The empty name means it, too.
    pub name: String,
    /// Size, bytes.
    pub size: u64,
    /// Bits of [`transmission_flag`], without `SEND_DF`, which depends on the handshake.
    pub flags: u16,
    /// The block sizes.
    pub blocks: BlockSizes,
    /// Names of the metadata contexts.
    pub contexts: Vec<String>,
    /// Why no client can begin now, if none can: a sentence for the client.
    pub refusal: Option<String>,
}

impl Offer {
    /// Returns the transmission flags for a form of replies.
    fn flags(&self, headers: Headers) -> u16 {
        match headers {
            Headers::Simple => self.flags,
            Headers::Structured | Headers::Extended => self.flags | transmission_flag::SEND_DF,
        }
    }

    fn has_name(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// What client and server have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The form of requests and replies.
    pub headers: Headers,
    /// The names of the contexts that the client chose. The id of each is its index.
    pub contexts: Vec<String>,
}

/// How a handshake stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The client has something to send, or answers to read.
    More,
    /// What is left of the output is to be sent, then the client begins TLS. The handshake
    /// continues within it, after [`Negotiation::secured`].
    StartTls,
    /// It is complete: what is left of [`Negotiation::output`] is to be sent, then requests come.
    Ready(Agreed),
    /// It is over without requests. What is left of the output is to be sent before the end.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    ClientFlags,
    Options,
    /// TLS begins. Nothing more is read before.
    Tls,
    /// Nothing more is read.
    Over,
}

/// Whether a handshake uses TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Security {
    /// The server has no TLS.
    Absent,
    /// The client has to begin TLS before any other option is answered (proto, "FORCEDTLS mode").
    Required,
    /// TLS is in use.
    InUse,
}

/// A handshake with one client.
#[derive(Debug)]
pub struct Negotiation {
    phase: Phase,
    security: Security,
    input: Vec<u8>,
    output: Vec<u8>,
    headers: Headers,
    no_zeroes: bool,
    contexts: Vec<String>,
    options: u32,
    refused: bool,
}

impl Default for Negotiation {
    fn default() -> Self {
        Self::new()
    }
}

impl Negotiation {
    /// Begins a handshake without TLS. The output is the greeting.
    pub fn new() -> Self {
        Self::with(Security::Absent)
    }

    /// Begins a handshake of which nothing but its end is possible before TLS.
    pub fn with_tls() -> Self {
        Self::with(Security::Required)
    }

    fn with(security: Security) -> Self {
        let flags = FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES;
        let greeting = [&INIT_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()];
        Self {
            phase: Phase::ClientFlags,
            security,
            input: Vec::new(),
            output: greeting.concat(),
            headers: Headers::Simple,
            no_zeroes: false,
            contexts: Vec::new(),
            options: 0,
            refused: false,
        }
    }

    /// Returns what is to be sent.
    pub fn output(&self) -> &[u8] {
        &self.output
    }

    /// Takes note that the first `n` bytes of the output were sent.
    pub fn sent(&mut self, n: usize) {
        self.output.drain(..n.min(self.output.len()));
    }

    /// Returns whether the client asked for the export, and was answered with [`Offer::refusal`].
    pub fn was_refused(&self) -> bool {
        self.refused
    }

    /// Returns how many bytes may be received now: 0 while output is left.
    pub fn room(&self) -> usize {
        match self.output.is_empty() && !matches!(self.phase, Phase::Tls | Phase::Over) {
            true => (OPTION_HEADER + OPTION_BYTES_MAX).saturating_sub(self.input.len()),
            false => 0,
        }
    }

    /// Adds bytes of the client, at most [`room`](Self::room).
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// TLS has begun, after [`Progress::StartTls`]. What is received and sent from now on is
    /// inside.
    pub fn secured(&mut self) {
        (self.phase, self.security) = (Phase::Options, Security::InUse);
    }

    /// Returns the bytes that came after the handshake: requests.
    pub fn into_rest(self) -> Vec<u8> {
        self.input
    }

    /// Continues as far as the bytes of the client and the output allow.
    ///
    /// # Errors
    /// The client breaks the protocol. The connection is to be closed.
    pub fn step(&mut self, offer: &Offer) -> Result<Progress, Violation> {
        if self.phase == Phase::ClientFlags {
            let Some((flags, rest)) = self.input.split_first_chunk::<4>() else { return Ok(Progress::More) };
            let flags = u32::from_be_bytes(*flags);
            let rest = rest.to_vec();
            if flags & !u32::from(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES) != 0 {
                return Err(Violation("handshake flags that are not known"));
            }
            self.no_zeroes = flags & u32::from(FLAG_NO_ZEROES) != 0;
            self.input = rest;
            self.phase = Phase::Options;
        }
        while self.phase == Phase::Options && self.output.is_empty() {
            let Some((option, data)) = self.option()? else { return Ok(Progress::More) };
            self.options += 1;
            if self.options > OPTIONS_MAX {
                return Err(Violation("too many options"));
            }
            match self.answer(option, &data, offer) {
                Progress::More => {}
                // Only the client itself has what follows: others could have added this.
                Progress::StartTls if !self.input.is_empty() => {
                    return Err(Violation("something without TLS behind NBD_OPT_STARTTLS"));
                }
                Progress::StartTls => {
                    self.phase = Phase::Tls;
                    return Ok(Progress::StartTls);
                }
                end => {
                    self.phase = Phase::Over;
                    return Ok(end);
                }
            }
        }
        Ok(Progress::More)
    }

    /// Takes an option from the input, if all of it is there.
    fn option(&mut self) -> Result<Option<(u32, Vec<u8>)>, Violation> {
        let mut from = Bytes(&self.input);
        let (Some(magic), Some(option), Some(len)) = (from.u64(), from.u32(), from.u32()) else {
            return Ok(None);
        };
        if magic != OPTION_MAGIC {
            return Err(Violation("an option without its magic number"));
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if len > OPTION_BYTES_MAX {
            return Err(Violation("an option that is too long"));
        }
        let Some(data) = from.0.get(..len) else { return Ok(None) };
        let data = data.to_vec();
        self.input.drain(..OPTION_HEADER + len);
        Ok(Some((option, data)))
    }

    fn answer(&mut self, option: u32, data: &[u8], offer: &Offer) -> Progress {
        match option {
            OPT_ABORT => {
                self.reply(option, REP_ACK, &[]);
                return Progress::Over;
            }
            OPT_STARTTLS => return self.start_tls(data),
            // It has no answer for an error.
            OPT_EXPORT_NAME if self.security == Security::Required => return Progress::Over,
            _ if self.security == Security::Required => {
                self.refuse(option, REP_ERR_TLS_REQD, "this server requires TLS");
            }
            OPT_EXPORT_NAME => return self.export_name(data, offer),
            OPT_LIST if data.is_empty() => {
                self.reply(option, REP_SERVER, &text(offer.name.as_bytes()));
                self.reply(option, REP_ACK, &[]);
            }
            OPT_STRUCTURED_REPLY if data.is_empty() && self.headers == Headers::Extended => {
                self.refuse(option, REP_ERR_EXT_HEADER_REQD, "extended headers are in use");
            }
            OPT_STRUCTURED_REPLY | OPT_EXTENDED_HEADERS if data.is_empty() => {
                self.headers = match option {
                    OPT_EXTENDED_HEADERS => Headers::Extended,
                    _ => Headers::Structured,
                };
                self.reply(option, REP_ACK, &[]);
            }
            OPT_LIST | OPT_STRUCTURED_REPLY | OPT_EXTENDED_HEADERS => {
                self.refuse(option, REP_ERR_INVALID, "this option has no data");
            }
            OPT_INFO | OPT_GO => return self.info(option, data, offer),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.meta_context(option, data, offer),
            _ => self.refuse(option, REP_ERR_UNSUP, "this option is not known"),
        }
        Progress::More
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let head = [
            &REPLY_MAGIC.to_be_bytes()[..],
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &len.to_be_bytes(),
            data,
        ];
        head.iter().for_each(|part| self.output.extend_from_slice(part));
    }

    fn refuse(&mut self, option: u32, error: u32, why: &str) {
        self.reply(option, error, why.as_bytes());
    }

    fn start_tls(&mut self, data: &[u8]) -> Progress {
        let (error, why) = match self.security {
            Security::Absent => (REP_ERR_POLICY, "this export has no TLS"),
            Security::InUse => (REP_ERR_INVALID, "TLS is in use"),
            Security::Required if !data.is_empty() => (REP_ERR_INVALID, "this option has no data"),
            Security::Required => {
                self.reply(OPT_STARTTLS, REP_ACK, &[]);
                return Progress::StartTls;
            }
        };
        self.refuse(OPT_STARTTLS, error, why);
        Progress::More
    }

    /// The old option that ends the handshake. It has no answer for an error, so the connection
    /// is closed.
    fn export_name(&mut self, name: &[u8], offer: &Offer) -> Progress {
        if !offer.has_name(name) || offer.blocks.minimum > MINIMUM_UNASKED {
            return Progress::Over;
        }
        if offer.refusal.is_some() {
            self.refused = true;
            return Progress::Over;
        }
        self.output.extend_from_slice(&offer.size.to_be_bytes());
        self.output.extend_from_slice(&offer.flags(self.headers).to_be_bytes());
        if !self.no_zeroes {
            self.output.extend_from_slice(&[0; 124]);
        }
        self.ready()
    }

    fn ready(&mut self) -> Progress {
        Progress::Ready(Agreed { headers: self.headers, contexts: std::mem::take(&mut self.contexts) })
    }

    fn info(&mut self, option: u32, data: &[u8], offer: &Offer) -> Progress {
        let Some((name, wanted)) = parse_info(data) else {
            self.refuse(option, REP_ERR_INVALID, "the data of this option has another length");
            return Progress::More;
        };
        let blocks = offer.blocks;
        if !offer.has_name(name) {
            self.refuse(option, REP_ERR_UNKNOWN, "there is no export with this name");
            return Progress::More;
        }
        if blocks.minimum > MINIMUM_UNASKED && !wanted.contains(&INFO_BLOCK_SIZE) {
            self.refuse(option, REP_ERR_BLOCK_SIZE_REQD, "the export has larger blocks than 512 bytes");
            return Progress::More;
        }
        if let Some(why) = offer.refusal.as_deref().filter(|_| option == OPT_GO) {
            self.refused = true;
            self.refuse(option, REP_ERR_POLICY, why);
            return Progress::More;
        }
        let export = [
            &INFO_EXPORT.to_be_bytes()[..],
            &offer.size.to_be_bytes(),
            &offer.flags(self.headers).to_be_bytes(),
        ];
        self.reply(option, REP_INFO, &export.concat());
        if wanted.contains(&INFO_NAME) {
            self.reply(option, REP_INFO, &[&INFO_NAME.to_be_bytes()[..], offer.name.as_bytes()].concat());
        }
        let sizes = [
            &INFO_BLOCK_SIZE.to_be_bytes()[..],
            &blocks.minimum.to_be_bytes(),
            &blocks.preferred.to_be_bytes(),
            &blocks.maximum.to_be_bytes(),
        ];
        self.reply(option, REP_INFO, &sizes.concat());
        self.reply(option, REP_ACK, &[]);
        if option == OPT_GO { self.ready() } else { Progress::More }
    }

    /// Lists contexts, or chooses some. The answer names each context once, however often it was
    /// asked for.
    fn meta_context(&mut self, option: u32, data: &[u8], offer: &Offer) {
        if option == OPT_SET_META_CONTEXT {
            self.contexts.clear();
        }
        let Some((name, queries)) = parse_queries(data) else {
            return self.refuse(option, REP_ERR_INVALID, "the data of this option has another length");
        };
        if self.headers == Headers::Simple {
            return self.refuse(option, REP_ERR_INVALID, "structured replies come first");
        }
        if !offer.has_name(name) {
            return self.refuse(option, REP_ERR_UNKNOWN, "there is no export with this name");
        }
        let listed = option == OPT_LIST_META_CONTEXT;
        let chosen = |context: &&String| {
            let is = |query: &&[u8]| *query == context.as_bytes() || (listed && lists(query, context));
            (listed && queries.is_empty()) || queries.iter().any(is)
        };
        let chosen: Vec<String> = offer.contexts.iter().filter(chosen).cloned().collect();
        for (id, context) in (0u32..).zip(&chosen) {
            // The id of a context that is only listed has no meaning.
            let id = if listed { 0 } else { id };
            self.reply(option, REP_META_CONTEXT, &[&id.to_be_bytes()[..], context.as_bytes()].concat());
        }
        self.reply(option, REP_ACK, &[]);
        if !listed {
            self.contexts = chosen;
        }
    }
}

/// Returns whether a query of a list stands for a context: a name space (`base:`, `qemu:`) or the
/// bitmaps.
fn lists(query: &[u8], context: &str) -> bool {
    let spaces: &[&str] = match context {
        ALLOCATION => &["base:"],
        super::ALLOCATION_DEPTH => &["qemu:"],
        _ => &["qemu:", super::DIRTY_BITMAP],
    };
    spaces.iter().any(|space| space.as_bytes() == query)
}

/// Returns the name of the export and the wanted information.
fn parse_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut from = Bytes(data);
    let name = name(&mut from)?;
    let count = from.u16()?;
    let wanted: Option<Vec<_>> = (0..count).map(|_| from.u16()).collect();
    wanted.filter(|_| from.0.is_empty()).map(|wanted| (name, wanted))
}

/// Returns the name of the export and the queries.
fn parse_queries(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut from = Bytes(data);
    let name = name(&mut from)?;
    let count = from.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Ends with the data, which has a bound.
        queries.push(from.string().filter(|query| query.len() <= STRING_BYTES_MAX)?);
    }
    from.0.is_empty().then_some((name, queries))
}

fn name<'a>(from: &mut Bytes<'a>) -> Option<&'a [u8]> {
    from.string().filter(|name| name.len() <= STRING_BYTES_MAX)
}

/// Returns a string of the protocol: its length, and its bytes.
fn text(text: &[u8]) -> Vec<u8> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes()[..], text].concat()
}

#[cfg(test)]
mod tests;
