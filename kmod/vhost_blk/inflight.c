// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: what a ring has in flight, noted where a restart of its owner finds it (vhost-user
 * protocol, "Inflight I/O tracking"), and the requests that a former owner left behind.
 *
 * The region is the owner's memory and shared with its front end. Nothing is read from it: what
 * the notes depend on is kept in the kernel. An owner that is killed loses no store that was
 * executed, so the order of the program is the order that matters:
 *
 *   a request is taken     its counter, then its mark; then it starts
 *   a batch is put back    a list through its heads; then the used index; then the marks go, and
 *                          the used index is noted
 *
 * The caller holds the ring's mutex and runs in the owner's address space.
 */
#include "blk.h"

/*
 * QueueRegionSplit and DescStateSplit of the protocol. Fields are the host's byte order, and none
 * is read here.
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
 * vhost_blk_inflight_set - where a stopped ring is to note what it has in flight
 * @ring: the ring.
 * @from: what the owner asks for; its size and index were looked at.
 *
 * Return: 0, -EBUSY: the ring runs, -EINVAL, -EFAULT: no addresses of user space.
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
 * vhost_blk_inflight_fits - whether the ring, as large as it is now, can be noted
 * @ring: the ring.
 *
 * A former owner had no more in flight than the ring has descriptors. The core reads the list of
 * its requests as it reads an available ring, whose entries are as many.
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
 * Return: false if it cannot be noted; then it must not start.
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
 * vhost_blk_inflight_untake - a request that was noted last goes back to where it was taken from
 * @ring: the ring.
 * @head: the request's head.
 */
void vhost_blk_inflight_untake(struct vhost_blk_ring *ring, u16 head)
{
	struct vhost_blk_region __user *region = ring->inflight.region;

	/* A mark that stays does no harm: a successor begins the request, and goes on behind it. */
	if (region && put_user(0, &region->desc[head].inflight))
		pr_debug("Cannot write to the in-flight region %p\n", region);
}

/* What is noted of a batch. */
enum vhost_blk_note {
	/* A list through its heads. */
	VHOST_BLK_NOTE_LINK,
	/* Their marks go, and the used index. */
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
 * vhost_blk_inflight_link - notes which requests the used index is about to pass
 * @ring: the ring.
 * @count: the first so many of @ring->vq.heads.
 *
 * Return: false if that cannot be noted; then the used index must not pass them.
 */
bool vhost_blk_inflight_link(struct vhost_blk_ring *ring, unsigned int count)
{
	return vhost_blk_inflight_batch(ring, count, VHOST_BLK_NOTE_LINK);
}

/**
 * vhost_blk_inflight_clear - notes that the used index has passed requests
 * @ring: the ring.
 * @count: the first so many of @ring->vq.heads.
 *
 * Return: false if that cannot be noted; a successor finds it by their list.
 */
bool vhost_blk_inflight_clear(struct vhost_blk_ring *ring, unsigned int count)
{
	return vhost_blk_inflight_batch(ring, count, VHOST_BLK_NOTE_CLEAR);
}

/**
 * vhost_blk_next_desc - the next request's chain: of what a former owner left, then of the ring
 * @ring: the ring, notifications off.
 * @out: device-readable segments in @ring->vq.iov.
 * @in: device-writable ones after them.
 * @log_num: entries of @ring->vq.log.
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
	 * Their heads may be gone from the available ring by now. The core takes them from a list
	 * in the owner's memory instead, and checks them as always.
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
 * vhost_blk_replays_drop - gives up the requests of a former owner that were not begun
 * @ring: the ring.
 *
 * Their marks stay.
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
