// SPDX-License-Identifier: GPL-2.0-or-later
/* Requests of the test driver: layouts, verification, load. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "vb.h"

/* Room before the data of a buffer, so that it keeps its alignment and the header fits. */
#define HEAD_ROOM	4096u
/* The largest transfer of the disk_* helpers. */
#define BOUNCE_BYTES	(2u << 20)

void chain_add(struct vb_dev *dev, struct vb_chain *chain, void *at, size_t bytes, bool write)
{
	require(chain->n < VHOST_BLK_VRING_NUM_MAX, "the test makes too long a chain");
	chain->d[chain->n++] = (struct vring_desc) {
		.addr = vb_gpa(dev, at),
		.len = bytes,
		.flags = write ? VRING_DESC_F_WRITE : 0,
	};
}

static int by_size(const void *left, const void *right)
{
	const size_t *a = left, *b = right;

	return *a < *b ? -1 : *a > *b;
}

/* A range as `pieces` descriptors cut at random; fewer where a cut is met twice. */
void chain_split(struct vb_dev *dev, struct vb_chain *chain, void *at, size_t bytes, bool write, unsigned int pieces,
		 uint64_t *seed)
{
	size_t cut[64], from = 0;

	require(pieces && pieces <= 64, "the test splits into too many pieces");
	for (unsigned int n = 0; n + 1 < pieces; n++)
		cut[n] = chance(seed, bytes);
	cut[pieces - 1] = bytes;
	qsort(cut, pieces, sizeof(*cut), by_size);
	for (unsigned int n = 0; n < pieces; n++) {
		if (cut[n] == from)
			continue;
		chain_add(dev, chain, (char *)at + from, cut[n] - from, write);
		from = cut[n];
	}
}

struct vb_buffer buffer_new(struct vb_dev *dev, int region, size_t bytes, size_t align)
{
	struct vb_buffer buffer = { .bytes = bytes };
	char *at = vb_alloc(dev, region, HEAD_ROOM + align + bytes + 1, 4096);

	/* Aligned to `align`, and to nothing more. */
	buffer.data = (uint8_t *)at + HEAD_ROOM + (align < 4096 ? align : 0);
	buffer.hdr = (struct virtio_blk_outhdr *)(buffer.data - sizeof(*buffer.hdr));
	return buffer;
}

uint8_t *buffer_status(struct vb_buffer *buffer, size_t bytes)
{
	return buffer->data + bytes;
}

void chain_request(struct vb_dev *dev, struct vb_chain *chain, struct vb_buffer *buffer, uint32_t type, uint64_t sector,
		   size_t bytes, unsigned int pieces, uint64_t *seed)
{
	bool in = type == VIRTIO_BLK_T_IN || type == VIRTIO_BLK_T_GET_ID;
	struct virtio_blk_outhdr hdr = { .type = type, .sector = sector };
	uint8_t *status = buffer_status(buffer, bytes);

	require(bytes <= buffer->bytes, "the test's buffer is too small");
	memcpy(buffer->hdr, &hdr, sizeof(hdr));
	*status = NO_STATUS;
	chain->n = 0;
	if (pieces && in) {
		chain_split(dev, chain, buffer->hdr, sizeof(hdr), false, 1 + chance(seed, 3), seed);
		chain_split(dev, chain, buffer->data, bytes + 1, true, pieces, seed);
	} else if (pieces) {
		chain_split(dev, chain, buffer->hdr, sizeof(hdr) + bytes, false, pieces, seed);
		chain_add(dev, chain, status, 1, true);
	} else {
		chain_add(dev, chain, buffer->hdr, sizeof(hdr), false);
		if (bytes)
			chain_add(dev, chain, buffer->data, bytes, in);
		chain_add(dev, chain, status, 1, true);
	}
}

uint8_t do_request(struct vb_ring *ring, struct vb_buffer *buffer, uint32_t type, uint64_t sector, size_t bytes)
{
	static __thread struct vb_chain chain;
	int head;

	chain.table = NULL;
	chain_request(ring->dev, &chain, buffer, type, sector, bytes, 0, NULL);
	head = ring_push(ring, &chain);
	ring_kick(ring);
	ring_wait(ring, head);
	return *buffer_status(buffer, bytes);
}

static void *bounce(void)
{
	static void *memory;

	if (!memory && posix_memalign(&memory, 4096, BOUNCE_BYTES))
		fail("no memory");
	return memory;
}

void disk_read(struct vb_dev *dev, uint64_t sector, void *data, size_t bytes)
{
	require(pread(dev->disk, bounce(), bytes, sector * SECTOR) == (ssize_t)bytes, "the disk cannot be read: %s",
		strerror(errno));
	memcpy(data, bounce(), bytes);
}

void disk_write(struct vb_dev *dev, uint64_t sector, const void *data, size_t bytes)
{
	memcpy(bounce(), data, bytes);
	require(pwrite(dev->disk, bounce(), bytes, sector * SECTOR) == (ssize_t)bytes, "the disk cannot be written: %s",
		strerror(errno));
}

void fill(void *data, size_t bytes, uint64_t seed)
{
	uint8_t *at = data;

	seed = seed * 0x9e3779b97f4a7c15ull | 1;
	for (size_t n = 0; n < bytes; n += sizeof(seed)) {
		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		memcpy(at + n, &seed, bytes - n < sizeof(seed) ? bytes - n : sizeof(seed));
	}
}

