//! Frames of many flows that identify themselves: UDP over IPv4, checked completely in a few
//! nanoseconds.
//!
//! A frame has 42 bytes of headers, 16 bytes with flow and number, and a piece of a table that both
//! ends have. Flow and number determine the position in the table. So a checksum is two look-ups,
//! and the check of a frame is one comparison.
//!
//! The two directions of a flow have their addresses and ports exchanged, so that a switch or a tap
//! treats them as one flow. A frame whose ends are exchanged is a frame of the other direction.

use std::sync::LazyLock;

use crate::error::{Result, fail};
use crate::verify::mix;

/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
/// Bytes at the start of each frame: headers, flow and number.
pub const HEAD: usize = HEADERS + 16;
/// The shortest frame, without the checksum that the hardware adds.
pub const LEN_MIN: usize = 60;
/// The longest frame: IPv4's limit behind an Ethernet header.
pub const LEN_MAX: usize = 65535 + 14;
/// The longest frame of an interface with the usual MTU of 1500.
pub const LEN_PLAIN: usize = 1514;
/// Most flows. Each has a port that no service uses.
pub const FLOWS_MAX: u16 = 4096;
/// Offset in the frame at which the checksummed range starts (`csum_start`).
pub const CSUM_START: u16 = 34;
/// Offset of the checksum field from [`CSUM_START`] (`csum_offset`).
pub const CSUM_OFFSET: u16 = 6;
/// UDP payload of a segment of a frame that the device cuts. It fits an MTU of 1500.
pub const SEGMENT: u16 = 1448;

/// First bytes of the UDP payload.
const MAGIC: u32 = 0x7673_6E62;
/// The guest's end and the host's. The addresses are unused elsewhere, so that a host drops the
/// frames.
const GUEST: Endpoint = Endpoint { mac: [2, 0x76, 0x73, 0, 0, 1], ip: [10, 9, 0, 2] };
const HOST: Endpoint = Endpoint { mac: [2, 0x76, 0x73, 0, 0, 2], ip: [10, 9, 0, 1] };
/// Ports: the flow's own at the guest's end, and that of the discard service at the host's end.
const PORT_BASE: u16 = 1024;
const PORT_HOST: u16 = 9;
/// Positions in the table at which a frame's bytes may start, in steps of two.
const SHIFTS: usize = 128;

struct Endpoint {
    mac: [u8; 6],
    ip: [u8; 4],
}

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest.
    Out,
    /// To the guest.
    In,
}

/// The identity of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// A number of the run that sent it, so that frames of other runs are recognized.
    pub run: u16,
    /// Its flow, below [`FLOWS_MAX`].
    pub flow: u16,
    /// Its number within the flow, from 0.
    pub number: u64,
}

/// The error of a frame of this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Bytes differ, from this one on.
    Bytes(usize),
    /// Its checksum is wrong.
    Checksum,
}

/// Bytes that fill frames, and the sums of the 16-bit words before each of them.
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
    /// Returns the bytes of a frame behind its [`HEAD`], and the sum of their words.
    #[inline]
    fn tail(&self, mark: Mark, len: usize) -> (&[u8], u64) {
        let first = (mark.number ^ u64::from(mark.flow) << 3) as usize % SHIFTS;
        let bytes = &self.bytes[2 * first..2 * first + len - HEAD];
        let words = bytes.len() / 2;
        let odd = if bytes.len() % 2 == 1 { u64::from(bytes[bytes.len() - 1]) << 8 } else { 0 };
        (bytes, self.sums[first + words] - self.sums[first] + odd)
    }
}

/// Folds a sum of 16-bit words to the Internet checksum, without the complement.
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
pub struct MarkedFrame {
    /// Headers and identity.
    pub head: [u8; HEAD],
    /// The bytes behind the head.
    pub tail: &'static [u8],
}

impl MarkedFrame {
    /// Makes the frame of `len` bytes with the identity `mark`. `partial`: its UDP checksum covers
    /// only the pseudo header, and the device completes it.
    ///
    /// # Panics
    /// The length is invalid.
    #[inline]
    pub fn new(direction: Direction, mark: Mark, len: usize, partial: bool) -> Self {
        assert!((LEN_MIN..=LEN_MAX).contains(&len), "a frame of {len} bytes");
        let (from, to) = if direction == Direction::Out { (&GUEST, &HOST) } else { (&HOST, &GUEST) };
        let port = PORT_BASE + mark.flow;
        let ports = if direction == Direction::Out { [port, PORT_HOST] } else { [PORT_HOST, port] };
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
            // Zero would mean that there is no checksum.
            false => match !fold(pseudo + words(&head[34..HEAD]) + tail_sum) {
                0 => 0xFFFF,
                sum => sum,
            },
        };
        head[40..42].copy_from_slice(&sum.to_be_bytes());
        Self { head, tail }
    }

    /// Writes the frame to `bytes`, which have its length.
    pub fn write(&self, bytes: &mut [u8]) {
        bytes[..HEAD].copy_from_slice(&self.head);
        bytes[HEAD..].copy_from_slice(self.tail);
    }
}

