//! VLANs of a port: the VLAN of a frame that enters by the port, and whether a frame leaves with a
//! tag (IEEE 802.1Q, 6.9 and 8.6).
//!
//! | port | takes | gives |
//! | --- | --- | --- |
//! | neither `vlan` nor `trunk` | everything; tags are payload | to ports of the same kind only, unchanged |
//! | `vlan=N` | untagged and priority-tagged frames, as VLAN N | frames of VLAN N, untagged |
//! | `trunk=L` | frames tagged with a VLAN of L | frames of these VLANs, tagged |
//! | both | both | both; N is the native VLAN |
//!
//! Tags are 802.1Q tags (0x8100). A port with VLANs drops frames that start with another kind of
//! tag, because the switch does not know what such a tag means to the network behind an uplink. For
//! the same reason a frame never leaves untagged if a second tag follows the removed one: the next
//! switch would treat the second tag as the frame's VLAN.

use vshunt_types::spec::Vlans;

use super::frame::{ETH_VLAN, is_tag, word_at};

/// The VLAN of frames between ports without VLANs.
pub(super) const NO_VLAN: u16 = 0;
/// Bits of a tag that are the VLAN. The other bits are priority and drop eligibility.
pub(super) const VLAN_BITS: u16 = 0xFFF;
/// Bytes of both addresses.
const ADDRESSES: usize = 12;
/// Bytes of a tag.
const TAG: usize = 4;
/// Bytes of a frame that are sent from the sender's copy: addresses, two tags, EtherType.
const START: usize = ADDRESSES + 2 * TAG + 2;
const _: () = assert!(START + TAG <= u8::MAX as usize);
const START_U8: u8 = {
    let [low, ..] = START.to_le_bytes();
    low
};

/// The VLANs of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VlanConfig {
    /// The port has no VLANs.
    #[default]
    Plain,
    /// The port has these VLANs.
    Vlans {
        /// The VLAN whose frames are untagged.
        native: Option<u16>,
        /// The VLANs whose frames are tagged.
        tagged: Vlans,
    },
}

/// How a frame leaves a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TagForm {
    /// Without a tag. On ports without VLANs: unchanged.
    Untagged,
    /// With the tag of its VLAN.
    Tagged,
}

impl VlanConfig {
    /// Returns the VLANs for the options `vlan` and `trunk`.
    pub fn new(vlan: Option<u16>, trunk: Option<&Vlans>) -> Self {
        match (vlan, trunk) {
            (None, None) => Self::Plain,
            (native, tagged) => Self::Vlans { native, tagged: tagged.cloned().unwrap_or_default() },
        }
    }

    /// Returns the VLAN of a frame that enters and begins with `first`. `None`: the port does not
    /// take the frame.
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

    /// Returns the form in which frames of a VLAN leave by the port. `None`: they do not leave by
    /// it.
    #[inline]
    pub(super) fn form(&self, vlan: u16) -> Option<TagForm> {
        match self {
            Self::Plain => (vlan == NO_VLAN).then_some(TagForm::Untagged),
            Self::Vlans { native, .. } if *native == Some(vlan) => Some(TagForm::Untagged),
            Self::Vlans { tagged, .. } => tagged.has(vlan).then_some(TagForm::Tagged),
        }
    }

    /// Returns whether both ports have a VLAN in common.
    pub(super) fn shares_vlan(&self, other: &Self) -> bool {
        match self {
            Self::Plain => *other == Self::Plain,
            Self::Vlans { native, tagged } => {
                native.iter().copied().chain(tagged.iter()).any(|vlan| other.form(vlan).is_some())
            }
        }
    }
}

/// The first bytes of a frame as it leaves, in memory of the queue that sends it. The bytes that
/// were checked are the bytes that are sent, even if the guest writes to its own memory at the same
/// time. It has its own cache line, because receivers read one while the sender writes the next.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct FrameStart {
    untagged: [u8; START],
    tagged: [u8; START + TAG],
    /// Bytes of the frame, as it entered, that it replaces.
    replaced: u8,
    untagged_len: u8,
    /// 0 if there is no tagged form.
    tagged_len: u8,
    /// Whether a tag follows the one that is removed.
    inner_tag: bool,
}

