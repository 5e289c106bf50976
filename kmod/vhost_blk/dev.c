// SPDX-License-Identifier: GPL-2.0
/*
 * vhost_blk: the misc device /dev/vhost-blk. uapi/linux/vhost_blk.h describes
 * its ioctls.
 *
 * All of this runs in the context of a process that has the file open, most of
 * it under vhost_dev.mutex. Only the owner, the process whose memory the rings
 * are in, may change anything.
 */
#include <linux/compat.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "blk.h"

/*
 * The features that the module can serve with any disk. The owner offers the
 * guest those that agree with its configuration space.
 */
static const u64 vhost_blk_features =
	BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_F_ANY_LAYOUT) |
	BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) | BIT_ULL(VIRTIO_RING_F_EVENT_IDX) |
	BIT_ULL(VHOST_F_LOG_ALL) |
	BIT_ULL(VIRTIO_BLK_F_SIZE_MAX) | BIT_ULL(VIRTIO_BLK_F_SEG_MAX) |
	BIT_ULL(VIRTIO_BLK_F_GEOMETRY) | BIT_ULL(VIRTIO_BLK_F_RO) |
	BIT_ULL(VIRTIO_BLK_F_BLK_SIZE) | BIT_ULL(VIRTIO_BLK_F_FLUSH) |
	BIT_ULL(VIRTIO_BLK_F_TOPOLOGY) | BIT_ULL(VIRTIO_BLK_F_MQ) |
	BIT_ULL(VIRTIO_BLK_F_DISCARD) | BIT_ULL(VIRTIO_BLK_F_WRITE_ZEROES);

static struct vhost_blk_ring *vhost_blk_ring_at(struct vhost_blk *blk, u32 index)
{
	if (index >= VHOST_BLK_VRINGS_MAX)
		return NULL;
	return &blk->rings[array_index_nospec(index, VHOST_BLK_VRINGS_MAX)];
}

static struct vhost_blk_ring *vhost_blk_ring_from_user(struct vhost_blk *blk,
						       const void __user *argp)
{
	struct vhost_blk_ring *ring;
	u32 index;

	/* Each argument that names a ring begins with its index. */
	if (get_user(index, (const u32 __user *)argp))
		return ERR_PTR(-EFAULT);
	ring = vhost_blk_ring_at(blk, index);
	return ring ?: ERR_PTR(-EINVAL);
}

/*
 * Holds all rings before it stops the first one. The caller holds
 * vhost_dev.mutex, or no other thread uses the device.
 */
static int vhost_blk_stop_all(struct vhost_blk *blk, enum vhost_blk_drain how)
{
	int i, err = 0;

	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		if (blk->rings[i].reqs)
			vhost_blk_ring_hold(&blk->rings[i], VHOST_BLK_HOLD_STOP);
	}
	for (i = 0; i < VHOST_BLK_VRINGS_MAX && !err; i++)
		err = vhost_blk_ring_stop(&blk->rings[i], how);
	return err;
}

/*
 * No ring runs. Waits until no work of a ring is queued. None can be queued
 * later: each thread that ended a request has left vhost_blk_req_done().
 */
static void vhost_blk_quiesce(struct vhost_blk *blk)
{
	int i;

	synchronize_rcu();
	vhost_dev_flush(&blk->dev);
	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++)
		blk->rings[i].late = false;
}

static void vhost_blk_disk_put(struct vhost_blk *blk)
{
	struct file *file = blk->disk.file;

	if (!file)
		return;
	/* The page cache is older than what the guest wrote. */
	invalidate_bdev(blk->disk.bdev);
	memset(&blk->disk, 0, sizeof(blk->disk));
	fput(file);
}

