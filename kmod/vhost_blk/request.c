// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: a request (Virtio 1.3, 5.2.6).
 *
 * The worker begins a request in an iteration. The worker or a drain ends it.
 * Both hold the ring's mutex. Its bios end in any context. The driver chooses
 * how header, data and status lie in the chain: this code does not assume that
 * a buffer starts or ends where a field does. The guest chooses every address,
 * length and number.
 *
 * The guest's pages are pinned while the device works on them. They are
 * released when the request ends. Each request ends exactly once.
 */
#include <linux/slab.h>

#include "blk.h"

static int vhost_blk_get_id(struct vhost_blk_req *req, struct iov_iter *data)
{
	size_t len = min_t(size_t, iov_iter_count(data), VHOST_BLK_SERIAL_BYTES);

	if (copy_to_iter(req->ring->blk->disk.serial, len, data) != len)
		return -EFAULT;
	req->written = len;
	return 0;
}

/*
 * Keeps the ranges that a request may write, for the dirty log at its end.
 * @whole: all device-writable bytes of the chain. If false, only the status
 * byte, which is the last one.
 */
static int vhost_blk_log_keep(struct vhost_blk_req *req, unsigned int num, bool whole, size_t bytes)
{
	const struct vhost_log *log = req->ring->vq.log;
	int err = 0;

	if (!num)
		return 0;
	req->log = req->log_inline;
	if (whole && num > ARRAY_SIZE(req->log_inline)) {
		req->log = kmemdup_array(log, num, sizeof(*log), GFP_KERNEL_ACCOUNT);
		if (req->log) {
			req->log_num = num;
			req->log_bytes = bytes;
			return 0;
		}
		/* Only the status is written in this case. */
		req->log = req->log_inline;
		whole = false;
		err = -ENOMEM;
	}
	if (whole) {
		memcpy(req->log, log, num * sizeof(*log));
		req->log_num = num;
		req->log_bytes = bytes;
	} else {
		req->log[0].addr = log[num - 1].addr + log[num - 1].len - 1;
		req->log[0].len = 1;
		req->log_num = 1;
		req->log_bytes = 1;
	}
	return err;
}

static void vhost_blk_log_free(struct vhost_blk_req *req)
{
	if (req->log != req->log_inline)
		kfree(req->log);
	req->log = NULL;
	req->log_num = 0;
}

/* The status of a request that could not be started. */
static u8 vhost_blk_status(int err)
{
	if (!err)
		return VIRTIO_BLK_S_OK;
	return err == -EOPNOTSUPP ? VIRTIO_BLK_S_UNSUPP : VIRTIO_BLK_S_IOERR;
}

static void vhost_blk_req_reset(struct vhost_blk_req *req, struct vhost_blk_ring *ring)
{
	req->ring = ring;
	req->error = BLK_STS_OK;
	req->lost = false;
	req->flush_after = false;
	req->bounced = false;
	req->status = VIRTIO_BLK_S_OK;
	req->type = U32_MAX;
	req->written = 0;
	req->data_bytes = 0;
	req->status_at = NULL;
	req->bios = NULL;
	req->bounce_segs = NULL;
	req->ranges = NULL;
	req->ranges_left = 0;
	req->log = NULL;
	req->log_num = 0;
	atomic_set(&req->pending, 1);
}

/*
 * Executes the command in the header. @data: the data after the header. @in:
 * the device-writable segments.
 */
static int vhost_blk_dispatch(struct vhost_blk_req *req, u64 sector, struct iov_iter *data,
			      struct iovec *in, unsigned int in_num, size_t in_len)
{
	struct iov_iter to;
	int err;

	iov_iter_init(&to, ITER_DEST, in, in_num, in_len);
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		return vhost_blk_rw(req, &to, sector);
	case VIRTIO_BLK_T_OUT:
		return vhost_blk_rw(req, data, sector);
	case VIRTIO_BLK_T_FLUSH:
		/* The module has written nothing to a read-only disk. */
		if (!req->ring->blk->disk.readonly)
			vhost_blk_flush(req);
		return 0;
	case VIRTIO_BLK_T_GET_ID:
		return vhost_blk_get_id(req, &to);
	case VIRTIO_BLK_T_DISCARD:
	case VIRTIO_BLK_T_WRITE_ZEROES:
		err = vhost_blk_ranges_parse(req, data);
		if (!err)
			vhost_blk_range_step(req);
		return err;
	default:
		return -EOPNOTSUPP;
	}
}

/**
 * vhost_blk_req_begin - starts the request in @ring->vq.iov
 * @ring: the ring. The worker calls this and holds its mutex.
 * @req: the slot, not busy, its head set.
 * @out: device-readable segments.
 * @in: device-writable segments after them.
 * @log_num: entries of @ring->vq.log, one for each writable descriptor. 0 if
 *	the log is off.
 *
 * An error of the request becomes its status. A chain without a writable byte
 * has no room for a status. It is not executed and is put back with length 0,
 * so that the ring continues.
 *
 * Return: bytes of data. -EAGAIN if the request was not begun, because it has
 *	to wait until others of the ring have ended.
 */
