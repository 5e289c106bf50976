/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vhost_blk: declarations that the module's files share.
 *
 * dev.c      the misc device: open, release, ioctls. Runs in the owner's
 *            context, under vhost_dev.mutex.
 * ring.c     the life cycle of a ring: start, iterations of its worker,
 *            completions, drain, stop.
 * inflight.c the in-flight region, and requests of a former owner.
 * request.c  a request: header, status, dirty log, completion.
 * data.c     bios: pinned or copied data, flushes.
 * range.c    DISCARD and WRITE_ZEROES.
 *
 * The path of a request: kick -> worker -> vhost_blk_iterate ->
 * vhost_blk_req_begin -> submit_bio ... end_io (any context) -> ring->done,
 * lockless -> worker -> vhost_blk_reap -> status, dirty log, used ring, signal.
 *
 * Lock order: vhost_dev.mutex, a vhost worker's mutex (the core's),
 * vhost_virtqueue.mutex. No thread holds the mutexes of two rings. Code that
 * writes the guest's memory holds the ring's mutex.
 */
#ifndef _VHOST_BLK_H
#define _VHOST_BLK_H

#include <linux/atomic.h>
#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/llist.h>
#include <linux/sched/signal.h>
#include <linux/uio.h>
#include <linux/wait.h>
#include <linux/virtio_blk.h>
#include <linux/vhost_blk.h>

#include "vhost.h"
#include "compat.h"

/*
 * Budget of an iteration. The worker looks at its other rings when it is used
 * up. One large request can use it up.
 */
#define VHOST_BLK_ITERATION_REQUESTS	256
#define VHOST_BLK_ITERATION_BYTES	SZ_1M

/*
 * Maximum data of one request, and of all requests of a ring that are in
 * flight. This bounds the kernel memory that
 * a guest can use: one bio_vec for each page (1/256 of the data), or 1/32 of
 * the data if each segment is a block of 512 bytes.
 */
#define VHOST_BLK_DATA_MAX	SZ_256M

/*
 * The same limit for data that the device cannot reach directly. Such data is
 * copied through kernel pages.
 */
#define VHOST_BLK_BOUNCE_MAX	SZ_4M

/*
 * Pages in the bio that is part of each request, and the maximum in any other
 * bio. A bio of the maximum size just fits into one page.
 */
#define VHOST_BLK_INLINE_VECS	8
#define VHOST_BLK_BIO_VECS	224

/* Maximum number of ranges in one DISCARD or WRITE_ZEROES. */
#define VHOST_BLK_RANGES_MAX	256

/**
 * struct vhost_blk_disk - the backend of the rings
 * @file: the owner's block device, or NULL.
 * @bdev: the block device of @file, or NULL.
 * @readonly: writes are refused.
 * @serial: the answer to GET_ID.
 *
 * It changes under vhost_dev.mutex while no ring runs. Requests therefore see
 * it as constant.
 */
struct vhost_blk_disk {
	struct file *file;
	struct block_device *bdev;
	bool readonly;
	u8 serial[VHOST_BLK_SERIAL_BYTES];
};

struct vhost_blk_req;

/**
 * struct vhost_blk_bio - one of the bios of a request
 * @req: the request.
 * @next: the next bio of the request, in the order of its data.
 * @bio: the bio. Its bio_vecs follow, or are those in the request.
 */
struct vhost_blk_bio {
	struct vhost_blk_req *req;
	struct vhost_blk_bio *next;
	struct bio bio;
};

/**
 * struct vhost_blk_range - the rest of one range of a DISCARD or WRITE_ZEROES
 * @sector: the first sector.
 * @sectors: the number of sectors.
 * @unmap: the device may deallocate in order to write zeroes.
 */
struct vhost_blk_range {
	sector_t sector;
	sector_t sectors;
	bool unmap;
};

