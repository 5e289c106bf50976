//! VLANs of a port: which one a frame that comes in belongs to, and whether it goes out with a tag (IEEE 802.1Q, 6.9 and 8.6).
//!
//! | port | takes | gives |
//! | --- | --- | --- |
//! | neither `vlan` nor `trunk` | everything, tags are payload | to such ports only, as it is |
//! | `vlan=N` | untagged and priority-tagged frames, as VLAN N | frames of VLAN N, untagged |
//! | `trunk=L` | frames tagged with a VLAN of L | frames of these VLANs, tagged |
//! | both | both | both; N is the native VLAN |
//!
//! Frames are tagged by 802.1Q tags (0x8100). A port with VLANs drops frames that begin with another kind of tag: what it
//! would mean to the network behind an uplink is not known here. For the same reason no frame leaves untagged that has a
//! second tag behind the one that is removed: the next switch would take that one for the frame's VLAN.

use vshunt_types::spec::Vlans;

use super::frame::{ETH_VLAN, is_tag, word_at};

/// The VLAN of frames between ports without VLANs.
pub const NO_VLAN: u16 = 0;
/// Bits of a tag that say the VLAN; the others are priority and drop eligibility.
pub(super) const VLAN_BITS: u16 = 0xFFF;
/// Bytes of both addresses, and of a tag.
const ADDRESSES: usize = 12;
const TAG: usize = 4;
/// Bytes of a frame that are sent out of the sender's copy: addresses, two tags, EtherType.
const START: usize = ADDRESSES + 2 * TAG + 2;

/// The VLANs of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Lan {
    /// It has none.
    #[default]
    Plain,
    /// It has these.
    Vlans {
        /// The one whose frames are untagged.
        native: Option<u16>,
        /// Those whose frames are tagged.
        tagged: Vlans,
    },
}

/// How a frame leaves a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Without a tag; on ports without VLANs as it came.
    Bare,
    /// With the tag of its VLAN.
    Tagged,
}

impl Lan {
    /// As options say.
    pub fn new(vlan: Option<u16>, trunk: Option<&Vlans>) -> Self {
        match (vlan, trunk) {
            (None, None) => Self::Plain,
            (native, tagged) => Self::Vlans { native, tagged: tagged.cloned().unwrap_or_default() },
        }
    }

    /// The VLAN of a frame that comes in and begins with `first`; none if the port does not take it.
    pub(super) fn admits(&self, first: &[u8]) -> Option<u16> {
        let Self::Vlans { native, tagged } = self else { return Some(NO_VLAN) };
        let kind = word_at(first, ADDRESSES)?;
        if !is_tag(kind) {
            return *native;
        }
        // An EtherType has to follow.
        let tag = word_at(first, ADDRESSES + 2).filter(|_| first.len() >= ADDRESSES + TAG + 2)?;
        match (kind, tag & VLAN_BITS) {
            (ETH_VLAN, 0) => *native,
            (ETH_VLAN, vlan) => tagged.has(vlan).then_some(vlan),
            _ => None,
        }
    }

    /// Whether frames of a VLAN leave by the port, and how.
    #[inline]
    pub(super) fn form(&self, vlan: u16) -> Option<Form> {
        match self {
            Self::Plain => (vlan == NO_VLAN).then_some(Form::Bare),
            Self::Vlans { native, .. } if *native == Some(vlan) => Some(Form::Bare),
            Self::Vlans { tagged, .. } => tagged.has(vlan).then_some(Form::Tagged),
        }
    }

    /// Whether a frame can go from the one to the other.
    pub(super) fn meets(&self, other: &Self) -> bool {
        match self {
            Self::Plain => *other == Self::Plain,
            Self::Vlans { native, tagged } => {
                native.iter().copied().chain(tagged.iter()).any(|vlan| other.form(vlan).is_some())
            }
        }
    }
}

/// The first bytes of a frame as it leaves, in memory of the queue that sends it: what was checked is what is sent, whatever
/// the guest writes to its own memory meanwhile. A cache line of its own: receivers read one while the sender writes the next.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Start {
    bare: [u8; START],
    tagged: [u8; START + TAG],
    /// Bytes of the frame, as it came, that these stand for.
    taken: u8,
    bare_len: u8,
    /// 0 where there is no tagged form.
    tagged_len: u8,
    /// A tag follows the one that is removed.
    inner_tag: bool,
}

impl Default for Start {
    fn default() -> Self {
        let (bare, tagged) = ([0; START], [0; START + TAG]);
        Self { bare, tagged, taken: 0, bare_len: 0, tagged_len: 0, inner_tag: false }
    }
}

impl Start {
    /// Of a frame that begins with `first`, which a port admitted to a VLAN.
    pub fn new(first: &[u8], vlan: u16) -> Self {
        let mut start = Self::default();
        let first = &first[..first.len().min(START)];
        start.taken = first.len() as u8;
        if vlan == NO_VLAN {
            start.bare[..first.len()].copy_from_slice(first);
            start.bare_len = start.taken;
            return start;
        }
        let (addresses, rest) = first.split_at(ADDRESSES);
        // Of other tags there are none: see `admits`.
        let (tag, rest) = match word_at(rest, 0) {
            Some(ETH_VLAN) => (word_at(rest, 2).unwrap_or(0) & !VLAN_BITS, &rest[TAG..]),
            _ => (0, rest),
        };
        let mut len = 0;
        for part in [addresses, &ETH_VLAN.to_be_bytes(), &(tag | vlan).to_be_bytes(), rest] {
            start.tagged[len..len + part.len()].copy_from_slice(part);
            len += part.len();
        }
        start.tagged_len = len as u8;
        start.bare_len = (len - TAG) as u8;
        start.bare[..ADDRESSES].copy_from_slice(addresses);
        start.bare[ADDRESSES..len - TAG].copy_from_slice(rest);
        start.inner_tag = word_at(rest, 0).is_some_and(is_tag);
        start
    }

    /// Makes it that of another frame, as [`new`](Self::new) does. Of ports without VLANs that is one copy, in place.
    #[inline]
    pub fn set(&mut self, first: &[u8], vlan: u16) {
        match first.first_chunk() {
            Some(whole) if vlan == NO_VLAN => {
                self.bare = *whole;
                (self.taken, self.bare_len) = (START as u8, START as u8);
                (self.tagged_len, self.inner_tag) = (0, false);
            }
            _ => *self = Self::new(first, vlan),
        }
    }

    /// Bytes of the frame, as it came, that it stands for.
    #[inline]
    pub fn taken(&self) -> usize {
        self.taken.into()
    }

    /// Whether the frame can leave in this form.
    #[inline]
    pub fn has(&self, form: Form) -> bool {
        form == Form::Tagged || !self.inner_tag
    }

    /// The bytes in one form.
    #[inline]
    pub fn bytes(&self, form: Form) -> &[u8] {
        match form {
            Form::Bare => &self.bare[..self.bare_len.into()],
            Form::Tagged => &self.tagged[..self.tagged_len.into()],
        }
    }

    /// Bytes by which the frame is longer in this form than it came.
    #[inline]
    pub fn longer(&self, form: Form) -> isize {
        self.bytes(form).len() as isize - self.taken() as isize
    }
}
