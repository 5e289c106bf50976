/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vhost_blk: differences between kernels, 6.12 to 7.3. The only place that looks at a version.
 */
#ifndef _VHOST_BLK_COMPAT_H
#define _VHOST_BLK_COMPAT_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/version.h>

#include "vhost.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
#error "vhost_blk: Linux 6.12 or newer is needed"
#endif

/* Lengths of up to 1,024 segments of 4 GiB are added up in a size_t, counters are read without a lock. */
#ifndef CONFIG_64BIT
#error "vhost_blk: 64-bit kernels only"
#endif

/*
 * Pins what an iterator over the owner's memory describes into a bio, as much as it holds, whole blocks only. Since 6.18
 * the caller says what a block is.
 */
static inline int vhost_blk_pin(struct bio *bio, struct iov_iter *data, unsigned int block_mask)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
	return bio_iov_iter_get_pages(bio, data, block_mask);
#else
	return bio_iov_iter_get_pages(bio, data);
#endif
}

/* The features that the guest took. */
static inline u64 vhost_blk_acked(const struct vhost_virtqueue *vq)
{
	return vq->acked_features;
}

static inline void vhost_blk_ack(struct vhost_virtqueue *vq, u64 features)
{
	vq->acked_features = features;
}

#endif
