// SPDX-License-Identifier: GPL-2.0-or-later
/* What the ioctls refuse, and with which errno. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "vb.h"

static void backend_fails(int device, int fd, uint32_t flags, int error, const char *what)
{
	struct vhost_blk_backend backend = { .size = sizeof(backend), .flags = flags, .fd = fd };

	vb_fails(device, VHOST_BLK_SET_BACKEND, &backend, error, what);
}

static void not_the_owner(const struct vb_args *args)
{
	struct vhost_vring_state state = { .num = 1 };
	int disk = open_disk(args, O_RDWR), fd = vb_open(args), status;
	pid_t child;

	backend_fails(fd, disk, 0, EPERM, "backend before VHOST_SET_OWNER");
	vb_fails(fd, VHOST_BLK_SET_VRING, &state, EPERM, "ring before VHOST_SET_OWNER");
	vb_ok(fd, VHOST_SET_OWNER, NULL, "VHOST_SET_OWNER");
	vb_fails(fd, VHOST_SET_OWNER, NULL, EBUSY, "second VHOST_SET_OWNER");
	child = fork();
	if (!child) {
		/* The same file, another address space. */
		backend_fails(fd, disk, 0, EPERM, "backend by another process");
		vb_fails(fd, VHOST_BLK_SET_VRING, &state, EPERM, "ring by another process");
		vb_fails(fd, VHOST_SET_VRING_NUM, &state, EPERM, "VHOST_SET_VRING_NUM by another process");
		_exit(0);
	}
	require(waitpid(child, &status, 0) == child && !status, "(in the other process)");
	close(fd);
}

static void backend_struct(const struct vb_args *args)
{
	union {
		struct vhost_blk_backend backend;
		char bytes[4200];
	} large;
	struct vb_dev dev;

	vb_prepare(&dev, args, 0);
	dev.disk = open_disk(args, O_RDWR);
	memset(&large, 0, sizeof(large));
	large.backend.fd = dev.disk;
	large.backend.size = 0;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, EINVAL, "size 0");
	large.backend.size = VHOST_BLK_BACKEND_SIZE_VER0 - 1;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, EINVAL, "size one less than the first version's");
	large.backend.size = 64;
	large.bytes[63] = 1;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, E2BIG, "a larger struct that says something");
	large.backend.size = 0xffffffff;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, E2BIG, "size 4 GiB");
	large.bytes[63] = 0;
	large.backend.size = sizeof(large.backend);
	large.backend.flags = 1u << 31;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, EINVAL, "unknown flag");
	large.backend.flags = 0;
	large.backend.reserved = 1;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, EINVAL, "reserved not zero");
	large.backend.reserved = 0;
	large.backend.reserved2 = 1;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, &large, EINVAL, "reserved2 not zero");
	large.backend.reserved2 = 0;
	vb_fails(dev.fd, VHOST_BLK_SET_BACKEND, NULL, EFAULT, "no struct");
	large.backend.size = 64;
	vb_ok(dev.fd, VHOST_BLK_SET_BACKEND, &large, "a larger struct whose rest is zero");
	large.backend.fd = -1;
	vb_ok(dev.fd, VHOST_BLK_SET_BACKEND, &large, "taking it away");
	/* A later version's number has its struct's size in it. */
	large.backend.fd = dev.disk;
	large.bytes[63] = 1;
	vb_fails(dev.fd, _IOC(_IOC_WRITE, VHOST_VIRTIO, _IOC_NR(VHOST_BLK_SET_BACKEND), 64), &large, E2BIG,
		 "a later version's ioctl that says something");
	large.bytes[63] = 0;
	vb_ok(dev.fd, _IOC(_IOC_WRITE, VHOST_VIRTIO, _IOC_NR(VHOST_BLK_SET_BACKEND), 64), &large,
	      "a later version's ioctl whose rest is zero");
	vb_close(&dev);
}