/**
 * struct vhost_blk_req - one request, in the slot of its head
 * @done: entry in ring->done. The thread that takes it from the list owns the
 *	request from then on.
 * @pending: the number of bios in flight, plus one while bios are submitted.
 * @error: status of a bio that failed. Written from any context before
 *	@pending is decremented.
 * @ring: the ring.
 *
 * The ring's mutex protects the other fields:
 * @head: the chain's head, and the slot's index.
 * @busy: taken and not put back.
 * @lost: the owner was killed when this was taken. The result is not reported.
 * @flush_after: a flush has to follow the bios, to make the data stable.
 * @type: VIRTIO_BLK_T_*.
 * @status: VIRTIO_BLK_S_*, unless a bio failed.
 * @bounced: the data is copied through kernel pages.
 * @offloaded: the device was told to write zeroes by itself.
 * @written: bytes of the guest's buffers that a success fills, without the
 *	status.
 * @data_bytes: bytes of data of an IN or OUT.
 * @status_at: the status byte, in the owner's memory. NULL if the chain has no
 *	room for one.
 * @bios: the request's bios, done or in flight.
 * @bounce_to: the destination of bounced data of an IN.
 * @bounce_segs: the segments that @bounce_to points to.
 * @ranges: ranges of a DISCARD or WRITE_ZEROES: &@range or allocated. NULL if
 *	there are none.
 * @range_at: the current range.
 * @ranges_left: the number of ranges that are not done, with the current one.
 * @step: sectors of the current range that are in flight.
 * @range: room for one range.
 * @log: guest-physical ranges that the request may write: @log_inline or
 *	allocated. Set only while the dirty log is on.
 * @log_num: the number of ranges in @log, or 0.
 * @log_bytes: the number of bytes in these ranges.
 * @log_inline: room for a few ranges.
 * @vecs: the bio_vecs of @first.
 * @first: a bio that need not be allocated.
 */
struct vhost_blk_req {
	struct llist_node done;
	atomic_t pending;
	blk_status_t error;
	struct vhost_blk_ring *ring;

	u16 head;
	bool busy;
	bool lost;
	bool flush_after;
	bool bounced;
	bool offloaded;
	u8 status;
	u32 type;
	u32 written;
	size_t data_bytes;
	u8 __user *status_at;
	struct vhost_blk_bio *bios;
	struct iov_iter bounce_to;
	const void *bounce_segs;
	struct vhost_blk_range *ranges;
	struct vhost_blk_range *range_at;
	unsigned int ranges_left;
	sector_t step;
	struct vhost_blk_range range;
	struct vhost_log *log;
	unsigned int log_num;
	u64 log_bytes;
	struct vhost_log log_inline[2];

	struct bio_vec vecs[VHOST_BLK_INLINE_VECS];
	struct vhost_blk_bio first;
};

/* Reasons why a started ring takes no requests (struct vhost_blk_ring.hold). */
#define VHOST_BLK_HOLD_STOP	BIT(0)	/* a stop has begun */
#define VHOST_BLK_HOLD_REST	BIT(1)	/* drained for the log or base */
#define VHOST_BLK_HOLD_BROKEN	BIT(2)	/* its content is invalid */
#define VHOST_BLK_HOLD_DROP	BIT(3)	/* the device is closed */

struct vhost_blk_region;

/**
 * struct vhost_blk_inflight - the in-flight region of a ring
 * @region: in the owner's memory. NULL if the owner has set none.
 * @num: the number of descriptors that the region has room for.
 * @counter: the number of the next request that is taken.
 * @last_batch_head: first in the list of requests that were put back last.
 * @replays: in the owner's memory: heads of requests that a former owner had
 *	in flight.
 * @replay_num: the number of these heads.
 * @replays_left: how many of them are not begun. They count as in flight.
 */
struct vhost_blk_inflight {
	struct vhost_blk_region __user *region;
	unsigned int num;
	u64 counter;
	u16 last_batch_head;
	struct vring_avail __user *replays;
	unsigned int replay_num;
	unsigned int replays_left;
};

/**
 * struct vhost_blk_ring - a virtqueue
 * @vq: the core's part. @vq.private_data is set from the start until the last
 *	request is back. During that time the core checks what the owner
 *	changes, and the module may write through the addresses that the core
 *	checked.
 * @blk: the device.
 *
 * Under @vq.mutex, changed under vhost_dev.mutex too:
 * @reqs: slots, one for each descriptor. NULL if the ring is stopped.
 * @num: the number of slots.
 *
 * Under @vq.mutex:
 * @inflight: the in-flight region. Set while the ring is stopped.
 * @hold: VHOST_BLK_HOLD_*. The ring takes no requests while one is set.
 * @stalled: the next request waits for memory (VHOST_BLK_DATA_MAX) that other
 *	requests of the ring use.
 * @requeued: the module queued the kick's work, not a kick.
 * @in_flight: requests taken and not put back, also by a former owner. Read
 *	without the lock.
 * @data_bytes: data of the IN and OUT requests in flight.
 * @bounce_bytes: the part of @data_bytes that is copied.
 * @stats: counters. Read without the lock.
 *
 * Under vhost_dev.mutex:
 * @late: an end_io that has handed its request over may still be about to queue
 *	@done_work.
 *
 * Any context:
 * @done: requests whose bios are done.
 * @in_iteration: a thread holds @vq.mutex and looks at @done afterwards, so
 *	@done_work need not be queued.
 * @done_work: takes the requests in @done.
 * @drained: wait queue of drains. A drain waits until @in_flight is zero. If
 *	the worker is dead, the drain takes @done itself.
 */
struct vhost_blk_ring {
	struct vhost_virtqueue vq;
	struct vhost_blk *blk;

