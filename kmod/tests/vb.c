// SPDX-License-Identifier: GPL-2.0-or-later
/* Device, guest memory and rings of the test driver. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "vb.h"

static const uint64_t region_gpa[REGIONS] = { 1ull << 20, 5ull << 30 };

void fail(const char *format, ...)
{
	va_list list;

	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fflush(stderr);
	_exit(1);
}

uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

/* xorshift64*; never 0. */
uint32_t chance(uint64_t *seed, uint32_t below)
{
	*seed ^= *seed >> 12;
	*seed ^= *seed << 25;
	*seed ^= *seed >> 27;
	return (uint32_t)((*seed * 0x2545f4914f6cdd1dull) >> 33) % below;
}

void vb_ok(int fd, unsigned long request, void *argument, const char *name)
{
	if (ioctl(fd, request, argument) < 0)
		fail("%s: %s", name, strerror(errno));
}

void vb_fails(int fd, unsigned long request, void *argument, int error, const char *name)
{
	int is = ioctl(fd, request, argument) < 0 ? errno : 0;

	if (is != error)
		fail("%s: %s, should be %s", name, strerror(is), strerror(error));
}

int vb_open(const struct vb_args *args)
{
	int fd = open(args->device, O_RDWR | O_CLOEXEC);

	require(fd >= 0, "%s: %s", args->device, strerror(errno));
	return fd;
}

void vb_mem_table(struct vb_dev *dev)
{
	struct {
		struct vhost_memory head;
		struct vhost_memory_region regions[REGIONS];
	} table = { .head.nregions = REGIONS };

	for (int n = 0; n < REGIONS; n++) {
		table.regions[n].guest_phys_addr = region_gpa[n];
		table.regions[n].memory_size = REGION_BYTES;
		table.regions[n].userspace_addr = (uintptr_t)dev->mem[n];
	}
	vb_ok(dev->fd, VHOST_SET_MEM_TABLE, &table, "VHOST_SET_MEM_TABLE");
}

/* The guest's memory; the device is not open. */
void vb_memory(struct vb_dev *dev, const struct vb_args *args, uint64_t features)
{
	memset(dev, 0, sizeof(*dev));
	dev->args = args;
	dev->fd = -1;
	dev->disk = -1;
	dev->features = features | 1ull << VIRTIO_F_VERSION_1;
	for (int n = 0; n < REGIONS; n++) {
		dev->mem[n] = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		require(dev->mem[n] != MAP_FAILED, "mmap: %s", strerror(errno));
	}
}

/* An open device is this process's, with features and memory set. */
void vb_own(struct vb_dev *dev)
{
	vb_ok(dev->fd, VHOST_SET_OWNER, NULL, "VHOST_SET_OWNER");
	vb_ok(dev->fd, VHOST_SET_FEATURES, &dev->features, "VHOST_SET_FEATURES");
	vb_mem_table(dev);
}

/* Open, owned, features and memory set; neither backend nor rings. */
void vb_prepare(struct vb_dev *dev, const struct vb_args *args, uint64_t features)
{
	int fd = vb_open(args);

	vb_memory(dev, args, features);
	dev->fd = fd;
	vb_own(dev);
}

void vb_close(struct vb_dev *dev)
{
	close(dev->fd);
	if (dev->disk >= 0)
		close(dev->disk);
	for (int n = 0; n < REGIONS; n++)
		munmap(dev->mem[n], REGION_BYTES);
}

void *vb_alloc(struct vb_dev *dev, int region, size_t bytes, size_t align)
{
	size_t at = (dev->taken[region] + align - 1) / align * align;

	require(at + bytes <= REGION_BYTES, "the test needs more guest memory than it has");
	dev->taken[region] = at + bytes;
	return dev->mem[region] + at;
}

uint64_t vb_gpa(struct vb_dev *dev, const void *at)
{
	for (int n = 0; n < REGIONS; n++) {
		size_t offset = (const char *)at - dev->mem[n];

		if ((const char *)at >= dev->mem[n] && offset < REGION_BYTES)
			return region_gpa[n] + offset;
	}
	fail("not in guest memory: %p", at);
}

void vb_backend(struct vb_dev *dev, uint32_t flags)
{
	struct vhost_blk_backend backend = { .size = sizeof(backend), .flags = flags };

	memcpy(backend.serial, "smoke-0123456789abcd", VHOST_BLK_SERIAL_BYTES);
	if (dev->disk < 0)
		dev->disk = open_disk(dev->args, (flags ? O_RDONLY : O_RDWR) | O_DIRECT);
	backend.fd = dev->disk;
	vb_ok(dev->fd, VHOST_BLK_SET_BACKEND, &backend, "VHOST_BLK_SET_BACKEND");
}