static int vhost_blk_open(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk;
	int i;

	blk = kvzalloc(sizeof(*blk), GFP_KERNEL_ACCOUNT);
	if (!blk)
		return -ENOMEM;
	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		vhost_blk_ring_init(blk, &blk->rings[i]);
		blk->vqs[i] = &blk->rings[i].vq;
	}
	/*
	 * As many segments as the arrays of the core in each vhost_virtqueue,
	 * and as many as a valid chain of 1,024 descriptors can have.
	 */
	vhost_dev_init(&blk->dev, blk->vqs, VHOST_BLK_VRINGS_MAX, UIO_MAXIOV,
		       VHOST_BLK_ITERATION_REQUESTS, VHOST_BLK_ITERATION_BYTES, true, NULL);
	file->private_data = blk;
	return 0;
}

/*
 * No other process has the file open. Nothing is reported to the guest: the
 * module may not write to its memory (the owner may be dead, and this may be
 * its exit), and rings whose device is gone are reset. The release waits for
 * the bios in flight, because their pages are pinned.
 */
static int vhost_blk_release(struct inode *inode, struct file *file)
{
	struct vhost_blk *blk = file->private_data;
	int i;

	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		if (blk->rings[i].reqs)
			vhost_blk_ring_hold(&blk->rings[i],
					    VHOST_BLK_HOLD_STOP | VHOST_BLK_HOLD_DROP);
	}
	vhost_dev_stop(&blk->dev);
	vhost_blk_stop_all(blk, VHOST_BLK_DRAIN_DROP);
	vhost_blk_quiesce(blk);
	vhost_dev_cleanup(&blk->dev);
	vhost_blk_disk_put(blk);
	kvfree(blk);
	return 0;
}

/* Checks that the disk can be used with these flags. */
static int vhost_blk_disk_check(struct file *file, bool readonly)
{
	struct block_device *bdev;

	if (!S_ISBLK(file_inode(file)->i_mode))
		return -ENOTBLK;
	bdev = file_bdev(file);
	/* Writes to zones must be in order. Several queues do not keep one. */
	if (bdev_is_zoned(bdev))
		return -EOPNOTSUPP;
	if (!(file->f_mode & FMODE_READ))
		return -EACCES;
	if (!readonly && (!(file->f_mode & FMODE_WRITE) || bdev_read_only(bdev)))
		return -EACCES;
	return 0;
}

static int vhost_blk_disk_set(struct vhost_blk *blk, const struct vhost_blk_backend *backend)
{
	bool readonly = backend->flags & VHOST_BLK_BACKEND_READONLY;
	struct file *file;
	int err;

	if (blk->disk.file)
		return -EBUSY;
	file = fget(backend->fd);
	if (!file)
		return -EBADF;
	err = vhost_blk_disk_check(file, readonly);
	/*
	 * Bios bypass the page cache. Nothing in it may be newer than the
	 * disk.
	 */
	if (!err)
		err = sync_blockdev(file_bdev(file));
	if (err) {
		fput(file);
		return err;
	}
	blk->disk.file = file;
	blk->disk.bdev = file_bdev(file);
	blk->disk.readonly = readonly;
	memcpy(blk->disk.serial, backend->serial, sizeof(blk->disk.serial));
	return 0;
}

static long vhost_blk_set_backend(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_backend backend;
	u32 size;
	long err;

	if (get_user(size, (u32 __user *)argp))
		return -EFAULT;
	if (size < VHOST_BLK_BACKEND_SIZE_VER0)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(&backend, sizeof(backend), argp, size);
	if (err)
		return err;
	if ((backend.flags & ~VHOST_BLK_BACKEND_READONLY) || backend.reserved || backend.reserved2)
		return -EINVAL;
	if (backend.fd < -1)
		return -EBADF;

	mutex_lock(&blk->dev.mutex);
	err = vhost_dev_check_owner(&blk->dev);
	if (!err && backend.fd >= 0) {
		err = vhost_blk_disk_set(blk, &backend);
	} else if (!err) {
		err = vhost_blk_stop_all(blk, VHOST_BLK_DRAIN_KILLABLE);
		if (!err)
			vhost_blk_disk_put(blk);
	}
	mutex_unlock(&blk->dev.mutex);
	return err;
}

