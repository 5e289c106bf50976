/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vhost_blk: what its parts share.
 *
 * dev.c      the misc device: open, release, ioctls. In the owner's context, under vhost_dev.mutex.
 * ring.c     a ring's life: start, turns of its worker, completions, drain, stop.
 * inflight.c what a ring has in flight, noted for its owner's successor; what a former one left.
 * request.c  a request: header, status, dirty log; what it means, and how it ends.
 * data.c     bios: pinned or copied data, flushes.
 * range.c    DISCARD and WRITE_ZEROES.
 *
 * A request's way: kick -> worker -> vhost_blk_turn -> vhost_blk_req_begin -> submit_bio ... end_io
 * (any context) -> ring->done, lockless -> worker -> vhost_blk_reap -> status, dirty log, used
 * ring, signal.
 *
 * Lock order: vhost_dev.mutex, a vhost worker's mutex (the core's), vhost_virtqueue.mutex. Nobody
 * holds two rings'. What writes the guest's memory holds the ring's mutex.
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
 * A turn's budget, after which the worker looks at its other rings. One large request uses it up.
 */
#define VHOST_BLK_TURN_REQUESTS	256
#define VHOST_BLK_TURN_BYTES	SZ_1M

/*
 * The largest data of a request, and of all that a ring has in flight unless it is one. What stands
 * for it in kernel memory (a bio_vec a page, 1/256; where segments are blocks of 512 bytes, 1/32)
 * is what a guest could otherwise make grow without end.
 */
#define VHOST_BLK_DATA_MAX	SZ_256M

/*
 * The same for data that the device cannot reach where it is: that is copied, through kernel pages.
 */
#define VHOST_BLK_BOUNCE_MAX	SZ_4M

/*
 * Pages of the bio that is part of each request, and the most of another one, which just fits into
 * a page then.
 */
#define VHOST_BLK_INLINE_VECS	8
#define VHOST_BLK_BIO_VECS	224

/* Ranges of one DISCARD or WRITE_ZEROES. */
#define VHOST_BLK_RANGES_MAX	256

/**
 * struct vhost_blk_disk - what stands behind the rings
 * @file: the owner's block device, or NULL.
 * @bdev: the same.
 * @readonly: nothing is written.
 * @serial: for GET_ID.
 *
 * Changes under vhost_dev.mutex while no ring runs, hence constant for requests.
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
 * struct vhost_blk_range - what is left of one range of a DISCARD or WRITE_ZEROES
 * @sector: where it starts.
 * @sectors: how much.
 * @unmap: zeroes may be had by deallocating.
 */
struct vhost_blk_range {
	sector_t sector;
	sector_t sectors;
	bool unmap;
};

/**
 * struct vhost_blk_req - one request, in the slot of its head
 * @done: in ring->done; from then on the request is the one's who takes it from there.
 * @pending: its bios in flight, and one while they are submitted.
 * @error: of a bio that failed; written from any context before @pending goes down.
 * @ring: the ring.
 *
 * The rest belongs to who holds the ring's mutex:
 * @head: the chain's head, and the slot's index.
 * @busy: taken and not put back.
 * @lost: the owner was killed when this was taken: nobody is told how it ends.
 * @flush_after: what it wrote has to be made stable by a flush when its bios are done.
 * @type: VIRTIO_BLK_T_*.
 * @status: VIRTIO_BLK_S_*, unless a bio failed.
 * @bounced: its data goes through pages of ours.
 * @offloaded: the device was told to write zeroes by itself.
 * @written: bytes of the guest's buffers that a success fills, without the status.
 * @data_bytes: data of an IN or OUT.
 * @status_at: the status byte, in the owner's memory; NULL if the chain has no room for one.
 * @bios: its bios, done or in flight.
 * @bounce_to: where bounced data of an IN goes.
 * @bounce_segs: what @bounce_to points to.
 * @ranges: of a DISCARD or WRITE_ZEROES, &@range or allocated; NULL if there are none.
 * @range_at: the one that is worked on.
 * @ranges_left: how many are not done, with that one.
 * @step: sectors of it that are on their way.
 * @range: room for one.
 * @log: guest-physical ranges that it may write, @log_inline or allocated. Only while the log is
 *	on.
 * @log_num: how many, or 0.
 * @log_bytes: how many bytes of them.
 * @log_inline: room for few.
 * @vecs: of @first.
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

/* Why a ring that was started takes nothing (struct vhost_blk_ring.hold). */
#define VHOST_BLK_HOLD_STOP	BIT(0)	/* it is to stop, or the stop was interrupted */
#define VHOST_BLK_HOLD_REST	BIT(1)	/* the dirty log is switched, or its base asked for */
#define VHOST_BLK_HOLD_BROKEN	BIT(2)	/* the guest put something impossible into it */
#define VHOST_BLK_HOLD_DROP	BIT(3)	/* the device is closed: nobody is told of anything */