int open_disk(const struct vb_args *args, int flags)
{
	int fd = open(args->disk, flags | O_CLOEXEC);

	require(fd >= 0, "%s: %s", args->disk, strerror(errno));
	return fd;
}

/* Memory and eventfds of a ring; odd rings lie in the second region. */
void ring_init(struct vb_ring *ring, struct vb_dev *dev, unsigned int index, unsigned int num)
{
	int region = index % REGIONS;

	memset(ring, 0, sizeof(*ring));
	ring->dev = dev;
	ring->index = index;
	ring->num = num;
	ring->desc = vb_alloc(dev, region, num * sizeof(*ring->desc), 16);
	ring->avail = vb_alloc(dev, region, sizeof(*ring->avail) + (num + 1) * sizeof(uint16_t), 2);
	ring->used = vb_alloc(dev, region, sizeof(*ring->used) + num * sizeof(struct vring_used_elem) + 2, 4);
	ring->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ring->call = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ring->err = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	ring->next_free = calloc(num, sizeof(*ring->next_free));
	ring->chain_length = calloc(num, sizeof(*ring->chain_length));
	ring->busy = calloc(num, sizeof(*ring->busy));
	ring->used_len = calloc(num, sizeof(*ring->used_len));
	for (unsigned int n = 0; n < num; n++)
		ring->next_free[n] = n + 1;
	ring->free_count = num;
}

/* Everything that VHOST_BLK_SET_VRING wants, from where the driver stands. */
void ring_set_up(struct vb_ring *ring)
{
	struct vhost_vring_state state = { .index = ring->index, .num = ring->num };
	struct vhost_vring_file file = { .index = ring->index };
	struct vhost_vring_addr addr = {
		.index = ring->index,
		.desc_user_addr = (uintptr_t)ring->desc,
		.avail_user_addr = (uintptr_t)ring->avail,
		.used_user_addr = (uintptr_t)ring->used,
		.log_guest_addr = vb_gpa(ring->dev, ring->used),
		.flags = ring->dev->features >> VHOST_F_LOG_ALL & 1 ? 1u << VHOST_VRING_F_LOG : 0,
	};

	vb_ok(ring->dev->fd, VHOST_SET_VRING_NUM, &state, "VHOST_SET_VRING_NUM");
	state.num = ring->last_used;
	vb_ok(ring->dev->fd, VHOST_SET_VRING_BASE, &state, "VHOST_SET_VRING_BASE");
	vb_ok(ring->dev->fd, VHOST_SET_VRING_ADDR, &addr, "VHOST_SET_VRING_ADDR");
	file.fd = ring->call;
	vb_ok(ring->dev->fd, VHOST_SET_VRING_CALL, &file, "VHOST_SET_VRING_CALL");
	file.fd = ring->err;
	vb_ok(ring->dev->fd, VHOST_SET_VRING_ERR, &file, "VHOST_SET_VRING_ERR");
	file.fd = ring->kick;
	vb_ok(ring->dev->fd, VHOST_SET_VRING_KICK, &file, "VHOST_SET_VRING_KICK");
}

/* 0 or the errno. */
int ring_switch(struct vb_ring *ring, bool on)
{
	struct vhost_vring_state state = { .index = ring->index, .num = on };

	return ioctl(ring->dev->fd, VHOST_BLK_SET_VRING, &state) < 0 ? errno : 0;
}

void ring_start(struct vb_ring *ring)
{
	int error;

	ring_set_up(ring);
	error = ring_switch(ring, true);
	require(!error, "start of ring %u: %s", ring->index, strerror(error));
}

void ring_stop(struct vb_ring *ring)
{
	int error = ring_switch(ring, false);

	require(!error, "stop of ring %u: %s", ring->index, strerror(error));
}

uint16_t ring_base(struct vb_ring *ring)
{
	struct vhost_vring_state state = { .index = ring->index };

	vb_ok(ring->dev->fd, VHOST_GET_VRING_BASE, &state, "VHOST_GET_VRING_BASE");
	return state.num;
}

/* The driver's side of a ring that was stopped. */
void ring_free(struct vb_ring *ring)
{
	close(ring->kick);
	close(ring->call);
	close(ring->err);
	free(ring->next_free);
	free(ring->chain_length);
	free(ring->busy);
	free(ring->used_len);
}

struct vhost_blk_vring_stats ring_stats(struct vb_ring *ring)
{
	struct vhost_blk_vring_stats stats = { .size = sizeof(stats), .index = ring->index };