static long vhost_blk_set_vring(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_vring_state state;
	struct vhost_blk_ring *ring;
	long err;

	if (copy_from_user(&state, argp, sizeof(state)))
		return -EFAULT;
	ring = vhost_blk_ring_at(blk, state.index);
	if (!ring || state.num > 1)
		return -EINVAL;

	mutex_lock(&blk->dev.mutex);
	err = vhost_dev_check_owner(&blk->dev);
	if (err)
		goto out;
	if (state.num && ring->reqs && !(ring->hold & VHOST_BLK_HOLD_STOP))
		goto out;
	/* Finish a stop that was interrupted. */
	err = vhost_blk_ring_stop(ring, VHOST_BLK_DRAIN_KILLABLE);
	if (!err && state.num)
		err = blk->disk.file ? vhost_blk_ring_start(ring) : -ENODEV;
out:
	mutex_unlock(&blk->dev.mutex);
	return err;
}

static long vhost_blk_set_vring_inflight(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_vring_inflight inflight;
	struct vhost_blk_ring *ring;
	u32 size;
	long err;

	if (get_user(size, (u32 __user *)argp))
		return -EFAULT;
	if (size < VHOST_BLK_VRING_INFLIGHT_SIZE_VER0)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(&inflight, sizeof(inflight), argp, size);
	if (err)
		return err;
	ring = vhost_blk_ring_at(blk, inflight.index);
	if (!ring)
		return -EINVAL;

	mutex_lock(&blk->dev.mutex);
	err = vhost_dev_check_owner(&blk->dev);
	if (!err)
		err = vhost_blk_inflight_set(ring, &inflight);
	mutex_unlock(&blk->dev.mutex);
	return err;
}

/*
 * Each process that has the file open may read the counters, for example a
 * monitor that the owner started. They do not depend on the owner's memory.
 */
static long vhost_blk_get_vring_stats(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_vring_stats stats, *from;
	struct vhost_blk_ring *ring;
	u32 size;
	int err;

	if (get_user(size, (u32 __user *)argp))
		return -EFAULT;
	if (size < VHOST_BLK_VRING_STATS_SIZE_VER0)
		return -EINVAL;
	if (size > PAGE_SIZE)
		return -E2BIG;
	err = copy_struct_from_user(&stats, sizeof(stats), argp, size);
	if (err)
		return err;
	ring = vhost_blk_ring_at(blk, stats.index);
	if (!ring)
		return -EINVAL;
	from = &ring->stats;
	stats.in_flight = READ_ONCE(ring->in_flight);
	stats.running = READ_ONCE(from->running);
	stats.requests = READ_ONCE(from->requests);
	stats.errors = READ_ONCE(from->errors);
	stats.unsupported = READ_ONCE(from->unsupported);
	stats.read_bytes = READ_ONCE(from->read_bytes);
	stats.written_bytes = READ_ONCE(from->written_bytes);
	stats.kicks = READ_ONCE(from->kicks);
	stats.signals = READ_ONCE(from->signals);
	return copy_to_user(argp, &stats, min_t(size_t, size, sizeof(stats))) ? -EFAULT : 0;
}

/* Holds, drains or releases the rings that run. Under vhost_dev.mutex. */
static int vhost_blk_pause(struct vhost_blk *blk)
{
	int i, err = 0;

	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		if (blk->rings[i].reqs)
			vhost_blk_ring_hold(&blk->rings[i], VHOST_BLK_HOLD_REST);
	}
	for (i = 0; i < VHOST_BLK_VRINGS_MAX && !err; i++) {
		if (blk->rings[i].reqs)
			err = vhost_blk_drain(&blk->rings[i], VHOST_BLK_DRAIN_KILLABLE);
	}
	return err;
}

static void vhost_blk_resume(struct vhost_blk *blk)
{
	int i;

	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		if (blk->rings[i].reqs)
			vhost_blk_ring_unhold(&blk->rings[i], VHOST_BLK_HOLD_REST);
	}
}