static void backend_file(const struct vb_args *args)
{
	char name[] = "/tmp/no-block-device.XXXXXX";
	struct vb_dev dev;
	int fd, ends[2];

	vb_prepare(&dev, args, 0);
	backend_fails(dev.fd, 999, 0, EBADF, "no such descriptor");
	fd = mkstemp(name);
	require(fd >= 0 && !unlink(name) && !ftruncate(fd, 1 << 20), "%s: %s", name, strerror(errno));
	backend_fails(dev.fd, fd, 0, ENOTBLK, "a regular file");
	fd = open("/dev/null", O_RDWR);
	backend_fails(dev.fd, fd, 0, ENOTBLK, "/dev/null");
	require(!pipe(ends), "pipe");
	backend_fails(dev.fd, ends[0], 0, ENOTBLK, "a pipe");
	backend_fails(dev.fd, dev.fd, 0, ENOTBLK, "the vhost device itself");
	backend_fails(dev.fd, open_disk(args, O_RDONLY), 0, EACCES, "a disk open for reading, to be written");
	backend_fails(dev.fd, open_disk(args, O_WRONLY), 0, EACCES, "a disk open for writing alone");
	backend_fails(dev.fd, open_disk(args, O_WRONLY), VHOST_BLK_BACKEND_READONLY, EACCES,
		      "a disk open for writing alone, to be read");
	backend_fails(dev.fd, open(args->disk, O_PATH), 0, EBADF, "a path");
	vb_backend(&dev, 0);
	backend_fails(dev.fd, dev.disk, 0, EBUSY, "a second backend");
	backend_fails(dev.fd, -1, 0, 0, "taking it away");
	vb_backend(&dev, 0);
	vb_close(&dev);
}

static void ring_arguments(const struct vb_args *args)
{
	struct vhost_vring_state state;
	struct vhost_vring_addr addr = { 0 };
	struct vb_dev dev;
	struct vb_ring ring;
	uint64_t features;

	vb_prepare(&dev, args, 0);
	ring_init(&ring, &dev, 0, 64);
	ring_set_up(&ring);
	require(ring_switch(&ring, true) == ENODEV, "start without a backend: not ENODEV");
	vb_backend(&dev, 0);
	state = (struct vhost_vring_state) { .index = VHOST_BLK_VRINGS_MAX, .num = 1 };
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, &state, EINVAL, "start of ring 64");
	state.index = 0xffffffff;
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, &state, EINVAL, "start of ring 0xffffffff");
	state = (struct vhost_vring_state) { .index = 0, .num = 2 };
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, &state, EINVAL, "ring switched to 2");
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, NULL, EFAULT, "no struct");
	state.index = 0;
	vb_fails(dev.fd, _IO(VHOST_VIRTIO, 0xff), &state, ENOTTY, "unknown ioctl");
	vb_ok(dev.fd, VHOST_GET_FEATURES, &features, "VHOST_GET_FEATURES");
	require(features >> VIRTIO_F_VERSION_1 & 1 && features >> VIRTIO_RING_F_INDIRECT_DESC & 1 &&
		features >> VIRTIO_RING_F_EVENT_IDX & 1 && features >> VHOST_F_LOG_ALL & 1 &&
		features >> VIRTIO_BLK_F_MQ & 1 && features >> VIRTIO_BLK_F_FLUSH & 1,
		"features %llx lack some", (unsigned long long)features);
	require(!(features >> VIRTIO_F_RING_PACKED & 1) && !(features >> VIRTIO_F_ACCESS_PLATFORM & 1),
		"features %llx offer what is not honoured", (unsigned long long)features);
	features = ~features;
	vb_fails(dev.fd, VHOST_SET_FEATURES, &features, EOPNOTSUPP, "features not offered");

	/* A ring that lies outside of the memory table. */
	addr.desc_user_addr = (uintptr_t)ring.desc;
	addr.avail_user_addr = (uintptr_t)ring.avail;
	addr.used_user_addr = (uintptr_t)dev.mem[0] + REGION_BYTES;
	vb_ok(dev.fd, VHOST_SET_VRING_ADDR, &addr, "VHOST_SET_VRING_ADDR");
	require(ring_switch(&ring, true) == EFAULT, "start with a used ring outside of guest memory: not EFAULT");
	ring_start(&ring);
	/* A running ring cannot be set up again. */
	state = (struct vhost_vring_state) { .index = 0, .num = 32 };
	vb_fails(dev.fd, VHOST_SET_VRING_NUM, &state, EBUSY, "VHOST_SET_VRING_NUM of a running ring");
	vb_fails(dev.fd, VHOST_SET_VRING_BASE, &state, EBUSY, "VHOST_SET_VRING_BASE of a running ring");
	ring_stop(&ring);
	vb_close(&dev);
}

/* Of these rings none may start; nor may the kernel allocate by what they say. */
static void ring_sizes(const struct vb_args *args)
{
	static const unsigned int sizes[] = { 2048, 32768 };
	struct vb_dev dev;
	struct vb_ring ring;

	vb_prepare(&dev, args, 0);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 63, VHOST_BLK_VRING_NUM_MAX);
	for (unsigned int n = 0; n < 2; n++) {
		struct vhost_vring_state state = { .index = 63, .num = sizes[n] };
		int error;

		ring_set_up(&ring);
		if (ioctl(dev.fd, VHOST_SET_VRING_NUM, &state) < 0)
			continue;
		error = ring_switch(&ring, true);
		require(error == EINVAL, "a ring of %u starts with %s, should be %s", sizes[n], strerror(error),
			strerror(EINVAL));
	}
	ring_start(&ring);
	ring_stop(&ring);
	vb_close(&dev);
}

