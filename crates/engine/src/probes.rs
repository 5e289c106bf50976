//! Static probes (USDT) for bpftrace, perf and gdb, all of the provider `vshunt`.
//!
//! A probe is one nop, and a note in the ELF file that says where its arguments are. Without a
//! tracer it has no measurable cost, because callers pass only values that are in a register or a
//! field. docs/guide/tracing.md has the table of all probes for users, and `tests/tracing` compares
//! it with the notes of the built program.
//!
//! The first argument is the id of a worker, the second that of a queue. A queue's id is unique in
//! the process and is not shown elsewhere; [`attach_post`] names its export and its index there.

use probe::probe;

use crate::WorkerId;
use crate::mailbox::QueueId;

/// A worker has taken `count` requests from a queue and started them.
#[inline(always)]
pub(crate) fn take(worker: WorkerId, queue: QueueId, count: u32) {
    probe!(vshunt, take, worker, queue, count);
}

/// A worker has passed `count` operations to the kernel, in one `io_uring_enter`.
#[inline(always)]
pub(crate) fn submit(worker: WorkerId, count: usize) {
    probe!(vshunt, submit, worker, count);
}

/// One operation of a queue has completed with `result`, and with it `count` requests.
#[inline(always)]
pub(crate) fn complete(worker: WorkerId, queue: QueueId, count: u32, result: i32) {
    probe!(vshunt, complete, worker, queue, count, result);
}

/// A batch of a queue was published. `notified`: the peer asked for a notification and got one.
#[inline(always)]
pub(crate) fn publish(worker: WorkerId, queue: QueueId, notified: bool) {
    probe!(vshunt, publish, worker, queue, notified);
}

/// A worker goes to sleep. It has asked the peers of `queues` queues to kick.
#[inline(always)]
pub(crate) fn sleep(worker: WorkerId, queues: usize) {
    probe!(vshunt, sleep, worker, queues);
}

/// A worker no longer sleeps. `woken`: a completion ended the sleep, not the time limit.
#[inline(always)]
pub(crate) fn wake(worker: WorkerId, woken: bool) {
    probe!(vshunt, wake, worker, woken);
}

/// Attach, step 1: the worker is asked to release the queue.
#[inline(always)]
pub(crate) fn attach_ask(worker: WorkerId, queue: QueueId) {
    probe!(vshunt, attach__ask, worker, queue);
}

/// Attach, step 2 begins: the worker takes nothing more from the queue, which has `in_flight`
/// requests.
#[inline(always)]
pub(crate) fn attach_drain(worker: WorkerId, queue: QueueId, in_flight: u32) {
    probe!(vshunt, attach__drain, worker, queue, in_flight);
}

/// Attach, step 2 ends: the queue is at rest and leaves the worker.
#[inline(always)]
pub(crate) fn attach_leave(worker: WorkerId, queue: QueueId) {
    probe!(vshunt, attach__leave, worker, queue);
}

/// Attach, step 3: the queue, number `index` of the export `name`, is in the mailbox of the worker.
#[inline(always)]
pub(crate) fn attach_post(worker: WorkerId, queue: QueueId, index: u16, name: &str) {
    probe!(vshunt, attach__post, worker, queue, index, name.as_ptr(), name.len());
}

/// Attach, step 4: the worker listens for the queue's work.
#[inline(always)]
pub(crate) fn attach_arm(worker: WorkerId, queue: QueueId) {
    probe!(vshunt, attach__arm, worker, queue);
}

/// Step 1 is withdrawn: the queue stays on the worker.
#[inline(always)]
pub(crate) fn attach_cancel(worker: WorkerId, queue: QueueId) {
    probe!(vshunt, attach__cancel, worker, queue);
}
