//! Events of a front end that an export is told.

/// Receives the events of an export's front end. Methods are called on any thread, workers
/// included, so none may block.
pub trait Observer: Send + Sync {
    /// A front end has connected (`yes`) or disconnected.
    fn connected(&self, yes: bool);
    /// A guest misused a ring.
    fn queue_broken(&self, index: u16, reason: &str);
    /// The peer ended the export: its only connection is closed, or the mount is gone.
    fn ended(&self);
    /// The peer changed the size of the disk. Called on a thread that may wait.
    fn resized(&self, size_bytes: u64);
}
