// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: the life cycle of a ring.
 *
 * The vhost worker that the ring is attached to runs its iterations. Completions
 * come from any context and are put on a lockless list. The worker takes the
 * whole list at once. It then stores the used index once and checks once
 * whether the guest wants a notification.
 *
 * The worker may be dead: a SIGKILL of the owner ends the vhost workers first
 * (struct vhost_worker.killed). Work that is queued after that never runs. A
 * drain therefore waits for bios, not for the worker, and finishes requests
 * itself.
 */
#include <linux/slab.h>
#include <linux/virtio_ring.h>

#include "blk.h"

static struct vhost_blk_ring *vhost_blk_ring_of(struct vhost_virtqueue *vq)
{
	return container_of(vq, struct vhost_blk_ring, vq);
}

/* The owner reads counters without the lock. Writers hold the ring's mutex. */
static void vhost_blk_count(__u64 *counter, u64 by)
{
	WRITE_ONCE(*counter, *counter + by);
}

/**
 * vhost_blk_break - takes no more requests from an invalid ring
 * @ring: the ring. The caller holds its mutex.
 *
 * The ring stays broken until the owner stops it. Requests in flight are
 * finished.
 */
void vhost_blk_break(struct vhost_blk_ring *ring)
{
	ring->hold |= VHOST_BLK_HOLD_BROKEN;
	vhost_blk_replays_drop(ring);
}

/*
 * The same test as in vhost_signal(), which does not return its result. The
 * guest asks for interrupts by a flag or, with EVENT_IDX, by the index that it
 * waits for.
 */
static bool vhost_blk_signal_wanted(struct vhost_virtqueue *vq)
{
	__virtio16 word;
	u16 old, new;
	bool valid;

	/*
	 * Store the used index before reading the guest's word. The guest
	 * writes the word before it reads the used index.
	 */
	smp_mb();
	if (!vhost_has_feature(vq, VIRTIO_RING_F_EVENT_IDX)) {
		if (get_user(word, &vq->avail->flags))
			return true;
		return !(word & cpu_to_vhost16(vq, VRING_AVAIL_F_NO_INTERRUPT));
	}
	old = vq->signalled_used;
	valid = vq->signalled_used_valid;
	new = vq->last_used_idx;
	vq->signalled_used = new;
	vq->signalled_used_valid = true;
	if (!valid || get_user(word, (__virtio16 __user *)&vq->avail->ring[vq->num]))
		return true;
	return vring_need_event(vhost16_to_cpu(vq, word), new, old);
}

static void vhost_blk_signal(struct vhost_blk_ring *ring)
{
	struct vhost_virtqueue *vq = &ring->vq;

	if (vq->call_ctx.ctx && vhost_blk_signal_wanted(vq)) {
		eventfd_signal(vq->call_ctx.ctx);
		vhost_blk_count(&ring->stats.signals, 1);
	}
}

static void vhost_blk_account(struct vhost_blk_ring *ring, struct vhost_blk_req *req)
{
	struct vhost_blk_vring_stats *stats = &ring->stats;

	vhost_blk_count(&stats->requests, 1);
	if (req->status == VIRTIO_BLK_S_IOERR)
		vhost_blk_count(&stats->errors, 1);
	else if (req->status == VIRTIO_BLK_S_UNSUPP)
		vhost_blk_count(&stats->unsupported, 1);
	else if (req->type == VIRTIO_BLK_T_IN)
		vhost_blk_count(&stats->read_bytes, req->data_bytes);
	else if (req->type == VIRTIO_BLK_T_OUT)
		vhost_blk_count(&stats->written_bytes, req->data_bytes);
}

/*
 * Puts the first @count of vq->heads into the used ring. Requests that cannot
 * be noted are not put there. A successor would repeat them, in buffers that
 * the guest uses for something else by then.
 */
static void vhost_blk_put_used(struct vhost_blk_ring *ring, unsigned int count)
{
	if (!vhost_blk_inflight_link(ring, count)) {
		vq_err(&ring->vq, "Cannot write to the in-flight region\n");
		vhost_blk_break(ring);
		return;
	}
	if (vhost_blk_add_used(&ring->vq, count)) {
		vhost_blk_break(ring);
	} else if (!vhost_blk_inflight_clear(ring, count)) {
		vq_err(&ring->vq, "Cannot write to the in-flight region\n");
		vhost_blk_break(ring);
	}
	vhost_blk_signal(ring);
}