impl Default for FrameStart {
    fn default() -> Self {
        let (untagged, tagged) = ([0; START], [0; START + TAG]);
        Self { untagged, tagged, replaced: 0, untagged_len: 0, tagged_len: 0, inner_tag: false }
    }
}

/// Copies `parts` to the front of `to`, as far as there is room. Returns the number of bytes.
fn join(to: &mut [u8], parts: &[&[u8]]) -> u8 {
    let (mut rest, mut len) = (to, 0);
    for part in parts {
        let Some((front, behind)) = std::mem::take(&mut rest).split_at_mut_checked(part.len()) else {
            debug_assert!(false, "a frame's start has room for START bytes and a tag");
            break;
        };
        front.copy_from_slice(part);
        (rest, len) = (behind, len + part.len());
    }
    // At most START + TAG, which a constant assertion bounds.
    u8::try_from(len).unwrap_or(u8::MAX)
}

impl FrameStart {
    /// Makes the start of a frame that begins with `first` and that a port admitted to a VLAN.
    pub(super) fn new(first: &[u8], vlan: u16) -> Self {
        let mut start = Self::default();
        let first = first.get(..START).unwrap_or(first);
        start.replaced = u8::try_from(first.len()).unwrap_or(u8::MAX);
        let (addresses, rest) = match first.split_at_checked(ADDRESSES) {
            Some(parts) if vlan != NO_VLAN => parts,
            _ => {
                start.untagged_len = join(&mut start.untagged, &[first]);
                return start;
            }
        };
        // `VlanConfig::admits` refuses other kinds of tags.
        let (tag, rest) = match word_at(rest, 0) {
            Some(ETH_VLAN) => {
                (word_at(rest, 2).unwrap_or(0) & !VLAN_BITS, rest.get(TAG..).unwrap_or_default())
            }
            _ => (0, rest),
        };
        let (kind, tag) = (ETH_VLAN.to_be_bytes(), (tag | vlan).to_be_bytes());
        start.tagged_len = join(&mut start.tagged, &[addresses, &kind, &tag, rest]);
        start.untagged_len = join(&mut start.untagged, &[addresses, rest]);
        start.inner_tag = word_at(rest, 0).is_some_and(is_tag);
        start
    }

    /// Makes it the start of another frame, as [`new`](Self::new) does. For ports without VLANs
    /// that is one copy, in place.
    #[inline]
    pub(super) fn set(&mut self, first: &[u8], vlan: u16) {
        match first.first_chunk() {
            Some(whole) if vlan == NO_VLAN => {
                self.untagged = *whole;
                (self.replaced, self.untagged_len) = (START_U8, START_U8);
                (self.tagged_len, self.inner_tag) = (0, false);
            }
            _ => *self = Self::new(first, vlan),
        }
    }

    /// Returns the bytes of the frame, as it entered, that it replaces.
    #[inline]
    pub(super) fn replaced(&self) -> usize {
        self.replaced.into()
    }

    /// Returns whether the frame can leave in this form.
    #[inline]
    pub(super) fn has(&self, form: TagForm) -> bool {
        form == TagForm::Tagged || !self.inner_tag
    }

    /// Returns the bytes in one form.
    #[inline]
    pub(super) fn bytes(&self, form: TagForm) -> &[u8] {
        // The lengths are those of `join`, so `get` succeeds.
        match form {
            TagForm::Untagged => self.untagged.get(..self.untagged_len.into()).unwrap_or_default(),
            TagForm::Tagged => self.tagged.get(..self.tagged_len.into()).unwrap_or_default(),
        }
    }

    /// Returns the bytes by which the frame is longer in this form than it was when it entered.
    #[inline]
    pub(super) fn longer(&self, form: TagForm) -> isize {
        self.bytes(form).len().cast_signed() - self.replaced().cast_signed()
    }
}
