//! The vhost-user-blk device as a guest sees it: through the real socket, by a driver of our own
//! (`vshunt-bench`).
//!
//! Each module is one side of it. Random numbers start at the same seed each time;
//! `VSHUNT_SEED=N` chooses another one, and a failure prints it.

mod config;
mod dirty_log;
mod durability;
mod hang;
mod hostile;
mod layout;
mod memory;
mod protocol;
mod requests;
mod restart;
mod rig;
mod stopped;
mod workers;
