//! Frontends: the protocol side of an export. They negotiate, build queues, and tear them down.

pub mod rate;
pub mod socket_file;
pub mod vhost_user;
