//! Help for this crate's tests.

pub(crate) fn crash_point() {}