	struct vhost_blk_req *reqs;
	unsigned int num;

	struct vhost_blk_inflight inflight;
	unsigned int hold;
	bool stalled;
	bool requeued;
	unsigned int in_flight;
	u64 data_bytes;
	u64 bounce_bytes;
	struct vhost_blk_vring_stats stats;

	bool late;

	struct llist_head done ____cacheline_aligned_in_smp;
	bool in_iteration;
	struct vhost_work done_work;
	wait_queue_head_t drained;
};

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @dev: the core's part.
 * @vqs: the virtqueues, as an array for the core.
 * @disk: the backend.
 * @rings: the virtqueues.
 */
struct vhost_blk {
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_VRINGS_MAX];
	struct vhost_blk_disk disk;
	struct vhost_blk_ring rings[VHOST_BLK_VRINGS_MAX];
};

/* How vhost_blk_drain waits, and whether it reports results to the guest. */
enum vhost_blk_drain {
	/* Results are reported. A fatal signal ends the wait. */
	VHOST_BLK_DRAIN_KILLABLE,
	/* The guest's memory is gone: only free resources. */
	VHOST_BLK_DRAIN_DROP,
};

void vhost_blk_ring_init(struct vhost_blk *blk, struct vhost_blk_ring *ring);
int vhost_blk_ring_start(struct vhost_blk_ring *ring);
int vhost_blk_ring_stop(struct vhost_blk_ring *ring, enum vhost_blk_drain how);
void vhost_blk_ring_hold(struct vhost_blk_ring *ring, unsigned int why);
void vhost_blk_ring_unhold(struct vhost_blk_ring *ring, unsigned int why);
int vhost_blk_drain(struct vhost_blk_ring *ring, enum vhost_blk_drain how);
void vhost_blk_break(struct vhost_blk_ring *ring);

int vhost_blk_inflight_set(struct vhost_blk_ring *ring,
			   const struct vhost_blk_vring_inflight *from);
bool vhost_blk_inflight_fits(const struct vhost_blk_ring *ring);
bool vhost_blk_inflight_take(struct vhost_blk_ring *ring, u16 head);
void vhost_blk_inflight_untake(struct vhost_blk_ring *ring, u16 head);
bool vhost_blk_inflight_link(struct vhost_blk_ring *ring, unsigned int count);
bool vhost_blk_inflight_clear(struct vhost_blk_ring *ring, unsigned int count);
int vhost_blk_next_desc(struct vhost_blk_ring *ring, unsigned int *out, unsigned int *in,
			unsigned int *log_num);
void vhost_blk_replays_drop(struct vhost_blk_ring *ring);

int vhost_blk_req_begin(struct vhost_blk_ring *ring, struct vhost_blk_req *req, unsigned int out,
			unsigned int in, unsigned int log_num);
bool vhost_blk_req_end(struct vhost_blk_req *req, bool tell, u32 *used_len);
void vhost_blk_req_done(struct vhost_blk_req *req);

/* vhost_blk_rw() returns an errno or this value. */
#define VHOST_BLK_STALLED	1

bool vhost_blk_in_bounds(struct block_device *bdev, u64 sector, u64 sectors);
int vhost_blk_rw(struct vhost_blk_req *req, struct iov_iter *data, u64 sector);
int vhost_blk_bounce_back(struct vhost_blk_req *req);
void vhost_blk_flush(struct vhost_blk_req *req);
void vhost_blk_bios_free(struct vhost_blk_req *req);

int vhost_blk_ranges_parse(struct vhost_blk_req *req, struct iov_iter *data);
bool vhost_blk_range_step(struct vhost_blk_req *req);
void vhost_blk_ranges_free(struct vhost_blk_req *req);

/*
 * Whether this worker runs for the last time. The worker is a thread of its
 * owner. After it has taken the fatal signal, the core lets it run the queued
 * work once more. The signal is no longer pending then.
 */
static inline bool vhost_blk_owner_dies(void)
{
	return fatal_signal_pending(current) || (current->signal->flags & SIGNAL_GROUP_EXIT);
}

static inline struct block_device *vhost_blk_bdev(struct vhost_blk_req *req)
{
	return req->ring->blk->disk.bdev;
}

/* A bio of the request failed, or could not be allocated. Any context. */
static inline void vhost_blk_req_fail(struct vhost_blk_req *req, blk_status_t error)
{
	WRITE_ONCE(req->error, error);
}

/*
 * Drops one count: a bio is done, or the submission has ended. The last one
 * hands the request over. Any context.
 */
static inline void vhost_blk_req_put(struct vhost_blk_req *req)
{
	if (atomic_dec_and_test(&req->pending))
		vhost_blk_req_done(req);
}

#endif