/*
 * Finishes the requests that are done, under the ring's mutex. @tell: the
 * guest's memory can be written to, and current->mm is the owner's.
 */
static void vhost_blk_reap(struct vhost_blk_ring *ring, bool tell)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct llist_node *list = llist_del_all(&ring->done);
	struct vhost_blk_req *req, *next;
	unsigned int count = 0;
	u32 used_len;

	if (!list)
		return;
	/* A worker that still lives need not finish a long request either. */
	if (ring->hold & VHOST_BLK_HOLD_DROP)
		tell = false;
	/* In the order of completion. */
	list = llist_reverse_order(list);
	llist_for_each_entry_safe(req, next, list, done) {
		if (!vhost_blk_req_end(req, tell, &used_len))
			continue;
		if (tell && !req->lost) {
			/* It has UIO_MAXIOV entries, enough for a ring. */
			vq->heads[count].id = cpu_to_vhost32(vq, req->head);
			vq->heads[count].len = cpu_to_vhost32(vq, used_len);
			count++;
			vhost_blk_account(ring, req);
		}
		req->busy = false;
		WRITE_ONCE(ring->in_flight, ring->in_flight - 1);
	}
	if (count)
		vhost_blk_put_used(ring, count);
	if (ring->stalled) {
		ring->stalled = false;
		ring->requeued = true;
		vhost_poll_queue(&vq->poll);
	}
	if (!ring->in_flight && wq_has_sleeper(&ring->drained))
		wake_up(&ring->drained);
}

/*
 * Takes one request. Returns its bytes of data. Returns -EAGAIN if no request
 * can be taken, for now or until the ring is stopped.
 */
static int vhost_blk_take(struct vhost_blk_ring *ring)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct vhost_blk_req *req;
	unsigned int out, in, log_num = 0;
	bool replay = ring->inflight.replays_left;
	int head, bytes;

	head = vhost_blk_next_desc(ring, &out, &in, &log_num);
	if (head < 0) {
		/* The core has signalled the error. */
		vhost_blk_break(ring);
		return -EAGAIN;
	}
	if (head == vq->num) {
		/*
		 * The guest kicks from here on. Look again for requests that it
		 * added before.
		 */
		if (!vhost_enable_notify(vq->dev, vq))
			return -EAGAIN;
		vhost_disable_notify(vq->dev, vq);
		return 0;
	}
	req = &ring->reqs[head];
	if (req->busy) {
		/*
		 * Two requests have the same head. The guest could not tell
		 * which one is done, and the slot is in use.
		 */
		if (!replay)
			vhost_blk_put_back(vq);
		vq_err(vq, "Head %d is in flight already\n", head);
		vhost_blk_break(ring);
		return -EAGAIN;
	}
	/* A request that is begun again has its mark and keeps its number. */
	if (!replay && !vhost_blk_inflight_take(ring, head)) {
		vhost_blk_put_back(vq);
		vq_err(vq, "Cannot write to the in-flight region\n");
		vhost_blk_break(ring);
		return -EAGAIN;
	}
	req->head = head;
	bytes = vhost_blk_req_begin(ring, req, out, in, log_num);
	if (bytes < 0 && !replay) {
		vhost_blk_inflight_untake(ring, head);
		vhost_blk_put_back(vq);
	}
	if (bytes >= 0 && replay) {
		/* It was counted when the ring started, and again now. */
		ring->inflight.replays_left--;
		WRITE_ONCE(ring->in_flight, ring->in_flight - 1);
	}
	return bytes;
}

/*
 * Requests of a former owner are in flight. They are begun even if the ring is
 * held, so that they can end.
 */
static bool vhost_blk_takes(struct vhost_blk_ring *ring)
{
	return ring->reqs && (!ring->hold || ring->inflight.replays_left);
}

