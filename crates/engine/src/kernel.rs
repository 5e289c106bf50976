//! What the pool asks of a worker that is not a thread of ours to run.

use vshunt_types::error::Result;

/// A worker of the in-kernel engine: a vhost task. The kernel made it for one device, so that it serves the queues of one
/// export only. Called by control threads, with the workers' list held but for [`free`](Self::free).
pub trait KernelWorker: Send + Sync {
    /// The export whose device it belongs to.
    fn export(&self) -> &str;

    /// Ends it. Done already where the device is gone.
    ///
    /// # Errors
    /// The kernel's.
    fn free(&self) -> Result<()>;

    /// Requests completed here.
    fn requests(&self) -> u64;
}
