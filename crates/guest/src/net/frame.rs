//! Frames of many flows that say which they are: UDP over IPv4, whole and checked in a few nanoseconds.
//!
//! A frame is 42 bytes of headers, 16 that say flow and number, and a piece of a table that both ends have, from a place
//! that follows from flow and number. So a checksum is two look-ups, and whether a frame is whole one comparison.
//!
//! The two ways of a flow have each other's addresses and ports, so that a switch or a tap knows them for one flow; a
//! frame that is sent back with both exchanged is the frame of the other way.

use std::sync::LazyLock;

use crate::error::{Result, fail};
use crate::verify::mix;

/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
/// What each frame begins with: headers, and what it says of itself.
pub const HEAD: usize = HEADERS + 16;
/// The shortest frame, without the checksum that hardware adds.
pub const LEN_MIN: usize = 60;
/// The longest frame: IPv4's limit behind an Ethernet header.
pub const LEN_MAX: usize = 65535 + 14;
/// The longest frame of an interface with the usual MTU of 1500.
pub const LEN_PLAIN: usize = 1514;
/// Flows at most: as many ports as are surely free of a meaning.
pub const FLOWS_MAX: u16 = 4096;
/// Where a virtio-net header has a checksum begin and end up.
pub const CSUM_START: u16 = 34;
/// See [`CSUM_START`].
pub const CSUM_OFFSET: u16 = 6;
/// UDP payload of a segment of a frame that the device is to cut (a length that any MTU of 1500 takes).
pub const SEGMENT: u16 = 1448;

/// First bytes of the UDP payload.
const MAGIC: u32 = 0x7673_6E62;
/// The guest's end and the host's: nobody's addresses, so that a host drops what it gets.
const GUEST: End = End { mac: [2, 0x76, 0x73, 0, 0, 1], ip: [10, 9, 0, 2] };
const HOST: End = End { mac: [2, 0x76, 0x73, 0, 0, 2], ip: [10, 9, 0, 1] };
/// Ports: a flow's own at the guest's end, discard's at the host's.
const PORT_BASE: u16 = 1024;
const PORT_HOST: u16 = 9;
/// Places in the table that a frame's bytes may begin at, in steps of two.
const SHIFTS: usize = 128;

struct End {
    mac: [u8; 6],
    ip: [u8; 4],
}

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the guest.
    Out,
    /// To the guest.
    In,
}

/// What a frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// A number of the run that sent it, so that none is taken for another's.
    pub run: u16,
    /// Its flow, below [`FLOWS_MAX`].
    pub flow: u16,
    /// Its number within the flow, from 0.
    pub number: u64,
}

/// What is wrong with a frame of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Bytes are not as they were sent, from this one on.
    Bytes(usize),
    /// Its checksum is not that of its bytes.
    Checksum,
}

/// Bytes that frames are filled with, and the sums of the 16-bit words before each of them.
struct Table {
    bytes: Vec<u8>,
    sums: Vec<u64>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let words = LEN_MAX.div_ceil(2) + SHIFTS;
    let mut table = Table { bytes: Vec::with_capacity(words * 2), sums: Vec::with_capacity(words + 1) };
    let mut sum = 0;
    for at in 0..words as u64 {
        let word = mix(at) as u16;
        table.bytes.extend_from_slice(&word.to_be_bytes());
        table.sums.push(sum);
        sum += u64::from(word);
    }
    table.sums.push(sum);
    table
});

impl Table {
    /// The bytes of a frame behind its [`HEAD`], and the sum of their words.
    #[inline]
    fn tail(&self, mark: Mark, len: usize) -> (&[u8], u64) {
        let first = (mark.number ^ u64::from(mark.flow) << 3) as usize % SHIFTS;
        let bytes = &self.bytes[2 * first..2 * first + len - HEAD];
        let words = bytes.len() / 2;
        let odd = if bytes.len() % 2 == 1 { u64::from(bytes[bytes.len() - 1]) << 8 } else { 0 };
        (bytes, self.sums[first + words] - self.sums[first] + odd)
    }
}

/// A sum of 16-bit words as the Internet's checksum has it, not complemented.
#[inline]
fn fold(mut sum: u64) -> u16 {
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    sum as u16
}

#[inline]
fn words(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(2).map(|w| u64::from(u16::from_be_bytes([w[0], w[1]]))).sum()
}

/// A frame in two pieces.
pub struct Frame {
    /// Headers and mark.
    pub head: [u8; HEAD],
    /// All behind that.
    pub tail: &'static [u8],
}