	vb_ok(ring->dev->fd, VHOST_BLK_GET_VRING_STATS, &stats, "VHOST_BLK_GET_VRING_STATS");
	return stats;
}

static uint16_t take_descriptor(struct vb_ring *ring)
{
	uint16_t head = ring->free_head;

	require(ring->free_count, "the test pushed more than the ring holds");
	ring->free_head = ring->next_free[head];
	ring->free_count--;
	return head;
}

/* Makes a chain available; its head. */
int ring_prepare(struct vb_ring *ring, const struct vb_chain *chain)
{
	struct vring_desc *desc;
	uint16_t head = take_descriptor(ring), at = head;

	ring->chain_length[head] = chain->table ? 1 : chain->n;
	if (chain->table) {
		for (unsigned int n = 0; n < chain->n; n++) {
			chain->table[n] = chain->d[n];
			chain->table[n].next = n + 1;
			if (n + 1 < chain->n)
				chain->table[n].flags |= VRING_DESC_F_NEXT;
		}
		desc = &ring->desc[head];
		desc->addr = vb_gpa(ring->dev, chain->table);
		desc->len = chain->n * sizeof(*desc);
		desc->flags = VRING_DESC_F_INDIRECT;
		desc->next = 0;
	} else {
		for (unsigned int n = 0; n < chain->n; n++) {
			desc = &ring->desc[at];
			*desc = chain->d[n];
			if (n + 1 < chain->n) {
				at = take_descriptor(ring);
				desc->flags |= VRING_DESC_F_NEXT;
				desc->next = at;
			}
		}
	}
	ring->busy[head] = true;
	ring->avail->ring[ring->next_avail % ring->num] = head;
	ring->next_avail++;
	return head;
}

void ring_publish(struct vb_ring *ring, uint16_t idx)
{
	/* The device reads the entries after the index. */
	__atomic_store_n(&ring->avail->idx, idx, __ATOMIC_RELEASE);
}

int ring_push(struct vb_ring *ring, const struct vb_chain *chain)
{
	int head = ring_prepare(ring, chain);

	ring_publish(ring, ring->next_avail);
	return head;
}

void ring_kick(struct vb_ring *ring)
{
	uint64_t one = 1;

	require(write(ring->kick, &one, sizeof(one)) == sizeof(one), "kick: %s", strerror(errno));
}

unsigned int ring_reap(struct vb_ring *ring)
{
	unsigned int count = 0;

	while (ring->last_used != __atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE)) {
		struct vring_used_elem *used = &ring->used->ring[ring->last_used % ring->num];
		uint16_t at;

		require(used->id < ring->num && ring->busy[used->id],
			"ring %u: used element %u is not of a request in flight", ring->index, used->id);
		ring->busy[used->id] = false;
		ring->used_len[used->id] = used->len;
		at = used->id;
		for (unsigned int n = ring->chain_length[used->id]; n; n--) {
			uint16_t next = ring->desc[at].next;

			ring->next_free[at] = ring->free_head;
			ring->free_head = at;
			ring->free_count++;
			at = next;
		}
		ring->last_used++;
		count++;
	}
	return count;
}

bool ring_poll(struct vb_ring *ring, int timeout_ms)
{
	struct pollfd fd = { .fd = ring->call, .events = POLLIN };
	uint64_t count;

	/* EVENT_IDX: the device signals when it passes this. */
	__atomic_store_n(&ring->avail->ring[ring->num], ring->last_used, __ATOMIC_SEQ_CST);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (__atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE) != ring->last_used)
		return true;
	if (poll(&fd, 1, timeout_ms) != 1) {
		if (__atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE) == ring->last_used)
			return false;
		/* The used index moves before the signal: it may be a moment late, not lost. */
		require(poll(&fd, 1, WAIT_MS / 4) == 1, "ring %u: used, but the driver was not notified", ring->index);
	}
	if (read(ring->call, &count, sizeof(count)) < 0)
		return false;
	return true;
}

void ring_wait(struct vb_ring *ring, int head)
{
	uint64_t end = now_ms() + WAIT_MS;

	while (ring->busy[head]) {
		ring_reap(ring);
		if (!ring->busy[head])
			break;
		ring_poll(ring, 100);
		require(now_ms() < end, "ring %u: no answer in %u ms (used index %u of %u, %s)", ring->index, WAIT_MS,
			ring->used->idx, ring->next_avail, ring_broken(ring) ? "broken" : "not broken");
	}
}

/* Whether the device said that the ring is broken. */
bool ring_broken(struct vb_ring *ring)
{
	uint64_t count;

	return read(ring->err, &count, sizeof(count)) == sizeof(count);
}