/* Takes requests up to the budget of an iteration, under one plug. */
static void vhost_blk_take_some(struct vhost_blk_ring *ring)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct blk_plug plug;
	int count = 0, bytes = 0, got;

	blk_start_plug(&plug);
	vhost_disable_notify(vq->dev, vq);
	for (;;) {
		/*
		 * A dying owner takes no requests. A restarted owner or a
		 * successor finds them in the ring.
		 */
		if (vhost_blk_owner_dies() || !vhost_blk_takes(ring))
			break;
		got = vhost_blk_take(ring);
		if (got < 0)
			break;
		count++;
		bytes += got;
		if (vhost_exceeds_weight(vq, count, bytes)) {
			ring->requeued = true;
			break;
		}
	}
	blk_finish_plug(&plug);
}

/*
 * A worker's iteration for a ring, under its mutex. Its end sees
 * completions that came during it, so they need not wake the worker.
 */
static void vhost_blk_iterate(struct vhost_blk_ring *ring, bool take)
{
	WRITE_ONCE(ring->in_iteration, true);
	if (take)
		vhost_blk_take_some(ring);
	vhost_blk_reap(ring, true);
	WRITE_ONCE(ring->in_iteration, false);
	/*
	 * Pairs with llist_add() in vhost_blk_req_done(): one side sees the
	 * other.
	 */
	smp_mb();
	if (!llist_empty(&ring->done))
		vhost_vq_work_queue(&ring->vq, &ring->done_work);
}

static void vhost_blk_kick(struct vhost_work *work)
{
	struct vhost_virtqueue *vq = container_of(work, struct vhost_virtqueue, poll.work);
	struct vhost_blk_ring *ring = vhost_blk_ring_of(vq);
	bool take;

	mutex_lock(&vq->mutex);
	take = vhost_blk_takes(ring);
	if (take && !ring->requeued)
		vhost_blk_count(&ring->stats.kicks, 1);
	ring->requeued = false;
	vhost_blk_iterate(ring, take);
	mutex_unlock(&vq->mutex);
}

static void vhost_blk_done(struct vhost_work *work)
{
	struct vhost_blk_ring *ring = container_of(work, struct vhost_blk_ring, done_work);

	mutex_lock(&ring->vq.mutex);
	vhost_blk_iterate(ring, false);
	mutex_unlock(&ring->vq.mutex);
}

/**
 * vhost_blk_req_done - hands over a request that has no bio in flight
 * @req: the request. It does not belong to the caller any more, and its slot
 *	may be freed at once.
 *
 * The worker or a drain finishes the request.
 *
 * Context: any. After the hand-over this uses only the ring, which lives until
 *	an RCU grace period after the drain has passed.
 */
void vhost_blk_req_done(struct vhost_blk_req *req)
{
	struct vhost_blk_ring *ring = req->ring;

	rcu_read_lock();
	if (llist_add(&req->done, &ring->done) && !READ_ONCE(ring->in_iteration))
		vhost_vq_work_queue(&ring->vq, &ring->done_work);
	/*
	 * llist_add() orders this test after the add. A waiter enters the wait
	 * queue before it looks at the list.
	 */
	if (waitqueue_active(&ring->drained))
		wake_up(&ring->drained);
	rcu_read_unlock();
}

void vhost_blk_ring_init(struct vhost_blk *blk, struct vhost_blk_ring *ring)
{
	ring->blk = blk;
	ring->vq.handle_kick = vhost_blk_kick;
	init_llist_head(&ring->done);
	vhost_work_init(&ring->done_work, vhost_blk_done);
	init_waitqueue_head(&ring->drained);
}

/**
 * vhost_blk_ring_start - starts a ring
 * @ring: the ring, stopped. The caller holds vhost_dev.mutex.
 *
 * Return: 0. -EINVAL if it has too many descriptors for the module or for the
 *	in-flight region. -EFAULT if its addresses are not in the memory table.
 *	-ENOMEM.
 */