impl Frame {
    /// The frame of `len` bytes that says `mark`. `partial`: its UDP checksum is that of the pseudo header alone, for the
    /// device to finish.
    ///
    /// # Panics
    /// A length that is none: a programmer's mistake.
    #[inline]
    pub fn new(way: Way, mark: Mark, len: usize, partial: bool) -> Self {
        assert!((LEN_MIN..=LEN_MAX).contains(&len), "a frame of {len} bytes");
        let (from, to) = if way == Way::Out { (&GUEST, &HOST) } else { (&HOST, &GUEST) };
        let port = PORT_BASE + mark.flow;
        let ports = if way == Way::Out { [port, PORT_HOST] } else { [PORT_HOST, port] };
        let (ip_len, udp_len) = ((len - 14) as u16, (len - 34) as u16);
        let (tail, tail_sum) = TABLE.tail(mark, len);
        let mut head = [0; HEAD];
        head[..6].copy_from_slice(&to.mac);
        head[6..12].copy_from_slice(&from.mac);
        head[12..16].copy_from_slice(&[8, 0, 0x45, 0]);
        head[16..18].copy_from_slice(&ip_len.to_be_bytes());
        // Don't fragment; 64 hops; UDP.
        head[20..24].copy_from_slice(&[0x40, 0, 64, 17]);
        head[26..30].copy_from_slice(&from.ip);
        head[30..34].copy_from_slice(&to.ip);
        let ip_sum = !fold(words(&head[14..34]));
        head[24..26].copy_from_slice(&ip_sum.to_be_bytes());
        head[34..36].copy_from_slice(&ports[0].to_be_bytes());
        head[36..38].copy_from_slice(&ports[1].to_be_bytes());
        head[38..40].copy_from_slice(&udp_len.to_be_bytes());
        head[42..46].copy_from_slice(&MAGIC.to_be_bytes());
        head[46..48].copy_from_slice(&mark.run.to_be_bytes());
        head[48..50].copy_from_slice(&mark.flow.to_be_bytes());
        head[50..58].copy_from_slice(&mark.number.to_be_bytes());
        let pseudo = words(&head[26..34]) + 17 + u64::from(udp_len);
        let sum = match partial {
            true => fold(pseudo),
            // Zero would say that there is none.
            false => match !fold(pseudo + words(&head[34..HEAD]) + tail_sum) {
                0 => 0xFFFF,
                sum => sum,
            },
        };
        head[40..42].copy_from_slice(&sum.to_be_bytes());
        Self { head, tail }
    }

    /// Puts it into `bytes`, which are as long as it is.
    pub fn write(&self, bytes: &mut [u8]) {
        bytes[..HEAD].copy_from_slice(&self.head);
        bytes[HEAD..].copy_from_slice(self.tail);
    }
}

/// What the beginning of a frame says, if it is one of ours. Nothing else is looked at.
#[inline]
pub fn read_mark(head: &[u8]) -> Option<Mark> {
    if head.len() < HEAD || head[12..14] != [8, 0] || head[42..46] != MAGIC.to_be_bytes() {
        return None;
    }
    let flow = u16::from_be_bytes([head[48], head[49]]);
    let number = u64::from_be_bytes(head[50..58].try_into().ok()?);
    (flow < FLOWS_MAX).then_some(Mark { run: u16::from_be_bytes([head[46], head[47]]), flow, number })
}

/// Whether a frame that says `mark` is as it was sent, but for its Ethernet addresses. `partial`: whoever gave it says that
/// its checksum is still to be computed.
///
/// # Errors
/// What is wrong.
pub fn check(frame: &[u8], mark: Mark, partial: bool) -> std::result::Result<(), Wrong> {
    if frame.len() < LEN_MIN || frame.len() > LEN_MAX {
        return Err(Wrong::Bytes(frame.len().min(LEN_MAX)));
    }
    let way = if frame[26..30] == GUEST.ip { Way::Out } else { Way::In };
    let want = Frame::new(way, mark, frame.len(), partial);
    let same = |range: std::ops::Range<usize>| match frame[range.clone()] == want.head[range.clone()] {
        true => Ok(()),
        false => Err(Wrong::Bytes(range.start)),
    };
    same(12..40)?;
    same(42..HEAD)?;
    if &frame[HEAD..] != want.tail {
        let at = frame[HEAD..].iter().zip(want.tail).position(|(a, b)| a != b);
        return Err(Wrong::Bytes(HEAD + at.unwrap_or(0)));
    }
    match frame[40..42] == want.head[40..42] {
        true => Ok(()),
        false => Err(Wrong::Checksum),
    }
}

/// Exchanges the ends of a frame of ours, in place: the frame of the other way. Its checksums stay right.
///
/// # Panics
/// It is shorter than [`HEAD`].
pub fn send_back(frame: &mut [u8]) {
    let (to, rest) = frame.split_at_mut(6);
    to.swap_with_slice(&mut rest[..6]);
    let (from, to) = frame[26..34].split_at_mut(4);
    from.swap_with_slice(to);
    let (from, to) = frame[34..38].split_at_mut(2);
    from.swap_with_slice(to);
}

/// How long frames are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All alike.
    Fixed(usize),
    /// The Internet's mix, simple form: 7 of 64 bytes, 4 of 594, 1 of 1514.
    Imix,
    /// Anything from the first to the second.
    Range(usize, usize),
}

