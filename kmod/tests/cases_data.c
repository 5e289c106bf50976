// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Data that is large, that is copied, and that comes in blocks of its own size: where the module
 * counts and waits.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <linux/fs.h>
#include "vb.h"

#define MIB	(1u << 20)
#define PIECE	(512u << 10)
#define PIECES	12

struct rig {
	struct vb_dev dev;
	struct vb_ring ring;
	unsigned int block;
};

static void begin(struct rig *rig, const struct vb_args *args, unsigned int num)
{
	vb_prepare(&rig->dev, args, 1ull << VIRTIO_BLK_F_FLUSH | 1ull << VIRTIO_BLK_F_WRITE_ZEROES |
		   1ull << VIRTIO_BLK_F_DISCARD);
	vb_backend(&rig->dev, 0);
	ring_init(&rig->ring, &rig->dev, 2, num);
	ring_start(&rig->ring);
	require(!ioctl(rig->dev.disk, BLKSSZGET, &rig->block), "BLKSSZGET");
}

static void end(struct rig *rig)
{
	ring_stop(&rig->ring);
	vb_close(&rig->dev);
}

/*
 * Twelve half mebibytes at odd addresses at once: more than may be copied at a time, so some have
 * to wait.
 */
static void copying(const struct vb_args *args)
{
	static struct vb_chain chain;
	struct vb_buffer buffers[PIECES];
	uint8_t *should = malloc(PIECE);
	int heads[PIECES];
	struct rig rig;

	begin(&rig, args, 64);
	for (unsigned int n = 0; n < PIECES; n++)
		buffers[n] = buffer_new(&rig.dev, n % REGIONS, PIECE, 4);
	for (unsigned int pass = 0; pass < 8; pass++) {
		bool in = pass % 2;

		for (unsigned int n = 0; n < PIECES; n++) {
			if (in)
				memset(buffers[n].data, 0, PIECE);
			else
				fill(buffers[n].data, PIECE, pass * 100 + n);
			chain.table = NULL;
			chain_request(&rig.dev, &chain, &buffers[n], in ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT,
				      n * (PIECE / SECTOR), PIECE, 0, NULL);
			heads[n] = ring_push(&rig.ring, &chain);
		}
		ring_kick(&rig.ring);
		for (unsigned int n = 0; n < PIECES; n++) {
			ring_wait(&rig.ring, heads[n]);
			require(*buffer_status(&buffers[n], PIECE) == VIRTIO_BLK_S_OK, "pass %u, piece %u: status %u",
				pass, n, *buffer_status(&buffers[n], PIECE));
			fill(should, PIECE, (pass & ~1u) * 100 + n);
			if (in)
				require_same(buffers[n].data, should, PIECE, "IN, copied");
		}
	}
	end(&rig);
}

/* A request of `mib` mebibytes that all lie in the same one. */
static void wide(struct rig *rig, struct vb_chain *chain, struct vb_buffer *hdr, struct vb_buffer *data,
		 struct vring_desc *table, unsigned int mib)
{
	struct virtio_blk_outhdr out = { .type = VIRTIO_BLK_T_IN };

	memcpy(hdr->hdr, &out, sizeof(out));
	*buffer_status(hdr, 0) = NO_STATUS;
	chain->n = 0;
	chain->table = table;
	chain_add(&rig->dev, chain, hdr->hdr, sizeof(out), false);
	for (unsigned int n = 0; n < mib; n++)
		chain_add(&rig->dev, chain, data->data, MIB, true);
	chain_add(&rig->dev, chain, buffer_status(hdr, 0), 1, true);
}

/* More in flight than a ring may have: all are answered. */
static void wide_requests(const struct vb_args *args)
{
	static struct vb_chain chain;
	unsigned int most = args->disk_bytes / MIB, mib = most > 64 ? 64 : most;
	struct vb_buffer data, hdrs[8];
	int heads[8];
	struct rig rig;

	begin(&rig, args, 1024);
	data = buffer_new(&rig.dev, 0, MIB, 4096);
	for (unsigned int n = 0; n < 8; n++)
		hdrs[n] = buffer_new(&rig.dev, 1, 16, 16);
	for (unsigned int pass = 0; pass < 2; pass++) {
		for (unsigned int n = 0; n < 8; n++) {
			wide(&rig, &chain, &hdrs[n], &data, NULL, mib);
			heads[n] = ring_push(&rig.ring, &chain);
		}
		ring_kick(&rig.ring);
		for (unsigned int n = 0; n < 8; n++) {
			ring_wait(&rig.ring, heads[n]);
			require(*buffer_status(&hdrs[n], 0) == VIRTIO_BLK_S_OK, "%u MiB: status %u", mib,
				*buffer_status(&hdrs[n], 0));
			require(rig.ring.used_len[heads[n]] == mib * MIB + 1, "%u MiB: used length %u", mib,
				rig.ring.used_len[heads[n]]);
		}
	}
	end(&rig);
}

