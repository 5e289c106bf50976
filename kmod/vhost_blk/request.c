// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: a request (Virtio 1.3, 5.2.6).
 *
 * Begun by the worker in a turn, ended by it or by a drain, always under the ring's mutex; its bios
 * end in any context. Header, data and status lie in the chain as the driver likes: nothing here
 * assumes that a buffer starts or ends where a field does. Every address, length and number is the
 * guest's.
 *
 * The guest's pages are pinned for as long as the device works on them, and given back when the
 * request ends, which every request does exactly once.
 */
#include <linux/slab.h>

#include "blk.h"

/* No errno: nothing below can return it. */
#define VHOST_BLK_STALLED	1

static struct block_device *vhost_blk_bdev(struct vhost_blk_req *req)
{
	return req->ring->blk->disk.bdev;
}

/**
 * vhost_blk_in_bounds - whether sectors lie on a disk, as large as it is now
 * @bdev: the disk.
 * @sector: the first one.
 * @sectors: how many.
 */
bool vhost_blk_in_bounds(struct block_device *bdev, u64 sector, u64 sectors)
{
	u64 capacity = bdev_nr_sectors(bdev);

	return sector <= capacity && sectors <= capacity - sector;
}

static void vhost_blk_end_io(struct bio *bio)
{
	struct vhost_blk_req *req = container_of(bio, struct vhost_blk_bio, bio)->req;

	if (unlikely(bio->bi_status))
		vhost_blk_req_fail(req, bio->bi_status);
	vhost_blk_req_put(req);
}

/*
 * The request's first bio is part of it, if it is small. Others are allocated without a mempool:
 * they go back when the worker ends the request, and a worker that waits in a mempool for itself
 * would wait for ever.
 */
static struct vhost_blk_bio *vhost_blk_bio_new(struct vhost_blk_req *req, unsigned int vecs,
					       blk_opf_t opf)
{
	struct bio_vec *table = req->vecs;
	struct vhost_blk_bio *b = &req->first;

	BUILD_BUG_ON(sizeof(*b) + VHOST_BLK_BIO_VECS * sizeof(*table) > SZ_4K);
	if (vecs > VHOST_BLK_INLINE_VECS || req->bios) {
		b = kmalloc(sizeof(*b) + vecs * sizeof(*table), GFP_KERNEL_ACCOUNT);
		if (!b)
			return NULL;
		table = (struct bio_vec *)(b + 1);
	}
	bio_init(&b->bio, vhost_blk_bdev(req), table, vecs, opf);
	b->bio.bi_end_io = vhost_blk_end_io;
	b->req = req;
	b->next = NULL;
	return b;
}

static void vhost_blk_bio_free(struct vhost_blk_req *req, struct vhost_blk_bio *b)
{
	if (req->bounced)
		bio_free_pages(&b->bio);
	else
		bio_release_pages(&b->bio, req->type == VIRTIO_BLK_T_IN);
	bio_uninit(&b->bio);
	if (b != &req->first)
		kfree(b);
}

static void vhost_blk_bios_free(struct vhost_blk_req *req)
{
	struct vhost_blk_bio *b;

	while ((b = req->bios)) {
		req->bios = b->next;
		vhost_blk_bio_free(req, b);
	}
}

/* Fills a bio with pages of ours, which hold what is to be written. */
static int vhost_blk_bounce(struct bio *bio, struct iov_iter *data, bool write)
{
	struct page *page;
	size_t len;

	while (iov_iter_count(data) && bio->bi_vcnt < bio->bi_max_vecs) {
		len = min(iov_iter_count(data), PAGE_SIZE);
		page = alloc_page(GFP_KERNEL_ACCOUNT);
		if (!page)
			return -ENOMEM;
		__bio_add_page(bio, page, len, 0);
		if (!write)
			iov_iter_advance(data, len);
		else if (copy_page_from_iter(page, 0, len, data) != len)
			return -EFAULT;
	}
	return 0;
}

/* What was read, from our pages to where it belongs. */
static int vhost_blk_bounce_back(struct vhost_blk_req *req)
{
	struct bvec_iter_all iter;
	struct vhost_blk_bio *b;
	struct bio_vec *vec;
	size_t len;

	for (b = req->bios; b; b = b->next) {
		bio_for_each_segment_all(vec, &b->bio, iter) {
			len = vec->bv_len;
			if (copy_page_to_iter(vec->bv_page, 0, len, &req->bounce_to) != len)
				return -EFAULT;
		}
	}
	return 0;
}

