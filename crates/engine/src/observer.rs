//! What a front end tells of itself.

/// What an export wants to know of its frontend. Called on any thread, workers too: none of it may block.
pub trait Observer: Send + Sync {
    /// A front-end came or went.
    fn connected(&self, yes: bool);
    /// A guest misused a ring.
    fn queue_broken(&self, index: u16, reason: &str);
    /// The other side ended it: the one connection is over, or the mount is gone.
    fn ended(&self);
    /// The other side gave the disk another size. (On a thread that may wait.)
    fn resized(&self, size_bytes: u64);
}