static bool vhost_blk_any_started(struct vhost_blk *blk)
{
	int i;

	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++) {
		if (blk->rings[i].reqs)
			return true;
	}
	return false;
}

/*
 * While rings run only the dirty log can be switched, and only on drained
 * rings. A request that was taken before has not kept the ranges that it
 * writes. It would write them after the switch without logging them.
 */
static long vhost_blk_set_features(struct vhost_blk *blk, u64 features)
{
	u64 now;
	long err;
	int i;

	if (features & ~vhost_blk_features)
		return -EOPNOTSUPP;

	mutex_lock(&blk->dev.mutex);
	err = vhost_dev_check_owner(&blk->dev);
	if (err)
		goto out;
	/*
	 * All rings have the same features. They change under vhost_dev.mutex
	 * only.
	 */
	now = blk->rings[0].vq.acked_features;
	if (features == now)
		goto out;
	err = -EBUSY;
	if (((features ^ now) & ~BIT_ULL(VHOST_F_LOG_ALL)) && vhost_blk_any_started(blk))
		goto out;
	err = -EFAULT;
	if ((features & BIT_ULL(VHOST_F_LOG_ALL)) && !vhost_log_access_ok(&blk->dev))
		goto out;
	err = vhost_blk_pause(blk);
	for (i = 0; i < VHOST_BLK_VRINGS_MAX && !err; i++) {
		mutex_lock(&blk->rings[i].vq.mutex);
		blk->rings[i].vq.acked_features = features;
		mutex_unlock(&blk->rings[i].vq.mutex);
	}
	vhost_blk_resume(blk);
out:
	mutex_unlock(&blk->dev.mutex);
	return err;
}

static long vhost_blk_reset_owner(struct vhost_blk *blk)
{
	struct vhost_iotlb *umem;
	long err;
	int i;

	mutex_lock(&blk->dev.mutex);
	err = vhost_dev_check_owner(&blk->dev);
	if (err)
		goto out;
	err = vhost_blk_stop_all(blk, VHOST_BLK_DRAIN_KILLABLE);
	if (err)
		goto out;
	umem = vhost_dev_reset_owner_prepare();
	err = -ENOMEM;
	if (!umem)
		goto out;
	err = 0;
	vhost_dev_stop(&blk->dev);
	vhost_blk_quiesce(blk);
	vhost_dev_reset_owner(&blk->dev, umem);
	/*
	 * Addresses of the former owner. No ring runs, and no other thread
	 * looks at them.
	 */
	for (i = 0; i < VHOST_BLK_VRINGS_MAX; i++)
		memset(&blk->rings[i].inflight, 0, sizeof(blk->rings[i].inflight));
	vhost_blk_disk_put(blk);
out:
	mutex_unlock(&blk->dev.mutex);
	return err;
}

/*
 * The core can move a ring without a kick and without a backend to another
 * worker. It does not look at the work that is queued then. For a ring that
 * was just stopped, that work may be a completion.
 */
static long vhost_blk_worker_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	struct vhost_blk_ring *ring;
	long err;

	mutex_lock(&blk->dev.mutex);
	if (cmd == VHOST_ATTACH_VRING_WORKER) {
		ring = vhost_blk_ring_from_user(blk, argp);
		if (!IS_ERR(ring) && !ring->reqs && ring->late)
			vhost_blk_quiesce(blk);
	}
	err = vhost_worker_ioctl(&blk->dev, cmd, argp);
	mutex_unlock(&blk->dev.mutex);
	return err;
}

