// SPDX-License-Identifier: GPL-2.0-or-later
/* What a guest asks for, and gets. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "vb.h"

#define BIG	(1u << 20)

struct bench {
	struct vb_dev dev;
	struct vb_ring ring;
	struct vb_buffer buffer;
	uint64_t seed;
	uint8_t *should;
};

static void begin(struct bench *b, const struct vb_args *args, uint64_t features, uint32_t flags)
{
	vb_prepare(&b->dev, args, features);
	vb_backend(&b->dev, flags);
	ring_init(&b->ring, &b->dev, 1, 256);
	ring_start(&b->ring);
	b->buffer = buffer_new(&b->dev, 0, BIG, 4096);
	b->should = malloc(BIG);
	b->seed = args->seed * 77 + 1;
}

static void end(struct bench *b)
{
	ring_stop(&b->ring);
	vb_close(&b->dev);
}

static void status_is(struct bench *b, uint32_t type, uint64_t sector, size_t bytes, uint8_t should)
{
	uint8_t is = do_request(&b->ring, &b->buffer, type, sector, bytes);

	require(is == should, "type %u at sector %llu, %zu bytes: status %u, should be %u", type,
		(unsigned long long)sector, bytes, is, should);
}

static void write_and_read(const struct vb_args *args)
{
	static const size_t sizes[] = { 512, 4096, 65536, 512 * 1023, BIG };
	struct bench b;

	begin(&b, args, 1ull << VIRTIO_BLK_F_FLUSH, 0);
	for (unsigned int n = 0; n < sizeof(sizes) / sizeof(*sizes); n++) {
		uint64_t sector = 8 + n * 4096;

		fill(b.should, sizes[n], n + 1);
		memcpy(b.buffer.data, b.should, sizes[n]);
		status_is(&b, VIRTIO_BLK_T_OUT, sector, sizes[n], VIRTIO_BLK_S_OK);
		memset(b.buffer.data, 0, sizes[n]);
		disk_read(&b.dev, sector, b.buffer.data, sizes[n]);
		require_same(b.buffer.data, b.should, sizes[n], "the disk after OUT");
		fill(b.should, sizes[n], n + 100);
		disk_write(&b.dev, sector, b.should, sizes[n]);
		status_is(&b, VIRTIO_BLK_T_IN, sector, sizes[n], VIRTIO_BLK_S_OK);
		require_same(b.buffer.data, b.should, sizes[n], "IN");
	}
	status_is(&b, VIRTIO_BLK_T_FLUSH, 0, 0, VIRTIO_BLK_S_OK);
	end(&b);
}

static void serial(const struct vb_args *args)
{
	struct bench b;

	begin(&b, args, 0, 0);
	memset(b.buffer.data, 0x55, 64);
	status_is(&b, VIRTIO_BLK_T_GET_ID, 0, VHOST_BLK_SERIAL_BYTES, VIRTIO_BLK_S_OK);
	require_same(b.buffer.data, "smoke-0123456789abcd", VHOST_BLK_SERIAL_BYTES, "GET_ID");
	memset(b.buffer.data, 0x55, 64);
	status_is(&b, VIRTIO_BLK_T_GET_ID, 0, 8, VIRTIO_BLK_S_OK);
	require_same(b.buffer.data, "smoke-01", 8, "GET_ID into 8 bytes");
	end(&b);
}

static void refused(const struct vb_args *args)
{
	struct bench b;
	uint64_t sectors = args->disk_bytes / SECTOR;
	struct vhost_blk_vring_stats stats;

	begin(&b, args, 1ull << VIRTIO_BLK_F_FLUSH, 0);
	status_is(&b, VIRTIO_BLK_T_IN, sectors, 512, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_OUT, sectors - 1, 1024, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_IN, ~0ull, 512, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_OUT, 1ull << 55, 512, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_IN, (1ull << 55) - 1, 1024, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_IN, 0, 511, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_OUT, 0, 4097, VIRTIO_BLK_S_IOERR);
	status_is(&b, 0x7fff, 0, 0, VIRTIO_BLK_S_UNSUPP);
	status_is(&b, VIRTIO_BLK_T_SCSI_CMD, 0, 512, VIRTIO_BLK_S_UNSUPP);
	status_is(&b, VIRTIO_BLK_T_IN, sectors - 2, 1024, VIRTIO_BLK_S_OK);
	stats = ring_stats(&b.ring);
	require(stats.requests == 10 && stats.errors == 7 && stats.unsupported == 2 && stats.read_bytes == 1024 &&
		!stats.written_bytes && stats.running == 1 && !stats.in_flight,
		"counters: %llu requests, %llu errors, %llu unsupported, %llu read, %u in flight",
		(unsigned long long)stats.requests, (unsigned long long)stats.errors,
		(unsigned long long)stats.unsupported, (unsigned long long)stats.read_bytes, stats.in_flight);
	end(&b);
}

static void read_only(const struct vb_args *args)
{
	struct bench b;

	begin(&b, args, 1ull << VIRTIO_BLK_F_RO, VHOST_BLK_BACKEND_READONLY);
	fill(b.should, 4096, 3);
	disk_read(&b.dev, 64, b.should, 4096);
	memset(b.buffer.data, 0x11, 4096);
	status_is(&b, VIRTIO_BLK_T_OUT, 64, 4096, VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_IN, 64, 4096, VIRTIO_BLK_S_OK);
	require_same(b.buffer.data, b.should, 4096, "the disk after a refused OUT");
	end(&b);
}

/*
 * Any cut of header, data and status, in the ring and in indirect tables, at addresses of every
 * alignment.
 */
