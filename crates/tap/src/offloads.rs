//! The offload work that the reader of a tap does.

// linux/if_tun.h, TUN_F_*
const F_CSUM: u32 = 0x01;
const F_TSO4: u32 = 0x02;
const F_TSO6: u32 = 0x04;
const F_TSO_ECN: u32 = 0x08;
const F_UFO: u32 = 0x10;
const F_USO: u32 = 0x60;

/// The offload work that the reader of the queues does instead of the kernel (TUNSETOFFLOAD).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Frames whose checksum is not computed yet. Without it the fields below have no effect.
    pub csum: bool,
    /// TCP segments over IPv4 longer than the MTU.
    pub tso4: bool,
    /// TCP segments over IPv6 longer than the MTU.
    pub tso6: bool,
    /// TCP segments with ECN.
    pub ecn: bool,
    /// UDP fragments.
    pub ufo: bool,
    /// UDP segments (both IP versions, or neither).
    pub uso: bool,
}

impl Offloads {
    /// Returns the kernel's bits. Combinations that the kernel refuses are left out.
    pub(super) fn bits(self) -> u32 {
        if !self.csum {
            return 0;
        }
        let tso = self.tso4 || self.tso6;
        let bit = |on: bool, bits| if on { bits } else { 0 };
        F_CSUM
            | bit(self.tso4, F_TSO4)
            | bit(self.tso6, F_TSO6)
            | bit(self.ecn && tso, F_TSO_ECN)
            | bit(self.ufo, F_UFO)
            | bit(self.uso, F_USO)
    }
}
