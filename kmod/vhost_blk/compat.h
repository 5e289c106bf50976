/* SPDX-License-Identifier: GPL-2.0 */
/*
 * vhost_blk: all differences between the kernels 6.12 to 7.3.
 *
 * The code tests the type of a function, not the version of the kernel: stable
 * and distribution kernels take changes from later kernels. With an unknown
 * type the module does not compile.
 */
#ifndef _VHOST_BLK_COMPAT_H
#define _VHOST_BLK_COMPAT_H

#include <linux/build_bug.h>

#include "vhost.h"

/*
 * A size_t holds the sum of up to 1,024 segments of 4 GiB. Counters are read
 * without a lock.
 */
static_assert(sizeof(size_t) == 8, "vhost_blk: 64-bit kernels only");

typedef int (*vhost_blk_used_v1)(struct vhost_virtqueue *, struct vring_used_elem *, unsigned int);
typedef int (*vhost_blk_used_v2)(struct vhost_virtqueue *, struct vring_used_elem *, u16 *,
				 unsigned int);

#define VHOST_BLK_USED_IS(type)	__builtin_types_compatible_p(typeof(vhost_add_used_n) *, type)
/* If the function is not of that type, this call is never reached. */
#define VHOST_BLK_USED(type) \
	__builtin_choose_expr(VHOST_BLK_USED_IS(type), vhost_add_used_n, (type)NULL)

/*
 * Puts the first @count of @vq->heads into the used ring. Later kernels can
 * also put them in order.
 */
static inline int vhost_blk_add_used(struct vhost_virtqueue *vq, unsigned int count)
{
	static_assert(VHOST_BLK_USED_IS(vhost_blk_used_v1) || VHOST_BLK_USED_IS(vhost_blk_used_v2));

	if (VHOST_BLK_USED_IS(vhost_blk_used_v1))
		return VHOST_BLK_USED(vhost_blk_used_v1)(vq, vq->heads, count);
	return VHOST_BLK_USED(vhost_blk_used_v2)(vq, vq->heads, NULL, count);
}

/*
 * Puts back the chain that was taken last. Later kernels count its descriptors
 * too, for rings in order.
 */
static inline void vhost_blk_put_back(struct vhost_virtqueue *vq)
{
	vq->last_avail_idx--;
}

#endif
