/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/vhost-blk: virtio-blk virtqueues served by the kernel, straight from the ring to a block
 * device.
 *
 * The ioctls of <linux/vhost.h> work as on every vhost device: VHOST_SET_OWNER, VHOST_GET_FEATURES,
 * VHOST_SET_FEATURES, VHOST_SET_MEM_TABLE, VHOST_SET_LOG_BASE, the VHOST_SET_VRING_* family, and
 * the worker ioctls (VHOST_NEW_WORKER, VHOST_FREE_WORKER, VHOST_ATTACH_VRING_WORKER,
 * VHOST_GET_VRING_WORKER) before and while rings run. What is virtio-blk's own is here.
 *
 * Configuration space is the owner's: it reads the block device's size and limits itself, and tells
 * the guest.
 *
 * An owner's order: VHOST_SET_OWNER, VHOST_SET_FEATURES, VHOST_SET_MEM_TABLE,
 * VHOST_BLK_SET_BACKEND; for each ring VHOST_SET_VRING_NUM, _BASE, _ADDR, _CALL, _ERR, _KICK and
 * then VHOST_BLK_SET_VRING. Requests are served while a ring runs and the device has a backend.
 */
#ifndef _UAPI_LINUX_VHOST_BLK_H
#define _UAPI_LINUX_VHOST_BLK_H

#include <linux/types.h>
#include <linux/ioctl.h>
#include <linux/vhost.h>

/* Rings of one device, and descriptors of one ring. */
#define VHOST_BLK_VRINGS_MAX	64
#define VHOST_BLK_VRING_NUM_MAX	1024

/* Bytes of the serial that VIRTIO_BLK_T_GET_ID answers; not terminated when all are used. */
#define VHOST_BLK_SERIAL_BYTES	20

/* Nothing is written to the backend: OUT, DISCARD and WRITE_ZEROES end with VIRTIO_BLK_S_IOERR. */
#define VHOST_BLK_BACKEND_READONLY	(1u << 0)

/**
 * struct vhost_blk_backend - what stands behind the rings
 * @size: bytes of this struct that the caller knows. A kernel that knows less refuses what it does
 *	not know unless it is zero (E2BIG); a kernel that knows more takes zeroes for the rest. At
 *	least VHOST_BLK_BACKEND_SIZE_VER0. The size in the ioctl's number is not looked at.
 * @flags: VHOST_BLK_BACKEND_*; others are refused with EINVAL.
 * @fd: a block device, open for reading, and for writing unless @flags says read-only; -1 takes the
 *	backend away.
 * @reserved: zero.
 * @serial: what GET_ID answers.
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
 * struct vhost_blk_vring_stats - what one ring did since the device was opened
 * @size: as in struct vhost_blk_backend. At least VHOST_BLK_VRING_STATS_SIZE_VER0.
 * @index: the ring.
 * @in_flight: requests taken from the ring and not yet put back.
 * @running: 1 while the ring runs.
 * @requests: requests put back, whatever their status.
 * @errors: of those, the ones with VIRTIO_BLK_S_IOERR.
 * @unsupported: of those, the ones with VIRTIO_BLK_S_UNSUPP.
 * @read_bytes: bytes that IN requests brought from the backend.
 * @written_bytes: bytes that OUT requests brought to it.
 * @kicks: turns that a kick of the guest began.
 * @signals: times that the guest was notified.
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
 * struct vhost_blk_vring_inflight - where a ring notes what it has in flight
 * @size: as in struct vhost_blk_backend. At least VHOST_BLK_VRING_INFLIGHT_SIZE_VER0.
 * @index: the ring.
 * @region_user_addr: the ring's part of a vhost-user in-flight region for split rings
 *	(QueueRegionSplit), in the owner's memory, aligned to 8. 0: nothing is noted.
 * @counter: what the next request taken is numbered with, larger than all that are in the region.
 * @replay_user_addr: a struct vring_avail in the owner's memory, aligned to 2, whose ring has the
 *	heads of requests that a former owner took and did not put back. Its flags and idx are not
 *	looked at. It has to stay until they are done.
 * @num: descriptors that the region has room for: at least those of the ring.
 * @last_batch_head: the field of the same name in the region.
 * @replay_num: how many heads, at most @num, and at most the descriptors that the ring starts
 *	with.
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
 * Sets the backend, or takes it away. A device that has one refuses a second with EBUSY. Taking it
 * away stops every ring first, as VHOST_BLK_SET_VRING does. ENOTBLK: no block device. EACCES: not
 * open for what the flags ask. EPERM: the caller is not the owner.
 */
#define VHOST_BLK_SET_BACKEND	_IOW(VHOST_VIRTIO, 0xE0, struct vhost_blk_backend)

/*
 * Starts (num 1) or stops (num 0) a ring. Stopping returns when no request of the ring is in
 * flight; then VHOST_GET_VRING_BASE tells where to go on, and memory may be taken away. (Asked of a
 * ring that runs it waits in the same way, and the ring goes on.) A kick that came before the start
 * is seen. EFAULT: the ring's addresses are not in the memory table. ENODEV:
 * no backend. EINVAL: no such ring, other num.
 */
#define VHOST_BLK_SET_VRING	_IOW(VHOST_VIRTIO, 0xE1, struct vhost_vring_state)

/* Reads a ring's counters, which go on counting over stops. */
#define VHOST_BLK_GET_VRING_STATS	_IOWR(VHOST_VIRTIO, 0xE2, struct vhost_blk_vring_stats)

/*
 * Has a stopped ring note from its next start on what it has in flight, and begin with what a
 * former owner had (VHOST_SET_VRING_BASE is behind those then). The owner has initialised or
 * repaired the region before, as the protocol says for a reconnect; nothing is read from it here.
 * It holds until it is set anew or the owner is reset. A ring whose region cannot be written to is
 * broken. EBUSY: the ring runs. EFAULT: no addresses of user space. EINVAL: misaligned, too many.
 * VHOST_BLK_SET_VRING fails with EINVAL if the ring has more descriptors than the region.
 */
#define VHOST_BLK_SET_VRING_INFLIGHT	_IOW(VHOST_VIRTIO, 0xE3, struct vhost_blk_vring_inflight)

#endif
