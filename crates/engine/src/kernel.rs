//! Workers that the kernel runs, as the pool sees them.

use vshunt_types::error::Result;

/// A worker of the in-kernel engine: a vhost task. The kernel made it for one device, so it serves
/// the queues of one export only.
///
/// Called by control threads, which hold the workers' list except during [`free`](Self::free).
pub trait KernelWorker: Send + Sync {
    /// Returns the name of the export that its device belongs to.
    fn export(&self) -> &str;

    /// Ends the worker. Does nothing if the device is closed.
    ///
    /// # Errors
    /// The kernel's.
    fn free(&self) -> Result<()>;

    /// Returns the number of requests completed on this worker.
    fn requests(&self) -> u64;
}
