//! The operations of a disk, and the progress of a request.

use ::qcow2::Look;

/// An operation on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Transfers bytes from the disk to the guest.
    Read,
    /// Transfers bytes from the guest to the disk.
    Write,
    /// Writes one cluster of a qcow2 disk, compressed if that makes it smaller and the cluster is
    /// not allocated yet.
    ///
    /// The range is the whole cluster; of the last cluster it is the part that belongs to the disk.
    /// Any other range fails with `EINVAL`. Disks of other formats answer `EOPNOTSUPP`. The worker
    /// compresses on its own thread and allocates memory, so only jobs that fill an image use this
    /// operation.
    WriteCompressed,
    /// Copies to the image what its backing images have in the range, so that it does not need them
    /// there. The disk reads the same before and after. Up to all of the range is in memory at
    /// once. Disks of other formats than qcow2 answer `EOPNOTSUPP`.
    Populate,
    /// Brings all writes that completed before, on any queue, to stable storage.
    Flush,
    /// Declares the contents of the range as no longer needed.
    Discard,
    /// Makes the range read as zeroes.
    WriteZeroes {
        /// Whether the space of the range may be released.
        unmap: bool,
    },
    /// Allocates the space of the range, so that later writes to it cannot fail for lack of space.
    Allocate,
    /// Asks whether there is data at `offset`, and for how many bytes (at most `len`) the answer
    /// holds. The answer is in [`Request::found`](super::Request::found). Disks in memory know no
    /// holes, and servers not always: they answer that all is data.
    Seek {
        /// What to look for. Only qcow2 images tell layers apart; others answer as for
        /// [`Look::Disk`].
        look: Look,
    },
}

impl Op {
    /// Returns whether the operation may change what the disk reads as.
    #[inline]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write | Self::WriteCompressed | Self::Discard | Self::WriteZeroes { .. })
    }
}

/// The progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The request is complete, with 0 or a negative errno.
    Done(i32),
    /// The io_uring has an operation with the request's token. Its result goes to `resume`.
    Wait,
}