/*
 * Makes the data into bios and submits them. On an error those that were submitted are waited for
 * as always.
 */
static int vhost_blk_submit(struct vhost_blk_req *req, struct iov_iter *data, sector_t sector)
{
	bool write = req->type == VIRTIO_BLK_T_OUT;
	/* As direct I/O does it: somebody waits for it. */
	blk_opf_t opf = write ? REQ_OP_WRITE | REQ_SYNC | REQ_IDLE : REQ_OP_READ;
	unsigned int block_mask = bdev_logical_block_size(vhost_blk_bdev(req)) - 1;
	struct vhost_blk_bio **tail = &req->bios, *b;
	unsigned int vecs;
	int err;

	while (iov_iter_count(data)) {
		if (req->bounced)
			vecs = DIV_ROUND_UP(iov_iter_count(data), PAGE_SIZE);
		else
			vecs = iov_iter_npages(data, VHOST_BLK_BIO_VECS);
		b = vhost_blk_bio_new(req, min(vecs, VHOST_BLK_BIO_VECS), opf);
		if (!b)
			return -ENOMEM;
		if (req->bounced)
			err = vhost_blk_bounce(&b->bio, data, write);
		else
			err = vhost_blk_pin(&b->bio, data, block_mask);
		if (err) {
			vhost_blk_bio_free(req, b);
			return err;
		}
		/*
		 * Stable before it is answered: by itself if it is one bio, else by one flush after
		 * all of them.
		 */
		if (req->flush_after && !req->bios && !iov_iter_count(data)) {
			b->bio.bi_opf |= REQ_FUA;
			req->flush_after = false;
		}
		b->bio.bi_iter.bi_sector = sector;
		sector += bio_sectors(&b->bio);
		*tail = b;
		tail = &b->next;
		atomic_inc(&req->pending);
		submit_bio(&b->bio);
	}
	return 0;
}

/* Whether the device can reach the data where it is, each segment by itself. */
static bool vhost_blk_aligned(struct block_device *bdev, const struct iov_iter *data)
{
	unsigned int len_mask = bdev_logical_block_size(bdev) - 1;
	unsigned int addr_mask = bdev_dma_alignment(bdev);
	struct iov_iter iter = *data;
	size_t len;

	while (iov_iter_count(&iter)) {
		len = iov_iter_single_seg_count(&iter);
		if (((unsigned long)iter_iov_addr(&iter) & addr_mask) || (len & len_mask))
			return false;
		iov_iter_advance(&iter, len);
	}
	return true;
}

/* Whether the ring may have that much more in flight; always if it has nothing. */
static bool vhost_blk_has_room(struct vhost_blk_ring *ring, size_t bytes, bool bounced)
{
	if (bounced && ring->bounce_bytes && ring->bounce_bytes + bytes > VHOST_BLK_BOUNCE_MAX)
		return false;
	return !ring->data_bytes || ring->data_bytes + bytes <= VHOST_BLK_DATA_MAX;
}

/*
 * IN and OUT. Returns 0 if all of it is on its way, a negative errno if not, and VHOST_BLK_STALLED,
 * without a trace, if it has to wait for others of its ring.
 */
static int vhost_blk_rw(struct vhost_blk_req *req, struct iov_iter *data, u64 sector)
{
	bool write = req->type == VIRTIO_BLK_T_OUT;
	struct vhost_blk_ring *ring = req->ring;
	struct block_device *bdev = vhost_blk_bdev(req);
	size_t bytes = iov_iter_count(data);
	unsigned int blocks = (bdev_logical_block_size(bdev) >> SECTOR_SHIFT) - 1;
	u64 sectors = bytes >> SECTOR_SHIFT;

	if (write && (ring->blk->disk.readonly || bdev_read_only(bdev)))
		return -EROFS;
	if ((bytes & (SECTOR_SIZE - 1)) || bytes > VHOST_BLK_DATA_MAX)
		return -EINVAL;
	if (!vhost_blk_in_bounds(bdev, sector, sectors))
		return -EINVAL;
	if ((sector | sectors) & blocks)
		return -EINVAL;
	if (!bytes)
		return 0;
	req->bounced = !vhost_blk_aligned(bdev, data);
	if (req->bounced && bytes > VHOST_BLK_BOUNCE_MAX)
		return -EINVAL;
	if (!vhost_blk_has_room(ring, bytes, req->bounced))
		return VHOST_BLK_STALLED;
	if (req->bounced && !write) {
		req->bounce_segs = dup_iter(&req->bounce_to, data, GFP_KERNEL_ACCOUNT);
		if (!req->bounce_segs)
			return -ENOMEM;
	}
	req->data_bytes = bytes;
	if (!write)
		req->written = bytes;
	req->flush_after = write && !vhost_has_feature(&ring->vq, VIRTIO_BLK_F_FLUSH);
	return vhost_blk_submit(req, data, sector);
}

