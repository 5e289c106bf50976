/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vhost_blk: differences between kernels, 6.12 to 7.3, all of them here.
 *
 * Told by the type of a function rather than by the kernel's version: stable and distribution
 * kernels take changes from later ones, and a type that nobody has thought of does not compile.
 */
#ifndef _VHOST_BLK_COMPAT_H
#define _VHOST_BLK_COMPAT_H

#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/build_bug.h>

#include "vhost.h"

/*
 * Lengths of up to 1,024 segments of 4 GiB are added up in a size_t, counters read without a lock.
 */
static_assert(sizeof(size_t) == 8, "vhost_blk: 64-bit kernels only");

typedef int (*vhost_blk_pin_v1)(struct bio *, struct iov_iter *);
typedef int (*vhost_blk_pin_v2)(struct bio *, struct iov_iter *, unsigned int);
typedef int (*vhost_blk_pin_v3)(struct bio *, struct iov_iter *, unsigned int, unsigned int);

#define VHOST_BLK_PIN_IS(type) \
	__builtin_types_compatible_p(typeof(bio_iov_iter_get_pages) *, type)
/* If it is not of that type, a call that is never reached. */
#define VHOST_BLK_PIN(type) \
	__builtin_choose_expr(VHOST_BLK_PIN_IS(type), bio_iov_iter_get_pages, (type)NULL)

/*
 * Pins what an iterator over the owner's memory describes into a bio, as much as it holds, whole
 * blocks only. Later kernels have the caller say what a block is, and how memory has to be aligned,
 * which we have looked at before.
 */
static inline int vhost_blk_pin(struct bio *bio, struct iov_iter *data, unsigned int block_mask)
{
	static_assert(VHOST_BLK_PIN_IS(vhost_blk_pin_v1) || VHOST_BLK_PIN_IS(vhost_blk_pin_v2) ||
		      VHOST_BLK_PIN_IS(vhost_blk_pin_v3));

	if (VHOST_BLK_PIN_IS(vhost_blk_pin_v1))
		return VHOST_BLK_PIN(vhost_blk_pin_v1)(bio, data);
	if (VHOST_BLK_PIN_IS(vhost_blk_pin_v2))
		return VHOST_BLK_PIN(vhost_blk_pin_v2)(bio, data, block_mask);
	return VHOST_BLK_PIN(vhost_blk_pin_v3)(bio, data, 0, block_mask);
}

typedef int (*vhost_blk_used_v1)(struct vhost_virtqueue *, struct vring_used_elem *, unsigned int);
typedef int (*vhost_blk_used_v2)(struct vhost_virtqueue *, struct vring_used_elem *, u16 *,
				 unsigned int);

#define VHOST_BLK_USED_IS(type)	__builtin_types_compatible_p(typeof(vhost_add_used_n) *, type)
#define VHOST_BLK_USED(type) \
	__builtin_choose_expr(VHOST_BLK_USED_IS(type), vhost_add_used_n, (type)NULL)

/* Puts the first @count of @vq->heads into the used ring. Later kernels can do it in order, too. */
static inline int vhost_blk_add_used(struct vhost_virtqueue *vq, unsigned int count)
{
	static_assert(VHOST_BLK_USED_IS(vhost_blk_used_v1) || VHOST_BLK_USED_IS(vhost_blk_used_v2));

	if (VHOST_BLK_USED_IS(vhost_blk_used_v1))
		return VHOST_BLK_USED(vhost_blk_used_v1)(vq, vq->heads, count);
	return VHOST_BLK_USED(vhost_blk_used_v2)(vq, vq->heads, NULL, count);
}

/* Puts back what was taken last. Later kernels have it count descriptors, for rings in order. */
static inline void vhost_blk_put_back(struct vhost_virtqueue *vq)
{
	vq->last_avail_idx--;
}

#endif
