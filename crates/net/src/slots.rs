//! Tables by numbers that a queue gave out itself.
//!
//! Such a number comes back in the token of a completion or in a returned description. A guest
//! never chooses it. So a number out of range is a bug of this program, and the two functions panic
//! as an index does.

use vshunt_types::convert::low_u16;

/// Returns the element of `number`.
#[inline]
#[expect(clippy::indexing_slicing, reason = "the caller gave out the number, see the module")]
pub(crate) fn slot<T>(table: &[T], number: u16) -> &T {
    &table[usize::from(number)]
}

/// Returns the element of `number`, mutable.
#[inline]
#[expect(clippy::indexing_slicing, reason = "the caller gave out the number, see the module")]
pub(crate) fn slot_mut<T>(table: &mut [T], number: u16) -> &mut T {
    &mut table[usize::from(number)]
}

/// Converts a count of at most a batch, or of the slots of a queue, to the type of slot numbers.
#[inline]
pub(crate) fn number(count: usize) -> u16 {
    debug_assert!(u16::try_from(count).is_ok(), "a queue has at most 32,768 slots");
    low_u16(count as u64)
}