static void layouts(const struct vb_args *args)
{
	static const size_t aligns[] = { 1, 2, 4, 64, 512, 4096 };
	static struct vb_chain chain;
	struct vb_buffer buffers[6];
	struct vring_desc *table;
	struct bench b;

	begin(&b, args, 1ull << VIRTIO_RING_F_INDIRECT_DESC, 0);
	for (unsigned int n = 0; n < 6; n++)
		buffers[n] = buffer_new(&b.dev, n % REGIONS, 128 << 10, aligns[n]);
	table = vb_alloc(&b.dev, 1, 128 * sizeof(*table), 16);
	for (unsigned int n = 0; n < 600; n++) {
		struct vb_buffer *buffer = &buffers[chance(&b.seed, 6)];
		size_t bytes = SECTOR * (1 + chance(&b.seed, chance(&b.seed, 4) ? 16 : 256));
		uint64_t sector = chance(&b.seed, 8192);
		bool in = chance(&b.seed, 2);
		int head;

		fill(b.should, bytes, n);
		if (in)
			disk_write(&b.dev, sector, b.should, bytes);
		else
			memcpy(buffer->data, b.should, bytes);
		chain.table = chance(&b.seed, 2) ? table : NULL;
		chain_request(&b.dev, &chain, buffer, in ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT, sector, bytes,
			      1 + chance(&b.seed, 24), &b.seed);
		head = ring_push(&b.ring, &chain);
		ring_kick(&b.ring);
		ring_wait(&b.ring, head);
		require(*buffer_status(buffer, bytes) == VIRTIO_BLK_S_OK,
			"case %u: status %u of %s, %zu bytes in %u descriptors", n,
			*buffer_status(buffer, bytes), in ? "IN" : "OUT", bytes, chain.n);
		require(b.ring.used_len[head] == (in ? bytes + 1 : 1), "case %u: used length %u of %s, %zu bytes", n,
			b.ring.used_len[head], in ? "IN" : "OUT", bytes);
		if (!in) {
			memset(buffer->data, 0, bytes);
			disk_read(&b.dev, sector, buffer->data, bytes);
		}
		require_same(buffer->data, b.should, bytes, in ? "IN, cut at random" : "OUT, cut at random");
	}
	end(&b);
}