/* Runs the core's ioctls, with the preparation that some of them need. */
static long vhost_blk_core_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	struct vhost_blk_ring *ring, *rests = NULL;
	struct vhost_vring_state state;
	long err = 0;

	mutex_lock(&blk->dev.mutex);
	if (cmd == VHOST_SET_VRING_NUM) {
		if (copy_from_user(&state, argp, sizeof(state)))
			err = -EFAULT;
		else if (state.num > VHOST_BLK_VRING_NUM_MAX)
			err = -EINVAL;
	} else if (cmd == VHOST_GET_VRING_BASE && !vhost_dev_check_owner(&blk->dev)) {
		/* The base is valid only after all requests are put back. */
		ring = vhost_blk_ring_from_user(blk, argp);
		if (!IS_ERR(ring) && (ring->hold & VHOST_BLK_HOLD_STOP)) {
			err = vhost_blk_ring_stop(ring, VHOST_BLK_DRAIN_KILLABLE);
		} else if (!IS_ERR(ring) && ring->reqs) {
			rests = ring;
			vhost_blk_ring_hold(rests, VHOST_BLK_HOLD_REST);
			err = vhost_blk_drain(rests, VHOST_BLK_DRAIN_KILLABLE);
		}
	}
	if (!err)
		err = vhost_dev_ioctl(&blk->dev, cmd, argp);
	if (err == -ENOIOCTLCMD)
		err = vhost_vring_ioctl(&blk->dev, cmd, argp);
	if (rests)
		vhost_blk_ring_unhold(rests, VHOST_BLK_HOLD_REST);
	mutex_unlock(&blk->dev.mutex);
	return err;
}

/* The number of an ioctl without the struct size, which versions can change. */
#define VHOST_BLK_ANY_SIZE(cmd)	((cmd) & ~IOCSIZE_MASK)

static long vhost_blk_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct vhost_blk *blk = file->private_data;
	void __user *argp = (void __user *)arg;
	u64 features;

	/* Structs that can grow give their length in a field. */
	switch (VHOST_BLK_ANY_SIZE(cmd)) {
	case VHOST_BLK_ANY_SIZE(VHOST_BLK_SET_BACKEND):
		return vhost_blk_set_backend(blk, argp);
	case VHOST_BLK_ANY_SIZE(VHOST_BLK_GET_VRING_STATS):
		return vhost_blk_get_vring_stats(blk, argp);
	case VHOST_BLK_ANY_SIZE(VHOST_BLK_SET_VRING_INFLIGHT):
		return vhost_blk_set_vring_inflight(blk, argp);
	}

	switch (cmd) {
	case VHOST_BLK_SET_VRING:
		return vhost_blk_set_vring(blk, argp);
	case VHOST_GET_FEATURES:
		features = vhost_blk_features;
		return copy_to_user(argp, &features, sizeof(features)) ? -EFAULT : 0;
	case VHOST_SET_FEATURES:
		if (copy_from_user(&features, argp, sizeof(features)))
			return -EFAULT;
		return vhost_blk_set_features(blk, features);
	case VHOST_RESET_OWNER:
		return vhost_blk_reset_owner(blk);
	case VHOST_NEW_WORKER:
	case VHOST_FREE_WORKER:
	case VHOST_ATTACH_VRING_WORKER:
	case VHOST_GET_VRING_WORKER:
		return vhost_blk_worker_ioctl(blk, cmd, argp);
	default:
		/*
		 * The core reads a ring's index before it knows whether an
		 * ioctl has one.
		 */
		if (_IOC_TYPE(cmd) != VHOST_VIRTIO ||
		    _IOC_NR(cmd) >= _IOC_NR(VHOST_BLK_SET_BACKEND))
			return -ENOTTY;
		return vhost_blk_core_ioctl(blk, cmd, argp);
	}
}

static const struct file_operations vhost_blk_fops = {
	.owner = THIS_MODULE,
	.open = vhost_blk_open,
	.release = vhost_blk_release,
	.unlocked_ioctl = vhost_blk_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct miscdevice vhost_blk_misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "vhost-blk",
	.fops = &vhost_blk_fops,
};
module_misc_device(vhost_blk_misc);

MODULE_DESCRIPTION("Host kernel accelerator for virtio-blk");
MODULE_AUTHOR("The vshunt authors");
MODULE_LICENSE("GPL");
