//! `vshunt-bench`: loads a vhost-user-blk socket the way a guest would.
fn main() {}
