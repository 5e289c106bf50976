/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/vhost-blk: the kernel serves virtio-blk virtqueues, from the ring to a
 * block device.
 *
 * The ioctls of <linux/vhost.h> work as on every vhost device:
 * VHOST_SET_OWNER, VHOST_GET_FEATURES, VHOST_SET_FEATURES,
 * VHOST_SET_MEM_TABLE, VHOST_SET_LOG_BASE, the VHOST_SET_VRING_* family, and
 * the worker ioctls (VHOST_NEW_WORKER, VHOST_FREE_WORKER,
 * VHOST_ATTACH_VRING_WORKER, VHOST_GET_VRING_WORKER) before and while rings
 * run. This header has the ioctls that only virtio-blk has.
 *
 * The owner handles configuration space: it reads the block device's size and
 * limits itself, and tells the guest.
 *
 * An owner calls, in this order: VHOST_SET_OWNER, VHOST_SET_FEATURES,
 * VHOST_SET_MEM_TABLE, VHOST_BLK_SET_BACKEND. For each ring it then calls
 * VHOST_SET_VRING_NUM, _BASE, _ADDR, _CALL, _ERR, _KICK and
 * VHOST_BLK_SET_VRING. Requests are served while a ring runs and the device
 * has a backend.
 */
#ifndef _UAPI_LINUX_VHOST_BLK_H
#define _UAPI_LINUX_VHOST_BLK_H

#include <linux/types.h>
#include <linux/ioctl.h>
#include <linux/vhost.h>

/* Maximum rings of one device, and maximum descriptors of one ring. */
#define VHOST_BLK_VRINGS_MAX	64
#define VHOST_BLK_VRING_NUM_MAX	1024

/*
 * Bytes of the serial that VIRTIO_BLK_T_GET_ID returns. A serial that uses all
 * of them is not terminated.
 */
#define VHOST_BLK_SERIAL_BYTES	20

/*
 * Nothing is written to the backend: OUT, DISCARD and WRITE_ZEROES end with
 * VIRTIO_BLK_S_IOERR.
 */
#define VHOST_BLK_BACKEND_READONLY	(1u << 0)

/**
 * struct vhost_blk_backend - the backend of the rings
 * @size: bytes of this struct that the caller knows. A kernel that knows fewer
 *	fails with E2BIG unless the others are zero. A kernel that knows more
 *	takes zeroes for the rest. At least VHOST_BLK_BACKEND_SIZE_VER0. The
 *	size in the ioctl's number is ignored.
 * @flags: VHOST_BLK_BACKEND_*. Others are refused with EINVAL.
 * @fd: a block device, open for reading, and for writing unless @flags says
 *	read-only. -1 removes the backend.
 * @reserved: zero.
 * @serial: the answer to GET_ID.
 */
struct vhost_blk_backend {
	__u32 size;
	__u32 flags;
	__s32 fd;
	__u32 reserved;
	__u8 serial[VHOST_BLK_SERIAL_BYTES];
	__u32 reserved2;
};

#define VHOST_BLK_BACKEND_SIZE_VER0	40

/**
 * struct vhost_blk_vring_stats - counters of one ring since device open
 * @size: as in struct vhost_blk_backend. At least
 *	VHOST_BLK_VRING_STATS_SIZE_VER0.
 * @index: the ring.
 * @in_flight: requests taken from the ring and not yet put back.
 * @running: 1 while the ring runs.
 * @requests: requests put back, with any status.
 * @errors: of those, the ones with VIRTIO_BLK_S_IOERR.
 * @unsupported: of those, the ones with VIRTIO_BLK_S_UNSUPP.
 * @read_bytes: bytes that IN requests read from the backend.
 * @written_bytes: bytes that OUT requests wrote to it.
 * @kicks: iterations that a kick of the guest began.
 * @signals: notifications of the guest.
 */