impl Sizes {
    /// `64`, `imix` or `60-1514`.
    ///
    /// # Errors
    /// It is none of these, in words.
    pub fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text.parse() {
            Ok(len) if (LEN_MIN..=LEN_MAX).contains(&len) => Ok(len),
            _ => Err(format!(
                "{text:?}: a frame has {LEN_MIN} to {LEN_MAX} bytes; sizes are a number, imix, or 60-1514"
            )),
        };
        match text.split_once('-') {
            _ if text == "imix" => Ok(Self::Imix),
            Some((from, to)) => match (number(from)?, number(to)?) {
                (from, to) if from <= to => Ok(Self::Range(from, to)),
                _ => Err(format!("{text:?}: the first is the larger one")),
            },
            None => number(text).map(Self::Fixed),
        }
    }

    /// Bytes of the `number`th frame.
    #[inline]
    pub fn len(&self, number: u64) -> usize {
        match *self {
            Self::Fixed(len) => len,
            Self::Imix => match mix(number) % 12 {
                0..7 => 64,
                7..11 => 594,
                _ => LEN_PLAIN,
            },
            Self::Range(from, to) => from + (mix(number) % (to - from + 1) as u64) as usize,
        }
    }

    /// Bytes of the longest.
    pub fn max(&self) -> usize {
        match *self {
            Self::Fixed(len) => len,
            Self::Imix => LEN_PLAIN,
            Self::Range(_, to) => to,
        }
    }

    /// As it is asked for.
    pub fn name(&self) -> String {
        match self {
            Self::Fixed(len) => len.to_string(),
            Self::Imix => "imix".into(),
            Self::Range(from, to) => format!("{from}-{to}"),
        }
    }
}

/// An error unless so many flows can be.
///
/// # Errors
/// They cannot.
pub fn check_flows(flows: u16) -> Result<()> {
    match (1..=FLOWS_MAX).contains(&flows) {
        true => Ok(()),
        false => Err(fail!(Usage, "--flows {flows}: 1 to {FLOWS_MAX} can be told apart")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(way: Way, mark: Mark, len: usize, partial: bool) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Frame::new(way, mark, len, partial).write(&mut bytes);
        bytes
    }

    /// The checksum as RFC 768 has it, byte by byte.
    fn udp_is_right(frame: &[u8]) -> bool {
        let mut bytes = frame[26..34].to_vec();
        bytes.extend([0, 17]);
        bytes.extend_from_slice(&frame[38..40]);
        bytes.extend_from_slice(&frame[34..]);
        if bytes.len() % 2 == 1 {
            bytes.push(0);
        }
        fold(words(&bytes)) == 0xFFFF
    }

    #[test]
    fn checksums_are_right_and_frames_are_known_again() {
        for (number, len) in (0u64..).zip([60, 61, 64, 1500, 1513, 1514, 9000, LEN_MAX - 1, LEN_MAX]) {
            let mark = Mark { run: 7, flow: (number * 455) as u16, number: number << 40 };
            for way in [Way::Out, Way::In] {
                let frame = whole(way, mark, len, false);
                assert!(udp_is_right(&frame) && fold(words(&frame[14..34])) == 0xFFFF, "{len}");
                assert_eq!(read_mark(&frame), Some(mark));
                assert_eq!(check(&frame, mark, false), Ok(()));
                assert_eq!(check(&frame, mark, true), Err(Wrong::Checksum));
                let partial = whole(way, mark, len, true);
                assert_eq!(check(&partial, mark, true), Ok(()));
            }
        }
    }

    #[test]
    fn damage_is_seen() {
        let mark = Mark { run: 1, flow: 2, number: 3 };
        for at in [13, 20, 45, 70, 776] {
            let mut frame = whole(Way::In, mark, 777, false);
            frame[at] ^= 1;
            let seen = read_mark(&frame).map(|mark| check(&frame, mark, false));
            assert!(!matches!(seen, Some(Ok(()))), "byte {at}");
        }
        let frame = whole(Way::In, mark, 777, false);
        assert!(check(&frame[..700], mark, false).is_err());
    }

    #[test]
    fn what_is_sent_back_is_the_frame_of_the_other_way() {
        let mark = Mark { run: 1, flow: 2, number: 3 };
        for partial in [false, true] {
            let mut frame = whole(Way::In, mark, 200, partial);
            send_back(&mut frame);
            assert_eq!(frame, whole(Way::Out, mark, 200, partial));
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(Sizes::parse("64"), Ok(Sizes::Fixed(64)));
        assert_eq!(Sizes::parse("60-1514"), Ok(Sizes::Range(60, 1514)));
        assert_eq!(Sizes::parse("imix"), Ok(Sizes::Imix));
        for wrong in ["59", "70000", "100-60", "small", "60-", ""] {
            assert!(Sizes::parse(wrong).is_err(), "{wrong}");
        }
        let mean = (0..12_000).map(|n| Sizes::Imix.len(n)).sum::<usize>() / 12_000;
        assert!((330..400).contains(&mean), "{mean}");
        assert!((0..1000).map(|n| Sizes::Range(60, 70).len(n)).all(|len| (60..=70).contains(&len)));
        assert!(check_flows(0).is_err() && check_flows(FLOWS_MAX).is_ok());
    }
}