static void vhost_blk_flush(struct vhost_blk_req *req)
{
	/* Without pages it is the bio that is part of the request. */
	struct vhost_blk_bio *b = vhost_blk_bio_new(req, 0, REQ_OP_WRITE | REQ_PREFLUSH | REQ_SYNC);

	req->bios = b;
	atomic_inc(&req->pending);
	submit_bio(&b->bio);
}

static int vhost_blk_get_id(struct vhost_blk_req *req, struct iov_iter *data)
{
	size_t len = min_t(size_t, iov_iter_count(data), VHOST_BLK_SERIAL_BYTES);

	if (copy_to_iter(req->ring->blk->disk.serial, len, data) != len)
		return -EFAULT;
	req->written = len;
	return 0;
}

/*
 * Keeps what a request may write, for when it has been written. @whole: all that the chain lets us
 * write, not only the status byte, which is its last one.
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
		/* Then nothing but the status is written. */
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

/* How a request ends that could not be started. */
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

/* Does what the header says. @data: what follows the header; @in: the device-writable segments. */
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
		/* Through us nothing was written to a read-only disk. */
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
 * @ring: the ring, its mutex held, in the worker.
 * @req: the slot, not busy, its head set.
 * @out: device-readable segments.
 * @in: device-writable ones after them.
 * @log_num: entries of @ring->vq.log, one for each writable descriptor; 0 if the log is off.
 *
 * Whatever is wrong with the request becomes its status. A chain without a writable byte has no
 * room for one: nothing is done for it, and it goes back with length 0, so that the ring goes on.
 *
 * Return: bytes of data; -EAGAIN: not begun, has to wait until others of the ring have ended.
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
		/* No segment is empty: the core makes none of an empty descriptor. */
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
		 * Pages are not pinned for a task that is to die. That is no fault of the disk's.
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

/* What has to follow the bios that are done. False: nothing. */
static bool vhost_blk_req_goes_on(struct vhost_blk_req *req)
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
 * The status, and the dirty log, which covers whatever part of the data was written. Returns the
 * used length.
 */
static u32 vhost_blk_req_tell(struct vhost_blk_req *req)
{
	struct vhost_virtqueue *vq = &req->ring->vq;

	if (!req->status_at)
		return 0;
	if (put_user(req->status, req->status_at))
		vq_err(vq, "Cannot write a status to %p\n", req->status_at);
	/* Not for nothing: of more bytes than it is told ranges of, the core makes a BUG. */
	if (req->log_num &&
	    vhost_log_write(vq, req->log, req->log_num, req->log_bytes, NULL, 0) < 0)
		vq_err(vq, "Cannot write the dirty log\n");
	return 1 + (req->status == VIRTIO_BLK_S_OK ? req->written : 0);
}

/**
 * vhost_blk_req_end - ends a request whose bios are done
 * @req: the request, the ring's mutex held.
 * @tell: the owner's memory can be written to.
 * @used_len: what goes into the used ring.
 *
 * Return: false if there is more to do first; it is on its way then.
 */
bool vhost_blk_req_end(struct vhost_blk_req *req, bool tell, u32 *used_len)
{
	struct vhost_blk_ring *ring = req->ring;

	bool good = tell && req->status == VIRTIO_BLK_S_OK;

	if (good && !req->error && req->bounce_segs && vhost_blk_bounce_back(req))
		vhost_blk_req_fail(req, BLK_STS_IOERR);
	vhost_blk_bios_free(req);
	if (good && vhost_blk_req_goes_on(req))
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
