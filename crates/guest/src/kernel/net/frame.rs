//! Frames that identify their sender and can be verified completely.

use crate::verify::mix;

/// Ethertype for local experiments (IEEE 802). No other frames use it.
pub(super) const ETHERTYPE: u16 = 0x88b5;
/// Shortest and longest frame, without the checksum that hardware adds.
pub(super) const FRAME_MIN: usize = 60;
pub(super) const FRAME_MAX: usize = 1514;

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the driver's queue to the tap.
    Out,
    /// From the tap to the driver's queue.
    In,
}

/// Fills all of `frame` as the frame `number` of its direction.
pub(super) fn fill(frame: &mut [u8], direction: Direction, number: u64) {
    let len = frame.len() as u16;
    let address = |last: u8| [2, 0, 0, 0, 0x56, last];
    let (to, from) = if direction == Direction::Out { (1, 2) } else { (2, 1) };
    frame[..6].copy_from_slice(&address(to));
    frame[6..12].copy_from_slice(&address(from));
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    frame[14..16].copy_from_slice(&len.to_be_bytes());
    frame[16..24].copy_from_slice(&number.to_le_bytes());
    let mut state = mix(number ^ u64::from(len) << 48);
    for word in frame[24..].chunks_mut(8) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

/// Returns the number of a frame of this direction, and `None` for a foreign frame. A damaged frame
/// is an error.
pub(super) fn number(frame: &[u8], direction: Direction) -> Result<Option<u64>, String> {
    if frame.len() < 24 || frame[12..14] != ETHERTYPE.to_be_bytes() {
        return Ok(None);
    }
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&frame[16..24]);
    let number = u64::from_le_bytes(bytes);
    let mut wanted = vec![0; frame.len()];
    fill(&mut wanted, direction, number);
    match wanted.iter().zip(frame).position(|(a, b)| a != b) {
        None => Ok(Some(number)),
        Some(at) => Err(format!("frame {number} of {} bytes is damaged from byte {at} on", frame.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_known_again_and_damage_is_seen() {
        let mut frame = vec![0; 777];
        fill(&mut frame, Direction::In, 41);
        assert_eq!(number(&frame, Direction::In), Ok(Some(41)));
        assert!(number(&frame, Direction::Out).is_err());
        assert!(number(&frame[..776], Direction::In).is_err());
        frame[700] ^= 1;
        assert!(number(&frame, Direction::In).unwrap_err().contains("byte 700"));
        frame[13] = 0;
        assert_eq!(number(&frame, Direction::In), Ok(None));
    }
}
