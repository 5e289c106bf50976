// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: DISCARD and WRITE_ZEROES.
 *
 * A range can be as large as the disk. If a device cannot write zeroes by
 * itself, the block layer writes pages of zeroes. A range is therefore split
 * into steps. The worker begins a step when the one before is completed. The
 * worker can serve its rings in between, and the amount in flight stays small.
 */
#include <linux/slab.h>

#include "blk.h"

/*
 * Limits of a step: bios if the device executes each at once, else bytes of
 * zeroes.
 */
#define VHOST_BLK_STEP_BIOS	64
#define VHOST_BLK_STEP_BYTES	SZ_16M

static void vhost_blk_range_end_io(struct bio *bio)
{
	struct vhost_blk_req *req = bio->bi_private;

	if (unlikely(bio->bi_status))
		vhost_blk_req_fail(req, bio->bi_status);
	bio_put(bio);
	vhost_blk_req_put(req);
}

/* Reads and checks one range of the driver. */
static int vhost_blk_range_parse(struct vhost_blk_req *req, struct vhost_blk_range *range,
				 struct iov_iter *data)
{
	struct block_device *bdev = vhost_blk_bdev(req);
	unsigned int blocks = (bdev_logical_block_size(bdev) >> SECTOR_SHIFT) - 1;
	struct virtio_blk_discard_write_zeroes given;
	u32 flags;

	if (!copy_from_iter_full(&given, sizeof(given), data))
		return -EFAULT;
	range->sector = le64_to_cpu(given.sector);
	range->sectors = le32_to_cpu(given.num_sectors);
	flags = le32_to_cpu(given.flags);
	/*
	 * 5.2.6.2: unknown flags, and the unmap flag on a discard, are not
	 * supported.
	 */
	if (flags & ~VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP)
		return -EOPNOTSUPP;
	range->unmap = flags;
	if (range->unmap && req->type == VIRTIO_BLK_T_DISCARD)
		return -EOPNOTSUPP;
	if (!vhost_blk_in_bounds(bdev, range->sector, range->sectors))
		return -EINVAL;
	if ((range->sector | range->sectors) & blocks)
		return -EINVAL;
	return 0;
}

/**
 * vhost_blk_ranges_parse - reads all ranges of a DISCARD or WRITE_ZEROES
 * @req: the request.
 * @data: the data after the request's header.
 *
 * It reads and checks all ranges before the first one is executed.
 *
 * Return: 0, -EOPNOTSUPP, or another errno if a range is invalid.
 */
int vhost_blk_ranges_parse(struct vhost_blk_req *req, struct iov_iter *data)
{
	bool discard = req->type == VIRTIO_BLK_T_DISCARD;
	struct vhost_blk_disk *disk = &req->ring->blk->disk;
	struct vhost_virtqueue *vq = &req->ring->vq;
	size_t bytes = iov_iter_count(data);
	unsigned int i, num = bytes / sizeof(struct virtio_blk_discard_write_zeroes);
	int err;

	if (!vhost_has_feature(vq, discard ? VIRTIO_BLK_F_DISCARD : VIRTIO_BLK_F_WRITE_ZEROES))
		return -EOPNOTSUPP;
	if (discard && !bdev_max_discard_sectors(disk->bdev))
		return -EOPNOTSUPP;
	if (!bytes || bytes % sizeof(struct virtio_blk_discard_write_zeroes) ||
	    bytes > VHOST_BLK_RANGES_MAX * sizeof(struct virtio_blk_discard_write_zeroes))
		return -EINVAL;
	req->ranges = &req->range;
	if (num > 1) {
		req->ranges = kmalloc_array(num, sizeof(*req->ranges), GFP_KERNEL_ACCOUNT);
		if (!req->ranges)
			return -ENOMEM;
	}
	for (i = 0; i < num; i++) {
		err = vhost_blk_range_parse(req, &req->ranges[i], data);
		if (err)
			return err;
	}
	if (disk->readonly || bdev_read_only(disk->bdev))
		return -EROFS;
	req->range_at = req->ranges;
	req->ranges_left = num;
	req->step = 0;
	/* Discarded sectors may have any content, before and after a crash. */
	req->flush_after = !discard && !vhost_has_feature(vq, VIRTIO_BLK_F_FLUSH);
	return 0;
}

void vhost_blk_ranges_free(struct vhost_blk_req *req)
{
	if (req->ranges != &req->range)
		kfree(req->ranges);
	req->ranges = NULL;
	req->ranges_left = 0;
}

/* The number of sectors in the next step of a range. */
static sector_t vhost_blk_step_sectors(struct vhost_blk_req *req, struct vhost_blk_range *range)
{
	struct block_device *bdev = vhost_blk_bdev(req);
	sector_t block = bdev_logical_block_size(bdev) >> SECTOR_SHIFT;
	sector_t most;

	if (req->type == VIRTIO_BLK_T_DISCARD)
		most = bdev_max_discard_sectors(bdev);
	else
		most = bdev_write_zeroes_sectors(bdev);
	if (most)
		most *= VHOST_BLK_STEP_BIOS;
	else
		most = VHOST_BLK_STEP_BYTES >> SECTOR_SHIFT;
	most = max(round_down(most, block), block);
	return min(range->sectors, most);
}

/*
 * Makes the bios for @req->step sectors and submits all except the last one,
 * which it returns. Returns NULL after an error.
 */
static struct bio *vhost_blk_step_bio(struct vhost_blk_req *req, struct vhost_blk_range *range)
{
	struct block_device *bdev = vhost_blk_bdev(req);
	struct bio *bio = NULL;
	int err = 0;

	if (req->type == VIRTIO_BLK_T_DISCARD)
		__blkdev_issue_discard(bdev, range->sector, req->step, GFP_KERNEL, &bio);
	else
		err = __blkdev_issue_zeroout(bdev, range->sector, req->step, GFP_KERNEL, &bio,
					     range->unmap ? 0 : BLKDEV_ZERO_NOUNMAP);
	if (!bio || err)
		vhost_blk_req_fail(req, err ? errno_to_blk_status(err) : BLK_STS_IOERR);
	return bio;
}

/**
 * vhost_blk_range_step - begins the next step of a request's ranges
 * @req: the request. The caller holds a count in @req->pending and the ring's
 *	mutex.
 *
 * Return: true if a step is in flight. False if all ranges are done, if the
 *	request has an error, or if it has no ranges.
 */
bool vhost_blk_range_step(struct vhost_blk_req *req)
{
	struct vhost_blk_range *range = req->range_at;
	struct bio *bio;

	if (!req->ranges_left)
		return false;
	if (req->error) {
		/*
		 * A device may find out that it cannot write zeroes only when
		 * it gets the command, which then fails. Write pages of zeroes
		 * in this case.
		 */
		if (!req->offloaded || bdev_write_zeroes_sectors(vhost_blk_bdev(req)))
			return false;
		req->error = BLK_STS_OK;
	} else {
		range->sector += req->step;
		range->sectors -= req->step;
	}
	while (!range->sectors) {
		if (!--req->ranges_left)
			return false;
		req->range_at = ++range;
	}
	req->step = vhost_blk_step_sectors(req, range);
	req->offloaded = req->type == VIRTIO_BLK_T_WRITE_ZEROES &&
			 bdev_write_zeroes_sectors(vhost_blk_bdev(req));
	bio = vhost_blk_step_bio(req, range);
	if (!bio)
		return false;
	bio->bi_private = req;
	bio->bi_end_io = vhost_blk_range_end_io;
	atomic_inc(&req->pending);
	submit_bio(bio);
	return true;
}