struct vhost_blk_vring_stats {
	__u32 size;
	__u32 index;
	__u32 in_flight;
	__u32 running;
	__aligned_u64 requests;
	__aligned_u64 errors;
	__aligned_u64 unsupported;
	__aligned_u64 read_bytes;
	__aligned_u64 written_bytes;
	__aligned_u64 kicks;
	__aligned_u64 signals;
};

#define VHOST_BLK_VRING_STATS_SIZE_VER0	72

/**
 * struct vhost_blk_vring_inflight - the in-flight region of a ring
 * @size: as in struct vhost_blk_backend. At least
 *	VHOST_BLK_VRING_INFLIGHT_SIZE_VER0.
 * @index: the ring.
 * @region_user_addr: the ring's part of a vhost-user in-flight region for split
 *	rings (QueueRegionSplit), in the owner's memory, aligned to 8. 0: no
 *	region is written.
 * @counter: the number for the next request that is taken. It is larger than
 *	all numbers in the region.
 * @replay_user_addr: a struct vring_avail in the owner's memory, aligned to 2.
 *	Its ring has the heads of requests that a former owner took and did not
 *	put back. Its flags and idx are ignored. It has to stay until these
 *	requests are done.
 * @num: descriptors that the region has room for: at least those of the ring.
 * @last_batch_head: the field of the same name in the region.
 * @replay_num: the number of heads, at most @num, and at most the number of
 *	descriptors that the ring starts with.
 * @reserved: zero.
 */
struct vhost_blk_vring_inflight {
	__u32 size;
	__u32 index;
	__aligned_u64 region_user_addr;
	__aligned_u64 counter;
	__aligned_u64 replay_user_addr;
	__u16 num;
	__u16 last_batch_head;
	__u16 replay_num;
	__u16 reserved;
};

#define VHOST_BLK_VRING_INFLIGHT_SIZE_VER0	40

/*
 * Sets or removes the backend. A device that has a backend refuses a second
 * with EBUSY. Removing it stops every ring first, as VHOST_BLK_SET_VRING does.
 * ENOTBLK: no block device. EACCES: not open in the mode that the flags need.
 * EPERM: the caller is not the owner.
 */
#define VHOST_BLK_SET_BACKEND	_IOW(VHOST_VIRTIO, 0xE0, struct vhost_blk_backend)

/*
 * Starts (num 1) or stops (num 0) a ring. A stop returns when no request of the
 * ring is in flight. After that VHOST_GET_VRING_BASE returns the next index to
 * take, and memory may be removed. (VHOST_GET_VRING_BASE for a running ring
 * waits in the same way. The ring then continues.) A kick that came before the
 * start is seen. EFAULT: the ring's addresses are not in the memory table.
 * ENODEV: no backend. EINVAL: no such ring, or another num.
 */
#define VHOST_BLK_SET_VRING	_IOW(VHOST_VIRTIO, 0xE1, struct vhost_vring_state)

/* Reads a ring's counters. A stop does not reset them. */
#define VHOST_BLK_GET_VRING_STATS	_IOWR(VHOST_VIRTIO, 0xE2, struct vhost_blk_vring_stats)

/*
 * Sets the in-flight region of a stopped ring. From its next start on the ring
 * writes its requests in flight there. It begins with the requests that a
 * former owner had in flight (VHOST_SET_VRING_BASE is behind those then). The
 * owner must have initialised the region, or repaired it as the protocol
 * describes for a reconnect. The kernel never reads it.
 *
 * The region stays set until another is set or the owner is reset. A ring whose
 * region cannot be written to is broken. EBUSY: the ring runs. EFAULT: no
 * addresses of user space. EINVAL: misaligned, too many. VHOST_BLK_SET_VRING
 * fails with EINVAL if the ring has more descriptors than the region.
 */
#define VHOST_BLK_SET_VRING_INFLIGHT	_IOW(VHOST_VIRTIO, 0xE3, struct vhost_blk_vring_inflight)

#endif
