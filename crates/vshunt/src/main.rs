//! stand-in until control lands
fn main() {}
