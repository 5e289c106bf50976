// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: the in-flight region of a ring, from which a restarted owner
 * recovers (vhost-user protocol, "Inflight I/O tracking"), and the requests of
 * a former owner.
 *
 * The region is in the owner's memory and shared with its front end. The
 * module never reads it: it keeps its own state in the kernel. A kill of the
 * owner loses no store that was executed, so program order is what matters:
 *
 *   a request is taken     its counter, then its mark; then it starts
 *   a batch is put back    a list through its heads; then the used index; then
 *                          the marks are cleared, and the used index is noted
 *
 * The caller holds the ring's mutex and runs in the owner's address space.
 */
#include "blk.h"

/*
 * QueueRegionSplit and DescStateSplit of the protocol. Fields have the host's
 * byte order. The module reads none of them.
 */
struct vhost_blk_desc_state {
	u8 inflight;
	u8 padding[5];
	u16 next;
	u64 counter;
};

struct vhost_blk_region {
	u64 features;
	u16 version;
	u16 desc_num;
	u16 last_batch_head;
	u16 used_idx;
	struct vhost_blk_desc_state desc[];
};

static_assert(sizeof(struct vhost_blk_desc_state) == 16);
static_assert(offsetof(struct vhost_blk_region, desc) == 16);

static size_t vhost_blk_region_bytes(const struct vhost_blk_inflight *inflight)
{
	return struct_size_t(struct vhost_blk_region, desc, inflight->num);
}

/**
 * vhost_blk_inflight_set - sets the in-flight region of a stopped ring
 * @ring: the ring.
 * @from: the owner's argument. Its size and index are checked already.
 *
 * Return: 0, -EBUSY if the ring runs, -EINVAL, or -EFAULT if these are no
 * addresses of user space.
 */
int vhost_blk_inflight_set(struct vhost_blk_ring *ring,
			   const struct vhost_blk_vring_inflight *from)
{
	struct vhost_blk_inflight inflight = {
		.region = u64_to_user_ptr(from->region_user_addr),
		.num = from->num,
		.counter = from->counter,
		.last_batch_head = from->last_batch_head,
		.replays = u64_to_user_ptr(from->replay_user_addr),
		.replays_left = from->replay_num,
		.replay_num = from->replay_num,
	};
	int err = 0;

	if (from->reserved || from->region_user_addr % 8 || from->replay_user_addr % 2)
		return -EINVAL;
	if (!inflight.region && (from->num || from->replay_num))
		return -EINVAL;
	if (from->num > VHOST_BLK_VRING_NUM_MAX || from->replay_num > from->num)
		return -EINVAL;
	if (!access_ok(inflight.region, vhost_blk_region_bytes(&inflight)))
		return -EFAULT;
	if (!access_ok(inflight.replays,
		       struct_size(inflight.replays, ring, from->replay_num)))
		return -EFAULT;

	mutex_lock(&ring->vq.mutex);
	if (ring->reqs)
		err = -EBUSY;
	else
		ring->inflight = inflight;
	mutex_unlock(&ring->vq.mutex);
	return err;
}

/**
 * vhost_blk_inflight_fits - whether the region has room for the ring's size
 * @ring: the ring.
 *
 * A former owner had no more requests in flight than the ring has descriptors.
 * The core reads the list of these requests as an available ring, which has
 * the same number of entries.
 */
bool vhost_blk_inflight_fits(const struct vhost_blk_ring *ring)
{
	const struct vhost_blk_inflight *inflight = &ring->inflight;

	if (!inflight->region)
		return true;
	if (inflight->replays_left && inflight->replay_num > ring->vq.num)
		return false;
	return ring->vq.num <= inflight->num;
}

/**
 * vhost_blk_inflight_take - notes that a request is taken
 * @ring: the ring.
 * @head: the request's head, below the ring's size.
 *
 * Return: false if the region cannot be written. The request must not start
 * then.
 */
bool vhost_blk_inflight_take(struct vhost_blk_ring *ring, u16 head)
{
	struct vhost_blk_region __user *region = ring->inflight.region;
	struct vhost_blk_desc_state __user *state;

	if (!region)
		return true;
	state = &region->desc[head];
	if (!user_write_access_begin(state, sizeof(*state)))
		return false;
	unsafe_put_user(ring->inflight.counter, &state->counter, fault);
	unsafe_put_user(1, &state->inflight, fault);
	user_write_access_end();
	ring->inflight.counter++;
	return true;
fault:
	user_write_access_end();
	return false;
}

/**
 * vhost_blk_inflight_untake - clears the mark of a request that is put back
 * @ring: the ring.
 * @head: the request's head. The request was noted last.
 */
