// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * A guest that lies. The device answers, or says that the ring is broken; it never hangs, and the
 * ring can be stopped and used again. The long form, thousands of chains, is vshunt-bench's.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "vb.h"

struct liar {
	struct vb_dev dev;
	struct vb_ring ring;
	struct vb_buffer buffer;
	struct vb_chain chain;
	uint64_t seed;
};

static void begin(struct liar *l, const struct vb_args *args)
{
	vb_prepare(&l->dev, args, 1ull << VIRTIO_RING_F_INDIRECT_DESC);
	vb_backend(&l->dev, 0);
	ring_init(&l->ring, &l->dev, 0, 64);
	l->buffer = buffer_new(&l->dev, 0, 65536, 4096);
	l->chain.table = NULL;
	l->seed = args->seed + 99;
	ring_start(&l->ring);
}

/* The driver's side of the ring as if it were new. */
static void renew(struct liar *l)
{
	ring_stop(&l->ring);
	ring_free(&l->ring);
	/* Its memory is used again. */
	l->dev.taken[0] = 0;
	ring_init(&l->ring, &l->dev, 0, 64);
	l->buffer = buffer_new(&l->dev, 0, 65536, 4096);
	memset(l->ring.avail, 0, sizeof(*l->ring.avail));
	memset(l->ring.used, 0, sizeof(*l->ring.used));
	ring_start(&l->ring);
}

/* What became of a chain: 'b'roken ring, 'u'sed. */
static char outcome(struct liar *l, int head)
{
	uint64_t end = now_ms() + WAIT_MS;

	while (now_ms() < end) {
		ring_reap(&l->ring);
		if (!l->ring.busy[head])
			return 'u';
		if (ring_broken(&l->ring))
			return 'b';
		ring_poll(&l->ring, 20);
	}
	fail("a lie is neither answered nor refused");
}

/*
 * Checks that a valid request is served after the hostile ones: at once, or
 * after the ring is set up again.
 */
static void still_serves(struct liar *l, char seen, const char *what)
{
	if (seen == 'b')
		renew(l);
	require(do_request(&l->ring, &l->buffer, VIRTIO_BLK_T_IN, 0, 4096) == VIRTIO_BLK_S_OK,
		"no service after %s", what);
}

/*
 * What was prepared, with its lies, becomes the device's: a polling worker takes it before any
 * kick.
 */
static void offer(struct liar *l)
{
	ring_publish(&l->ring, l->ring.next_avail);
	ring_kick(&l->ring);
}

static char send(struct liar *l)
{
	int head = ring_prepare(&l->ring, &l->chain);

	offer(l);
	return outcome(l, head);
}

static void honest(struct liar *l, uint32_t type)
{
	l->chain.table = NULL;
	chain_request(&l->dev, &l->chain, &l->buffer, type, 0, 4096, 0, NULL);
}

static void addresses(const struct vb_args *args)
{
	static const uint64_t bad[] = {
		0, 1ull << 40, ~0ull, ~0ull - 4095, (1ull << 20) - 1, (1ull << 20) + REGION_BYTES,
	};
	static struct liar l;

	begin(&l, args);
	for (unsigned int n = 0; n < sizeof(bad) / sizeof(*bad); n++)
		for (unsigned int at = 0; at < 3; at++)
			for (uint32_t type = VIRTIO_BLK_T_IN; type <= VIRTIO_BLK_T_OUT; type++) {
				honest(&l, type);
				l.chain.d[at].addr = bad[n];
				still_serves(&l, send(&l), "a bad address");
			}
	/* Memory that the table has and the process has not. */
	require(!munmap(l.dev.mem[1], REGION_BYTES), "munmap");
	for (unsigned int at = 0; at < 3; at++)
		for (uint32_t type = VIRTIO_BLK_T_IN; type <= VIRTIO_BLK_T_OUT; type++) {
			honest(&l, type);
			l.chain.d[at].addr = 5ull << 30;
			still_serves(&l, send(&l), "an address without memory");
		}
	close(l.dev.fd);
}

static void lengths(const struct vb_args *args)
{
	static const uint32_t bad[] = { 0, 1, 0x7fffffff, 0x80000000, 0xfffff000, 0xffffffff };
	static struct liar l;

	begin(&l, args);
	for (unsigned int n = 0; n < sizeof(bad) / sizeof(*bad); n++)
		for (unsigned int at = 0; at < 3; at++)
			for (uint32_t type = VIRTIO_BLK_T_IN; type <= VIRTIO_BLK_T_OUT; type++) {
				honest(&l, type);
				l.chain.d[at].len = bad[n];
				still_serves(&l, send(&l), "a bad length");
			}
	close(l.dev.fd);
}