static void stats_struct(const struct vb_args *args)
{
	struct vhost_blk_vring_stats stats = { .size = sizeof(stats) };
	struct {
		struct vhost_blk_vring_stats known;
		uint64_t more;
	} later = { .known.size = sizeof(later) };
	struct vb_dev dev;

	vb_prepare(&dev, args, 0);
	vb_ok(dev.fd, VHOST_BLK_GET_VRING_STATS, &stats, "counters of a ring that never ran");
	require(!stats.running && !stats.requests, "a ring that never ran has counted");
	stats.index = VHOST_BLK_VRINGS_MAX;
	vb_fails(dev.fd, VHOST_BLK_GET_VRING_STATS, &stats, EINVAL, "counters of ring 64");
	stats.index = 0;
	stats.size = 8;
	vb_fails(dev.fd, VHOST_BLK_GET_VRING_STATS, &stats, EINVAL, "counters into 8 bytes");
	vb_ok(dev.fd, _IOC(_IOC_READ | _IOC_WRITE, VHOST_VIRTIO, _IOC_NR(VHOST_BLK_GET_VRING_STATS), sizeof(later)),
	      &later, "counters into a later version's struct");
	require(later.known.size == sizeof(later) && !later.more, "more was written than there is");
	vb_close(&dev);
}

/* Workers of upstream's vhost, before and after the owner is set. */
static void worker_arguments(const struct vb_args *args)
{
	struct vhost_worker_state worker = { 0 };
	struct vhost_vring_worker at = { 0 };
	struct vb_dev dev;
	struct vb_ring ring;
	int fd = vb_open(args);

	vb_fails(fd, VHOST_NEW_WORKER, &worker, EINVAL, "VHOST_NEW_WORKER before VHOST_SET_OWNER");
	close(fd);
	vb_prepare(&dev, args, 0);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, 64);
	ring_start(&ring);
	vb_ok(dev.fd, VHOST_NEW_WORKER, &worker, "VHOST_NEW_WORKER");
	require(worker.worker_id == 1, "the first worker of our own is %u, should be 1", worker.worker_id);
	at.worker_id = 99;
	vb_fails(dev.fd, VHOST_ATTACH_VRING_WORKER, &at, ENODEV, "attach to a worker that is not there");
	at = (struct vhost_vring_worker) { .index = VHOST_BLK_VRINGS_MAX, .worker_id = 1 };
	vb_fails(dev.fd, VHOST_ATTACH_VRING_WORKER, &at, ENOBUFS, "attach of ring 64");
	at.index = 0;
	vb_ok(dev.fd, VHOST_ATTACH_VRING_WORKER, &at, "VHOST_ATTACH_VRING_WORKER");
	at.worker_id = 0;
	vb_ok(dev.fd, VHOST_GET_VRING_WORKER, &at, "VHOST_GET_VRING_WORKER");
	require(at.worker_id == 1, "ring 0 is at worker %u, was attached to 1", at.worker_id);
	vb_fails(dev.fd, VHOST_FREE_WORKER, &worker, EBUSY, "VHOST_FREE_WORKER of one that has a ring");
	at.worker_id = 0;
	vb_ok(dev.fd, VHOST_ATTACH_VRING_WORKER, &at, "back to worker 0");
	vb_ok(dev.fd, VHOST_FREE_WORKER, &worker, "VHOST_FREE_WORKER");
	vb_fails(dev.fd, VHOST_FREE_WORKER, &worker, ENODEV, "VHOST_FREE_WORKER again");
	vb_close(&dev);
}

const struct vb_case cases_errors[] = {
	{ "errors", "only the owner", not_the_owner },
	{ "errors", "the backend's struct: sizes, flags, reserved", backend_struct },
	{ "errors", "the backend's file: no block device, not open for it, a second one", backend_file },
	{ "errors", "rings: index, number, features, addresses, a running one", ring_arguments },
	{ "errors", "rings longer than there are", ring_sizes },
	{ "errors", "counters: index and size", stats_struct },
	{ "errors", "workers: order, ids, EBUSY, none of that id", worker_arguments },
	{ .body = NULL },
};