int vhost_blk_req_begin(struct vhost_blk_ring *ring, struct vhost_blk_req *req, unsigned int out,
			unsigned int in, unsigned int log_num)
{
	struct vhost_virtqueue *vq = &ring->vq;
	struct iovec *in_iov = vq->iov + out;
	size_t in_len = iov_length(in_iov, in);
	struct virtio_blk_outhdr header = {};
	struct iov_iter data;
	bool whole;
	int err;

	vhost_blk_req_reset(req, ring);
	iov_iter_init(&data, ITER_SOURCE, vq->iov, out, iov_length(vq->iov, out));
	err = -EINVAL;
	if (in_len) {
		/* No segment is empty: the core skips empty descriptors. */
		req->status_at = (u8 __user *)in_iov[in - 1].iov_base + in_iov[in - 1].iov_len - 1;
		if (copy_from_iter_full(&header, sizeof(header), &data)) {
			req->type = vhost32_to_cpu(vq, header.type);
			err = 0;
		}
		whole = req->type == VIRTIO_BLK_T_IN || req->type == VIRTIO_BLK_T_GET_ID;
		if (vhost_blk_log_keep(req, log_num, whole, in_len))
			err = -ENOMEM;
	}
	if (!err)
		err = vhost_blk_dispatch(req, vhost64_to_cpu(vq, header.sector), &data, in_iov, in,
					 in_len - 1);
	if (err == VHOST_BLK_STALLED) {
		vhost_blk_log_free(req);
		ring->stalled = true;
		return -EAGAIN;
	}
	if (err) {
		req->status = vhost_blk_status(err);
		/*
		 * A dying task cannot pin pages. That is no error of the disk.
		 */
		req->lost = vhost_blk_owner_dies();
	}
	req->busy = true;
	WRITE_ONCE(ring->in_flight, ring->in_flight + 1);
	ring->data_bytes += req->data_bytes;
	if (req->bounced)
		ring->bounce_bytes += req->data_bytes;
	err = req->data_bytes;
	vhost_blk_req_put(req);
	return err;
}

/*
 * Starts what has to follow the bios that are done. Returns false if there is
 * nothing.
 */
static bool vhost_blk_req_continues(struct vhost_blk_req *req)
{
	atomic_set(&req->pending, 1);
	if (!vhost_blk_range_step(req)) {
		if (req->error || !req->flush_after)
			return false;
		req->flush_after = false;
		vhost_blk_flush(req);
	}
	vhost_blk_req_put(req);
	return true;
}

/*
 * Writes the status and the dirty log. The log covers the data even if only a
 * part of it was written. Returns the used length.
 */
static u32 vhost_blk_req_tell(struct vhost_blk_req *req)
{
	struct vhost_virtqueue *vq = &req->ring->vq;

	if (!req->status_at)
		return 0;
	/*
	 * If the owner has no memory there, the guest sees no status. That is
	 * no reason to stop its ring.
	 */
	if (put_user(req->status, req->status_at)) {
		pr_debug("Cannot write a status to %p\n", req->status_at);
		req->lost = vhost_blk_owner_dies();
	}
	/* Skip an empty log: the core would call BUG(). */
	if (req->log_num &&
	    vhost_log_write(vq, req->log, req->log_num, req->log_bytes, NULL, 0) < 0) {
		vq_err(vq, "Cannot write the dirty log\n");
		vhost_blk_break(req->ring);
	}
	return 1 + (req->status == VIRTIO_BLK_S_OK ? req->written : 0);
}

/**
 * vhost_blk_req_end - ends a request whose bios are done
 * @req: the request. The caller holds the ring's mutex.
 * @tell: the owner's memory can be written to.
 * @used_len: the length for the used ring.
 *
 * Return: false if more bios have to follow. They are in flight then.
 */
bool vhost_blk_req_end(struct vhost_blk_req *req, bool tell, u32 *used_len)
{
	struct vhost_blk_ring *ring = req->ring;

	bool good = tell && req->status == VIRTIO_BLK_S_OK;

	if (good && !req->error && req->bounce_segs && vhost_blk_bounce_back(req)) {
		/* A dying task cannot fault pages in. */
		req->lost = vhost_blk_owner_dies();
		vhost_blk_req_fail(req, BLK_STS_IOERR);
	}
	vhost_blk_bios_free(req);
	if (good && vhost_blk_req_continues(req))
		return false;
	if (good && req->error)
		req->status = vhost_blk_status(blk_status_to_errno(req->error));

	ring->data_bytes -= req->data_bytes;
	if (req->bounced)
		ring->bounce_bytes -= req->data_bytes;
	*used_len = tell && !req->lost ? vhost_blk_req_tell(req) : 0;
	vhost_blk_ranges_free(req);
	vhost_blk_log_free(req);
	kfree(req->bounce_segs);
	req->bounce_segs = NULL;
	return true;
}