static void shapes(const struct vb_args *args)
{
	static struct liar l;

	begin(&l, args);
	for (unsigned int n = 0; n < 6; n++) {
		int head;

		honest(&l, n % 2 ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT);
		switch (n / 2) {
		case 0: /* no status */
			l.chain.n = 2;
			l.chain.d[1].flags = 0;
			break;
		case 1: /* no header: all of it to be written */
			l.chain.d[0].flags = VRING_DESC_F_WRITE;
			break;
		case 2: /* to be read after to be written */
			l.chain.d[1].flags = VRING_DESC_F_WRITE;
			l.chain.d[2].flags = 0;
			break;
		}
		still_serves(&l, send(&l), "a chain of a wrong shape");
		/* A chain that leads back into itself. */
		honest(&l, VIRTIO_BLK_T_IN);
		head = ring_prepare(&l.ring, &l.chain);
		l.ring.desc[l.ring.desc[head].next].next = head;
		offer(&l);
		require(outcome(&l, head) == 'b', "a loop of descriptors is no fault");
		renew(&l);
	}
	for (unsigned int n = 0; n < 4; n++) {
		static const uint32_t sizes[] = { 0, 15, 16 * 65536, 0xfffffff0 };
		struct vring_desc *table = vb_alloc(&l.dev, 1, 4096, 16);
		int head;

		honest(&l, VIRTIO_BLK_T_IN);
		l.chain.table = table;
		head = ring_prepare(&l.ring, &l.chain);
		l.ring.desc[head].len = sizes[n];
		offer(&l);
		still_serves(&l, outcome(&l, head), "an indirect table of a wrong size");
		/* A table within the table. */
		honest(&l, VIRTIO_BLK_T_IN);
		l.chain.table = table;
		head = ring_prepare(&l.ring, &l.chain);
		table[1].flags |= VRING_DESC_F_INDIRECT;
		offer(&l);
		still_serves(&l, outcome(&l, head), "a table within a table");
	}
	close(l.dev.fd);
}

static void positions(const struct vb_args *args)
{
	static struct liar l;
	int head;

	begin(&l, args);
	/* More available than the ring has. */
	honest(&l, VIRTIO_BLK_T_IN);
	head = ring_prepare(&l.ring, &l.chain);
	ring_publish(&l.ring, 1000);
	ring_kick(&l.ring);
	require(outcome(&l, head) == 'b', "an index far ahead is no fault");
	renew(&l);
	/* A head that no descriptor has. */
	honest(&l, VIRTIO_BLK_T_IN);
	head = ring_prepare(&l.ring, &l.chain);
	l.ring.avail->ring[0] = 64;
	offer(&l);
	require(outcome(&l, head) == 'b', "a head beyond the ring is no fault");
	renew(&l);
	/* A next that no descriptor has. */
	honest(&l, VIRTIO_BLK_T_IN);
	head = ring_prepare(&l.ring, &l.chain);
	l.ring.desc[head].next = 999;
	offer(&l);
	require(outcome(&l, head) == 'b', "a next beyond the ring is no fault");
	renew(&l);
	still_serves(&l, 'u', "bad indices");
	close(l.dev.fd);
}

/*
 * The same head again and again while it is in flight: counted by the kernel, not by what the guest
 * says.
 */
static void same_head(const struct vb_args *args)
{
	static struct liar l;

	begin(&l, args);
	for (unsigned int round = 0; round < 50; round++) {
		uint64_t end = now_ms() + 2000;
		int head;

		honest(&l, round % 2 ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT);
		head = ring_prepare(&l.ring, &l.chain);
		for (unsigned int n = 0; n < 40; n++)
			l.ring.avail->ring[(l.ring.next_avail + n) % l.ring.num] = head;
		ring_publish(&l.ring, l.ring.next_avail + 40);
		ring_kick(&l.ring);
		while (now_ms() < end && !ring_broken(&l.ring) &&
		       (uint16_t)(l.ring.used->idx - l.ring.last_used) < 41)
			usleep(1000);
		renew(&l);
	}
	still_serves(&l, 'u', "a head offered again and again");
	close(l.dev.fd);
}

/* The ring's memory is rewritten by another thread's hand while the device reads it. */
static void scribbled(const struct vb_args *args)
{
	static struct liar l;
	uint64_t end = now_ms() + 2500;

	begin(&l, args);
	while (now_ms() < end) {
		for (unsigned int n = 0; n < 64; n++) {
			struct vring_desc *desc = &l.ring.desc[chance(&l.seed, 64)];

			desc->addr = vb_gpa(&l.dev, l.buffer.data) + chance(&l.seed, 65536);
			desc->len = chance(&l.seed, 8) ? chance(&l.seed, 8192) : chance(&l.seed, 0x7fffffff);
			desc->flags = chance(&l.seed, 8);
			desc->next = chance(&l.seed, 70);
			l.ring.avail->ring[n] = chance(&l.seed, 66);
			/* Requests that could be ones, sometimes. */
			if (n % 4 == 0) {
				struct virtio_blk_outhdr hdr = {
					.type = chance(&l.seed, 15),
					.sector = chance(&l.seed, 8192),
				};

				memcpy(l.buffer.data + chance(&l.seed, 4096), &hdr, sizeof(hdr));
			}
			if (n % 16 == 15) {
				__atomic_add_fetch(&l.ring.avail->idx, chance(&l.seed, 40), __ATOMIC_RELEASE);
				ring_kick(&l.ring);
			}
		}
		usleep(chance(&l.seed, 500));
		renew(&l);
	}
	still_serves(&l, 'b', "random rings");
	close(l.dev.fd);
}

const struct vb_case cases_hostile[] = {
	{ "hostile", "addresses", addresses },
	{ "hostile", "lengths", lengths },
	{ "hostile", "chains of a wrong shape, loops, indirect tables", shapes },
	{ "hostile", "indices", positions },
	{ "hostile", "a head that is in flight, offered again", same_head },
	{ "hostile", "random rings, changed while they are read", scribbled },
	{ .body = NULL },
};