/// Returns the identity in the start of a frame, if it is a frame of this program. It checks
/// nothing else.
#[inline]
pub fn read_mark(head: &[u8]) -> Option<Mark> {
    if head.len() < HEAD || head[12..14] != [8, 0] || head[42..46] != MAGIC.to_be_bytes() {
        return None;
    }
    let flow = u16::from_be_bytes([head[48], head[49]]);
    let number = u64::from_be_bytes(head[50..58].try_into().ok()?);
    (flow < FLOWS_MAX).then_some(Mark { run: u16::from_be_bytes([head[46], head[47]]), flow, number })
}

/// Checks that a frame with the identity `mark` is unchanged, except for its Ethernet addresses.
/// `partial`: its checksum is not complete yet.
///
/// # Errors
/// The difference.
pub fn check(frame: &[u8], mark: Mark, partial: bool) -> std::result::Result<(), Wrong> {
    if frame.len() < LEN_MIN || frame.len() > LEN_MAX {
        return Err(Wrong::Bytes(frame.len().min(LEN_MAX)));
    }
    let direction = if frame[26..30] == GUEST.ip { Direction::Out } else { Direction::In };
    let want = MarkedFrame::new(direction, mark, frame.len(), partial);
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

/// Exchanges the ends of a frame in place, which makes it a frame of the other direction. Its
/// checksums stay correct.
///
/// # Panics
/// The frame is shorter than [`HEAD`].
pub fn send_back(frame: &mut [u8]) {
    let (to, rest) = frame.split_at_mut(6);
    to.swap_with_slice(&mut rest[..6]);
    let (from, to) = frame[26..34].split_at_mut(4);
    from.swap_with_slice(to);
    let (from, to) = frame[34..38].split_at_mut(2);
    from.swap_with_slice(to);
}

/// The lengths of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All frames have this length.
    Fixed(usize),
    /// The Internet's mix, simple form: 7 of 64 bytes, 4 of 594, 1 of 1514.
    Imix,
    /// Any length from the first to the second.
    Range(usize, usize),
}

impl Sizes {
    /// Parses `64`, `imix` or `60-1514`.
    ///
    /// # Errors
    /// The text is none of these. The error is a message.
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

    /// Returns the bytes of frame `number`.
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

    /// Returns the bytes of the longest frame.
    pub fn max(&self) -> usize {
        match *self {
            Self::Fixed(len) => len,
            Self::Imix => LEN_PLAIN,
            Self::Range(_, to) => to,
        }
    }

    /// Returns the text that [`Sizes::parse`] takes.
    pub fn name(&self) -> String {
        match self {
            Self::Fixed(len) => len.to_string(),
            Self::Imix => "imix".into(),
            Self::Range(from, to) => format!("{from}-{to}"),
        }
    }
}

/// Checks the number of flows.
///
/// # Errors
/// It is 0, or too large.
pub fn check_flows(flows: u16) -> Result<()> {
    match (1..=FLOWS_MAX).contains(&flows) {
        true => Ok(()),
        false => Err(fail!(Usage, "--flows {flows}: 1 to {FLOWS_MAX} can be told apart")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(direction: Direction, mark: Mark, len: usize, partial: bool) -> Vec<u8> {
        let mut bytes = vec![0; len];
        MarkedFrame::new(direction, mark, len, partial).write(&mut bytes);
        bytes
    }

    /// Computes the checksum of RFC 768 byte by byte.
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
            for direction in [Direction::Out, Direction::In] {
                let frame = whole(direction, mark, len, false);
                assert!(udp_is_right(&frame) && fold(words(&frame[14..34])) == 0xFFFF, "{len}");
                assert_eq!(read_mark(&frame), Some(mark));
                assert_eq!(check(&frame, mark, false), Ok(()));
                assert_eq!(check(&frame, mark, true), Err(Wrong::Checksum));
                let partial = whole(direction, mark, len, true);
                assert_eq!(check(&partial, mark, true), Ok(()));
            }
        }
    }

    #[test]
    fn damage_is_seen() {
        let mark = Mark { run: 1, flow: 2, number: 3 };
        for at in [13, 20, 45, 70, 776] {
            let mut frame = whole(Direction::In, mark, 777, false);
            frame[at] ^= 1;
            let seen = read_mark(&frame).map(|mark| check(&frame, mark, false));
            assert!(!matches!(seen, Some(Ok(()))), "byte {at}");
        }
        let frame = whole(Direction::In, mark, 777, false);
        assert!(check(&frame[..700], mark, false).is_err());
    }

    #[test]
    fn what_is_sent_back_is_the_frame_of_the_other_way() {
        let mark = Mark { run: 1, flow: 2, number: 3 };
        for partial in [false, true] {
            let mut frame = whole(Direction::In, mark, 200, partial);
            send_back(&mut frame);
            assert_eq!(frame, whole(Direction::Out, mark, 200, partial));
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