struct vhost_blk_region;

/**
 * struct vhost_blk_inflight - where a ring notes what it has in flight
 * @region: in the owner's memory, or NULL: nothing is noted.
 * @num: descriptors that the region has room for.
 * @counter: of the request that is taken next.
 * @last_batch_head: where the list of requests begins that were put back last.
 * @replays: in the owner's memory: heads of requests that a former owner had in flight.
 * @replay_num: how many.
 * @replays_left: of those, the ones that are still to be begun. They count as in flight.
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
 * @vq: the core's part. @vq.private_data is set from the start until the last request is back: so
 *	long the core checks what the owner changes, and we may write through the addresses that it
 *	checked.
 * @blk: the device.
 *
 * Under @vq.mutex, changed under vhost_dev.mutex too:
 * @reqs: slots, one a descriptor, or NULL: the ring is stopped.
 * @num: how many.
 *
 * Under @vq.mutex:
 * @inflight: where requests in flight are noted; set while the ring is stopped.
 * @hold: VHOST_BLK_HOLD_*: takes nothing while one is set.
 * @stalled: the next request waits for memory of others (VHOST_BLK_DATA_MAX).
 * @requeued: the kick's work was queued by us, not by a kick.
 * @in_flight: requests taken and not put back, also by a former owner. Read without the lock.
 * @data_bytes: of those, the data of IN and OUT.
 * @bounce_bytes: of those, what is copied.
 * @stats: counters. Read without the lock.
 *
 * Under vhost_dev.mutex:
 * @late: an end_io that has handed its request over may still be about to queue @done_work.
 *
 * Any context:
 * @done: requests whose bios are done.
 * @in_turn: somebody holds @vq.mutex who looks at @done afterwards, so @done_work need not be
 *	queued.
 * @done_work: takes @done.
 * @drained: who waits for @in_flight to be zero, and takes @done itself if the worker is dead.
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
	bool in_turn;
	struct vhost_work done_work;
	wait_queue_head_t drained;
};

/**
 * struct vhost_blk - an open /dev/vhost-blk
 * @dev: the core's part.
 * @vqs: for the core.
 * @disk: the backend; see there.
 * @rings: the virtqueues.
 */
struct vhost_blk {
	struct vhost_dev dev;
	struct vhost_virtqueue *vqs[VHOST_BLK_VRINGS_MAX];
	struct vhost_blk_disk disk;
	struct vhost_blk_ring rings[VHOST_BLK_VRINGS_MAX];
};

/* How vhost_blk_drain waits, and what becomes of what is done. */
enum vhost_blk_drain {
	/* The owner asks: the guest is told; a fatal signal ends the wait. */
	VHOST_BLK_DRAIN_KILLABLE,
	/* No memory to write to any more: resources are given back, nothing else. */
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

/* What vhost_blk_rw() returns is an errno, or this. */
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
 * Whether this worker runs for the last time. It is a thread of its owner; the core lets it run
 * what is queued once more after it has taken the signal, which is not pending any more then.
 */
static inline bool vhost_blk_owner_dies(void)
{
	return fatal_signal_pending(current) || (current->signal->flags & SIGNAL_GROUP_EXIT);
}

static inline struct block_device *vhost_blk_bdev(struct vhost_blk_req *req)
{
	return req->ring->blk->disk.bdev;
}

/* A bio of the request failed, or could not be made. Any context. */
static inline void vhost_blk_req_fail(struct vhost_blk_req *req, blk_status_t error)
{
	WRITE_ONCE(req->error, error);
}

/* One bio less, or no more bios come. Any context; the last one hands the request over. */
static inline void vhost_blk_req_put(struct vhost_blk_req *req)
{
	if (atomic_dec_and_test(&req->pending))
		vhost_blk_req_done(req);
}

#endif
