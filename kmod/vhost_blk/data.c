// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: bios for the data of IN and OUT, and flushes.
 *
 * The device works on the guest's own pages if it can reach them. If not, the
 * data is copied through kernel pages. The worker begins these bios under the
 * ring's mutex. They end in any context.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "blk.h"

/* The number of pages that are pinned at a time. */
#define VHOST_BLK_PIN_PAGES	32

/**
 * vhost_blk_in_bounds - whether sectors lie within a disk's current size
 * @bdev: the disk.
 * @sector: the first sector.
 * @sectors: the number of sectors.
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
 * A small request uses the bio that is part of it. Other bios are allocated
 * without a mempool. They are freed only when the worker ends the request. A
 * worker that waited for a mempool would wait for itself.
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

/* Releases the pages of a request. Its bios are done. */
void vhost_blk_bios_free(struct vhost_blk_req *req)
{
	struct vhost_blk_bio *b;

	while ((b = req->bios)) {
		req->bios = b->next;
		vhost_blk_bio_free(req, b);
	}
}

/*
 * Adds pinned pages to a bio, adjacent pages of a folio as one bio_vec. Each
 * bio_vec keeps one pin on each page that it touches, which is what
 * bio_release_pages() releases.
 */
static void vhost_blk_add_pages(struct bio *bio, struct page **pages, size_t bytes, size_t offset,
				bool merge)
{
	struct bio_vec *last;
	size_t len, end;

	for (; bytes; bytes -= len, pages++, offset = 0) {
		len = min(bytes, PAGE_SIZE - offset);
		last = bio->bi_vcnt && merge && !offset ? &bio->bi_io_vec[bio->bi_vcnt - 1] : NULL;
		end = last ? last->bv_offset + last->bv_len : 0;
		if (last && !offset_in_page(end) &&
		    page_folio(last->bv_page) == page_folio(*pages) &&
		    page_to_pfn(last->bv_page) + (end >> PAGE_SHIFT) == page_to_pfn(*pages)) {
			last->bv_len += len;
			bio->bi_iter.bi_size += len;
		} else {
			__bio_add_page(bio, *pages, len, offset);
		}
	}
}

/*
 * Pins as many of the guest's pages into a bio as it can hold. This is what
 * bio_iov_iter_get_pages() does, which not all kernels export. Without @merge
 * a bio_vec has at most one page. A full bio then has whole blocks, even if
 * blocks are larger than pages.
 */
static int vhost_blk_pin(struct bio *bio, struct iov_iter *data, bool merge)
{
	struct page *array[VHOST_BLK_PIN_PAGES], **pages = array;
	unsigned int room;
	size_t offset;
	ssize_t got;

	bio_set_flag(bio, BIO_PAGE_PINNED);
	while (iov_iter_count(data)) {
		room = bio->bi_max_vecs - bio->bi_vcnt;
		if (!room)
			break;
		got = iov_iter_extract_pages(data, &pages, SIZE_MAX,
					     min(room, VHOST_BLK_PIN_PAGES), 0, &offset);
		if (got < 0)
			return got;
		if (!got)
			return -EFAULT;
		vhost_blk_add_pages(bio, array, got, offset, merge);
	}
	return 0;
}

/* Fills a bio with kernel pages, and copies the data of a write into them. */
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

/* Copies the data of a read from kernel pages to its destination. */
int vhost_blk_bounce_back(struct vhost_blk_req *req)
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
 * Makes bios for the data and submits them. After an error the bios that were
 * submitted are waited for as usual.
 */
static int vhost_blk_submit(struct vhost_blk_req *req, struct iov_iter *data, sector_t sector)
{
	bool write = req->type == VIRTIO_BLK_T_OUT;
	/* The same flags as direct I/O: somebody waits for the result. */
	blk_opf_t opf = write ? REQ_OP_WRITE | REQ_SYNC | REQ_IDLE : REQ_OP_READ;
	bool merge = bdev_logical_block_size(vhost_blk_bdev(req)) <= PAGE_SIZE;
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
			err = vhost_blk_pin(&b->bio, data, merge);
		if (err) {
			vhost_blk_bio_free(req, b);
			return err;
		}
		/*
		 * Make the data stable before completion. A single bio
		 * gets FUA. Several bios get one flush after them.
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

/*
 * Whether the device can reach the data directly. Each segment must have whole
 * blocks, so that a bio can end with any segment. It must have the alignment
 * that the device needs, and for the same reason that of a block, or of a page
 * if blocks are larger.
 */
static bool vhost_blk_aligned(struct block_device *bdev, const struct iov_iter *data)
{
	unsigned int len_mask = bdev_logical_block_size(bdev) - 1;
	unsigned long addr_mask = bdev_dma_alignment(bdev) | (len_mask & ~PAGE_MASK);
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

/*
 * Whether the ring may have that many more bytes in flight. Always true if it
 * has none.
 */
static bool vhost_blk_has_room(struct vhost_blk_ring *ring, size_t bytes, bool bounced)
{
	if (bounced && ring->bounce_bytes && ring->bounce_bytes + bytes > VHOST_BLK_BOUNCE_MAX)
		return false;
	return !ring->data_bytes || ring->data_bytes + bytes <= VHOST_BLK_DATA_MAX;
}

/**
 * vhost_blk_rw - starts an IN or OUT
 * @req: the request.
 * @data: its data.
 * @sector: the position on the disk.
 *
 * Return: 0 if all of the data is in flight, or a negative errno.
 * VHOST_BLK_STALLED if the request has to wait for others of its ring; it then
 * has changed nothing.
 */
int vhost_blk_rw(struct vhost_blk_req *req, struct iov_iter *data, u64 sector)
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

/**
 * vhost_blk_flush - submits a flush
 * @req: the request. It has no bios. The caller holds a count in @req->pending.
 */
void vhost_blk_flush(struct vhost_blk_req *req)
{
	/* It has no pages, so it is the bio that is part of the request. */
	struct vhost_blk_bio *b = vhost_blk_bio_new(req, 0, REQ_OP_WRITE | REQ_PREFLUSH | REQ_SYNC);

	req->bios = b;
	atomic_inc(&req->pending);
	submit_bio(&b->bio);
}