static void discard_and_zeroes(const struct vb_args *args)
{
	struct virtio_blk_discard_write_zeroes segments[2] = {
		{ .sector = 1024, .num_sectors = 64 }, { .sector = 2048, .num_sectors = 8 },
	};
	struct bench b;
	uint64_t features;
	int fd = vb_open(args);

	vb_ok(fd, VHOST_GET_FEATURES, &features, "VHOST_GET_FEATURES");
	close(fd);
	require(features >> VIRTIO_BLK_F_WRITE_ZEROES & 1 && features >> VIRTIO_BLK_F_DISCARD & 1,
		"neither DISCARD nor WRITE_ZEROES is offered");
	begin(&b, args, 1ull << VIRTIO_BLK_F_WRITE_ZEROES | 1ull << VIRTIO_BLK_F_DISCARD, 0);
	memset(b.should, 0x77, BIG);
	disk_write(&b.dev, 1000, b.should, BIG);
	memcpy(b.buffer.data, segments, sizeof(segments));
	status_is(&b, VIRTIO_BLK_T_WRITE_ZEROES, 0, sizeof(segments), VIRTIO_BLK_S_OK);
	memset(b.should + (1024 - 1000) * SECTOR, 0, 64 * SECTOR);
	memset(b.should + (2048 - 1000) * SECTOR, 0, 8 * SECTOR);
	disk_read(&b.dev, 1000, b.buffer.data, BIG);
	require_same(b.buffer.data, b.should, BIG, "the disk after WRITE_ZEROES of two ranges");
	/* A flag that has no meaning, a range beyond the end, half a segment. */
	segments[0].flags = 0x80;
	memcpy(b.buffer.data, segments, sizeof(segments));
	status_is(&b, VIRTIO_BLK_T_WRITE_ZEROES, 0, sizeof(*segments), VIRTIO_BLK_S_UNSUPP);
	segments[0].flags = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
	memcpy(b.buffer.data, segments, sizeof(segments));
	status_is(&b, VIRTIO_BLK_T_DISCARD, 0, sizeof(*segments), VIRTIO_BLK_S_UNSUPP);
	segments[0].flags = 0;
	segments[0].sector = args->disk_bytes / SECTOR - 1;
	memcpy(b.buffer.data, segments, sizeof(segments));
	status_is(&b, VIRTIO_BLK_T_WRITE_ZEROES, 0, sizeof(*segments), VIRTIO_BLK_S_IOERR);
	status_is(&b, VIRTIO_BLK_T_WRITE_ZEROES, 0, sizeof(*segments) - 1, VIRTIO_BLK_S_IOERR);
	end(&b);
}

static void under_load(const struct vb_args *args, uint64_t features, unsigned int queues, unsigned int size,
		       unsigned int ms)
{
	struct vb_dev dev;
	struct vb_ring rings[8];
	struct load loads[8] = { 0 };
	uint64_t done = 0, sectors = args->disk_bytes / SECTOR / 8;

	vb_prepare(&dev, args, features);
	vb_backend(&dev, 0);
	for (unsigned int n = 0; n < queues; n++) {
		ring_init(&rings[n], &dev, n * 9, size);
		ring_start(&rings[n]);
		loads[n] = (struct load) {
			.ring = &rings[n], .first_sector = n * sectors, .sectors = sectors, .depth = 16,
			.seed = args->seed + n * 17,
		};
		load_start(&loads[n]);
	}
	usleep(ms * 1000);
	for (unsigned int n = 0; n < queues; n++) {
		struct vhost_blk_vring_stats stats;

		load_wait(&loads[n], 100);
		load_end(&loads[n]);
		stats = ring_stats(&rings[n]);
		require(stats.requests == loads[n].done && !stats.errors && !stats.in_flight,
			"ring %u: %llu requests made, %llu counted, %llu errors, %u in flight", n,
			(unsigned long long)loads[n].done, (unsigned long long)stats.requests,
			(unsigned long long)stats.errors, stats.in_flight);
		done += loads[n].done;
		ring_stop(&rings[n]);
		require(ring_base(&rings[n]) == rings[n].next_avail, "ring %u: its base is %u, %u were available", n,
			ring_base(&rings[n]), rings[n].next_avail);
	}
	require(done, "no requests");
	vb_close(&dev);
}

static void load_one(const struct vb_args *args)
{
	under_load(args, 1ull << VIRTIO_RING_F_INDIRECT_DESC, 1, 256, 1500);
}

static void load_events(const struct vb_args *args)
{
	under_load(args, 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX |
		   1ull << VIRTIO_BLK_F_FLUSH, 4, 256, 2500);
}

static void load_long(const struct vb_args *args)
{
	under_load(args, 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX, 2, 1024, 1500);
}

const struct vb_case cases_io[] = {
	{ "io", "OUT, IN, FLUSH against the disk", write_and_read },
	{ "io", "GET_ID", serial },
	{ "io", "beyond the end, no whole sectors, unknown types; counters", refused },
	{ "io", "a read-only backend", read_only },
	{ "io", "600 requests cut at random", layouts },
	{ "io", "WRITE_ZEROES and DISCARD", discard_and_zeroes },
	{ "io", "verified load, one ring", load_one },
	{ "io", "verified load, four rings, EVENT_IDX", load_events },
	{ "io", "verified load, rings of 1,024", load_long },
	{ .body = NULL },
};