int vhost_blk_ring_start(struct vhost_blk_ring *ring)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct vhost_blk_req *reqs;
	int err = 0;

	BUILD_BUG_ON(VHOST_BLK_VRING_NUM_MAX > UIO_MAXIOV);
	/* vq->num changes under vhost_dev.mutex only. */
	if (vq->num > VHOST_BLK_VRING_NUM_MAX || !vhost_blk_inflight_fits(ring))
		return -EINVAL;
	reqs = kvcalloc(vq->num, sizeof(*reqs), GFP_KERNEL_ACCOUNT);
	if (!reqs)
		return -ENOMEM;
	mutex_lock(&vq->mutex);
	if (!vhost_vq_is_setup(vq)) {
		err = -EFAULT;
		goto out;
	}
	vhost_vq_set_backend(vq, ring);
	err = vhost_vq_init_access(vq);
	if (err) {
		vhost_vq_set_backend(vq, NULL);
		goto out;
	}
	swap(ring->reqs, reqs);
	ring->num = vq->num;
	ring->hold = 0;
	ring->stalled = false;
	WRITE_ONCE(ring->in_flight, ring->inflight.replays_left);
	WRITE_ONCE(ring->stats.running, 1);
out:
	mutex_unlock(&vq->mutex);
	kvfree(reqs);
	/* A kick may have come before the start. */
	if (!err)
		vhost_poll_queue(&vq->poll);
	return err;
}

/**
 * vhost_blk_ring_hold - stops a ring from taking requests
 * @ring: the ring.
 * @why: VHOST_BLK_HOLD_*.
 *
 * When this returns, no iteration takes requests any more.
 */
void vhost_blk_ring_hold(struct vhost_blk_ring *ring, unsigned int why)
{
	mutex_lock(&ring->vq.mutex);
	ring->hold |= why;
	if (why & VHOST_BLK_HOLD_DROP)
		vhost_blk_replays_drop(ring);
	mutex_unlock(&ring->vq.mutex);
}

/**
 * vhost_blk_ring_unhold - lets a ring take requests if nothing else holds it
 * @ring: the ring.
 * @why: VHOST_BLK_HOLD_*.
 */
void vhost_blk_ring_unhold(struct vhost_blk_ring *ring, unsigned int why)
{
	mutex_lock(&ring->vq.mutex);
	ring->hold &= ~why;
	ring->requeued = true;
	mutex_unlock(&ring->vq.mutex);
	vhost_poll_queue(&ring->vq.poll);
}

/* A worker that still lives may finish requests as well. */
static bool vhost_blk_drain_ready(struct vhost_blk_ring *ring)
{
	return !llist_empty(&ring->done) || !READ_ONCE(ring->in_flight);
}

/**
 * vhost_blk_drain - waits until a held ring has no request in flight
 * @ring: the ring. It is held, so that it takes no new requests. The caller
 *	holds vhost_dev.mutex.
 * @how: whether results are reported and a signal ends the wait.
 *
 * Return: 0, or -EINTR after a fatal signal. The ring is then still held, and
 *	its worker, if it lives, continues.
 */
int vhost_blk_drain(struct vhost_blk_ring *ring, enum vhost_blk_drain how)
{
	unsigned int left;

	ring->late = true;
	for (;;) {
		mutex_lock(&ring->vq.mutex);
		vhost_blk_reap(ring, how != VHOST_BLK_DRAIN_DROP);
		left = ring->in_flight;
		mutex_unlock(&ring->vq.mutex);
		if (!left)
			return 0;
		if (how == VHOST_BLK_DRAIN_DROP)
			wait_event(ring->drained, vhost_blk_drain_ready(ring));
		else if (wait_event_killable(ring->drained, vhost_blk_drain_ready(ring)))
			return -EINTR;
	}
}

/**
 * vhost_blk_ring_stop - stops a ring
 * @ring: the ring, in any state. The caller holds vhost_dev.mutex.
 * @how: how to drain it.
 *
 * Return: 0, or -EINTR after a fatal signal. The ring then takes no requests,
 *	but is not stopped.
 */
int vhost_blk_ring_stop(struct vhost_blk_ring *ring, enum vhost_blk_drain how)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct vhost_blk_req *reqs = NULL;
	int err;

	if (!ring->reqs)
		return 0;
	vhost_blk_ring_hold(ring, VHOST_BLK_HOLD_STOP);
	err = vhost_blk_drain(ring, how);
	if (err)
		return err;
	mutex_lock(&vq->mutex);
	swap(ring->reqs, reqs);
	vhost_vq_set_backend(vq, NULL);
	WRITE_ONCE(ring->stats.running, 0);
	mutex_unlock(&vq->mutex);
	kvfree(reqs);
	return 0;
}