void vhost_blk_inflight_untake(struct vhost_blk_ring *ring, u16 head)
{
	struct vhost_blk_region __user *region = ring->inflight.region;

	/*
	 * A mark that stays does no harm: a successor begins the request and
	 * continues with the next one.
	 */
	if (region && put_user(0, &region->desc[head].inflight))
		pr_debug("Cannot write to the in-flight region %p\n", region);
}

/* The parts of a batch that are noted. */
enum vhost_blk_note {
	/* The list through its heads. */
	VHOST_BLK_NOTE_LINK,
	/* The marks, which are cleared, and the used index. */
	VHOST_BLK_NOTE_CLEAR,
};

static bool vhost_blk_inflight_batch(struct vhost_blk_ring *ring, unsigned int count,
				     enum vhost_blk_note what)
{
	struct vhost_blk_region __user *region = ring->inflight.region;
	u16 last = ring->inflight.last_batch_head, head;
	struct vhost_virtqueue *vq = &ring->vq;
	unsigned int i;

	if (!region)
		return true;
	if (!user_write_access_begin(region, vhost_blk_region_bytes(&ring->inflight)))
		return false;
	for (i = 0; i < count; i++) {
		head = vhost32_to_cpu(vq, vq->heads[i].id);
		if (what == VHOST_BLK_NOTE_CLEAR) {
			unsafe_put_user(0, &region->desc[head].inflight, fault);
			continue;
		}
		unsafe_put_user(last, &region->desc[head].next, fault);
		unsafe_put_user(head, &region->last_batch_head, fault);
		last = head;
	}
	if (what == VHOST_BLK_NOTE_CLEAR)
		unsafe_put_user(vq->last_used_idx, &region->used_idx, fault);
	user_write_access_end();
	ring->inflight.last_batch_head = last;
	return true;
fault:
	user_write_access_end();
	return false;
}

/**
 * vhost_blk_inflight_link - notes which requests the used index will pass
 * @ring: the ring.
 * @count: the number of entries of @ring->vq.heads.
 *
 * Return: false if the region cannot be written. The used index must not pass
 * these requests then.
 */
bool vhost_blk_inflight_link(struct vhost_blk_ring *ring, unsigned int count)
{
	return vhost_blk_inflight_batch(ring, count, VHOST_BLK_NOTE_LINK);
}

/**
 * vhost_blk_inflight_clear - notes that the used index has passed requests
 * @ring: the ring.
 * @count: the number of entries of @ring->vq.heads.
 *
 * Return: false if the region cannot be written. A successor then finds these
 * requests by their list.
 */
bool vhost_blk_inflight_clear(struct vhost_blk_ring *ring, unsigned int count)
{
	return vhost_blk_inflight_batch(ring, count, VHOST_BLK_NOTE_CLEAR);
}

/**
 * vhost_blk_next_desc - gets the chain of the next request
 * @ring: the ring, notifications off.
 * @out: device-readable segments in @ring->vq.iov.
 * @in: device-writable segments after them.
 * @log_num: entries of @ring->vq.log.
 *
 * Requests of a former owner come first, then those of the ring.
 *
 * Return: as vhost_get_vq_desc().
 */
int vhost_blk_next_desc(struct vhost_blk_ring *ring, unsigned int *out, unsigned int *in,
			unsigned int *log_num)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct vhost_log *log = vhost_has_feature(vq, VHOST_F_LOG_ALL) ? vq->log : NULL;
	struct vring_avail __user *avail = vq->avail;
	u16 next = vq->last_avail_idx, seen = vq->avail_idx;
	int head;

	if (!ring->inflight.replays_left)
		return vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), out, in, log, log_num);
	/*
	 * The available ring may no longer have their heads. The core takes
	 * them from a list in the owner's memory instead, and checks them as
	 * usual.
	 */
	vq->avail = ring->inflight.replays;
	vq->avail_idx = ring->inflight.replay_num;
	vq->last_avail_idx = ring->inflight.replay_num - ring->inflight.replays_left;
	head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), out, in, log, log_num);
	vq->avail = avail;
	vq->avail_idx = seen;
	vq->last_avail_idx = next;
	return head;
}

/**
 * vhost_blk_replays_drop - drops the requests of a former owner not yet begun
 * @ring: the ring.
 *
 * Their marks stay in the region.
 */
void vhost_blk_replays_drop(struct vhost_blk_ring *ring)
{
	if (!ring->inflight.replays_left)
		return;
	if (ring->reqs)
		WRITE_ONCE(ring->in_flight, ring->in_flight - ring->inflight.replays_left);
	ring->inflight.replays_left = 0;
	if (!ring->in_flight && wq_has_sleeper(&ring->drained))
		wake_up(&ring->drained);
}