void require_same(const void *is, const void *should, size_t bytes, const char *what)
{
	const uint8_t *a = is, *b = should;

	for (size_t n = 0; n < bytes; n++)
		require(a[n] == b[n], "%s: byte %zu of %zu is %02x, should be %02x", what, n, bytes, a[n], b[n]);
}

#define LOAD_BYTES	(16u << 10)
#define LOAD_DEPTH_MAX	64

/* A slot writes its part of the disk, reads it, compares, and begins again. */
struct slot {
	struct vb_buffer buffer;
	struct vring_desc *table;
	size_t bytes;
	uint64_t sector;
	uint64_t pattern;
	int head;
	bool reading;
};

static void slot_send(struct load *load, struct slot *slot)
{
	static __thread struct vb_chain chain;
	bool plain = chance(&load->seed, 2);

	chain.table = chance(&load->seed, 3) ? NULL : slot->table;
	if (!slot->reading) {
		slot->bytes = SECTOR * (1 + chance(&load->seed, LOAD_BYTES / SECTOR));
		slot->pattern = load->seed;
		fill(slot->buffer.data, slot->bytes, slot->pattern);
	} else {
		memset(slot->buffer.data, 0, slot->bytes);
	}
	chain_request(load->ring->dev, &chain, &slot->buffer, slot->reading ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT,
		      slot->sector, slot->bytes, plain ? 0 : 1 + chance(&load->seed, 6), &load->seed);
	slot->head = ring_push(load->ring, &chain);
}

static void slot_done(struct load *load, struct slot *slot)
{
	static __thread uint8_t should[LOAD_BYTES];
	uint8_t status = *buffer_status(&slot->buffer, slot->bytes);

	uint32_t used_len = load->ring->used_len[slot->head];

	slot->head = -1;
	__atomic_add_fetch(&load->done, 1, __ATOMIC_RELAXED);
	if (status != VIRTIO_BLK_S_OK) {
		require(load->errors_allowed && status == VIRTIO_BLK_S_IOERR, "status %u at sector %llu", status,
			(unsigned long long)slot->sector);
		__atomic_add_fetch(&load->errors, 1, __ATOMIC_RELAXED);
		slot->reading = false;
		return;
	}
	require(used_len == (slot->reading ? slot->bytes + 1 : 1), "%s of %zu bytes: used length %u",
		slot->reading ? "IN" : "OUT", slot->bytes, used_len);
	if (slot->reading) {
		fill(should, slot->bytes, slot->pattern);
		require_same(slot->buffer.data, should, slot->bytes, "read back under load");
	}
	slot->reading = !slot->reading;
}

static void *load_thread(void *argument)
{
	struct load *load = argument;
	struct slot *slots = load->slots;
	unsigned int in_flight = 0;
	uint64_t heard = now_ms();

	for (;;) {
		bool stop = __atomic_load_n(&load->stop, __ATOMIC_ACQUIRE);
		bool pushed = false;

		for (unsigned int n = 0; n < load->depth && !stop; n++) {
			/* Leaves room for the longest chain. */
			if (slots[n].head >= 0 || load->ring->free_count < 16)
				continue;
			slot_send(load, &slots[n]);
			in_flight++;
			pushed = true;
		}
		if (pushed)
			ring_kick(load->ring);
		if (!in_flight)
			return NULL;
		ring_poll(load->ring, 100);
		if (ring_reap(load->ring))
			heard = now_ms();
		require(now_ms() - heard < WAIT_MS, "ring %u: %u requests not answered in %u ms (used index %u of %u)",
			load->ring->index, in_flight, WAIT_MS, load->ring->used->idx, load->ring->next_avail);
		for (unsigned int n = 0; n < load->depth; n++) {
			if (slots[n].head < 0 || load->ring->busy[slots[n].head])
				continue;
			slot_done(load, &slots[n]);
			in_flight--;
		}
	}
}

void load_start(struct load *load)
{
	struct vb_dev *dev = load->ring->dev;
	pthread_t thread;

	require(load->depth <= LOAD_DEPTH_MAX && load->sectors >= load->depth * (LOAD_BYTES / SECTOR),
		"the test's load does not fit");
	/* Once: guest memory is not given back. */
	if (!load->slots) {
		load->slots = calloc(load->depth, sizeof(*load->slots));
		for (unsigned int n = 0; n < load->depth; n++) {
			/* Some of them at addresses that a disk's DMA does not take. */
			load->slots[n].buffer = buffer_new(dev, n % REGIONS, LOAD_BYTES, n % 4 ? 4096 : 4);
			load->slots[n].table = vb_alloc(dev, (n + 1) % REGIONS, 32 * sizeof(struct vring_desc), 16);
			load->slots[n].sector = load->first_sector + n * (LOAD_BYTES / SECTOR);
		}
	}
	for (unsigned int n = 0; n < load->depth; n++) {
		load->slots[n].head = -1;
		load->slots[n].reading = false;
	}
	load->stop = false;
	require(!pthread_create(&thread, NULL, load_thread, load), "pthread_create");
	load->thread = thread;
}

void load_wait(struct load *load, uint64_t done)
{
	uint64_t end = now_ms() + WAIT_MS;

	while (__atomic_load_n(&load->done, __ATOMIC_RELAXED) < done) {
		require(now_ms() < end, "ring %u: %llu requests only", load->ring->index,
			(unsigned long long)__atomic_load_n(&load->done, __ATOMIC_RELAXED));
		usleep(1000);
	}
}

/* Ends when all that is in flight is answered. */
void load_end(struct load *load)
{
	__atomic_store_n(&load->stop, true, __ATOMIC_RELEASE);
	pthread_join(load->thread, NULL);
}