/* WRITE_ZEROES of more than one step, and none of its neighbours. */
static void wide_zeroes(const struct vb_args *args)
{
	struct virtio_blk_discard_write_zeroes range = { .sector = 8, .num_sectors = 80 * 1024 };
	uint8_t *should = malloc(MIB);
	struct vb_buffer buffer;
	uint8_t status;
	struct rig rig;

	begin(&rig, args, 64);
	buffer = buffer_new(&rig.dev, 0, MIB, 4096);
	fill(should, MIB, 5);
	for (unsigned int at = 0; at < 42; at++)
		disk_write(&rig.dev, at * (MIB / SECTOR), should, MIB);
	for (unsigned int unmap = 0; unmap < 2; unmap++) {
		range.flags = unmap ? VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP : 0;
		memcpy(buffer.data, &range, sizeof(range));
		status = do_request(&rig.ring, &buffer, VIRTIO_BLK_T_WRITE_ZEROES, 0, sizeof(range));
		require(status == VIRTIO_BLK_S_OK, "WRITE_ZEROES of 40 MiB: status %u", status);
	}
	for (unsigned int at = 0; at < 41; at++) {
		uint8_t *is = buffer.data;

		fill(should, MIB, 5);
		if (at < 40)
			memset(should + (at ? 0 : 4096), 0, MIB - (at ? 0 : 4096));
		else
			memset(should, 0, 4096);
		disk_read(&rig.dev, at * (MIB / SECTOR), is, MIB);
		require_same(is, should, MIB, "the disk after WRITE_ZEROES");
	}
	end(&rig);
}

/*
 * On a disk of larger blocks: parts of them are refused, segments that are parts of them are put
 * together.
 */
static void large_blocks(const struct vb_args *args)
{
	static const size_t aligns[] = { 1, 4, 512, 1024, 4096 };
	static struct vb_chain chain;
	uint64_t seed = args->seed + 3;
	uint8_t *should = malloc(MIB), status;
	struct vb_buffer buffers[5];
	struct rig rig;

	begin(&rig, args, 256);
	for (unsigned int n = 0; n < 5; n++)
		buffers[n] = buffer_new(&rig.dev, n % REGIONS, MIB, aligns[n]);
	if (rig.block > SECTOR) {
		status = do_request(&rig.ring, &buffers[4], VIRTIO_BLK_T_IN, 1, rig.block);
		require(status == VIRTIO_BLK_S_IOERR, "a block at sector 1: status %u", status);
		status = do_request(&rig.ring, &buffers[4], VIRTIO_BLK_T_OUT, 0, SECTOR);
		require(status == VIRTIO_BLK_S_IOERR, "a part of a block: status %u", status);
	}
	for (unsigned int n = 0; n < 200; n++) {
		struct vb_buffer *buffer = &buffers[n % 5];
		size_t bytes = rig.block * (1 + chance(&seed, n % 4 ? 8 : MIB / rig.block - 1));
		uint64_t sector = rig.block / SECTOR * chance(&seed, 1000);
		bool in = chance(&seed, 2);
		int head;

		fill(should, bytes, n);
		if (in)
			disk_write(&rig.dev, sector, should, bytes);
		else
			memcpy(buffer->data, should, bytes);
		chain.table = NULL;
		chain_request(&rig.dev, &chain, buffer, in ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT, sector, bytes,
			      chance(&seed, 2) ? 0 : 1 + chance(&seed, 24), &seed);
		head = ring_push(&rig.ring, &chain);
		ring_kick(&rig.ring);
		ring_wait(&rig.ring, head);
		require(*buffer_status(buffer, bytes) == VIRTIO_BLK_S_OK, "case %u: status %u", n,
			*buffer_status(buffer, bytes));
		if (!in)
			disk_read(&rig.dev, sector, buffer->data, bytes);
		require_same(buffer->data, should, bytes, in ? "IN in blocks" : "OUT in blocks");
	}
	end(&rig);
}

const struct vb_case cases_data[] = {
	{ "room", "more than may be copied at a time", copying },
	{ "room", "more than a ring may have in flight", wide_requests },
	{ "data", "WRITE_ZEROES of more than a step", wide_zeroes },
	{ "data", "blocks of the disk's size, at any address", large_blocks },
	{ .body = NULL },
};
