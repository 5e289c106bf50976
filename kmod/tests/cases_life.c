// SPDX-License-Identifier: GPL-2.0-or-later
/* Rings, workers, backends and owners that come and go, with requests in flight. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "vb.h"

#define FEATURES	(1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX)
#define RINGS		4
#define KILLS		20

/* Some rings under load, each on its own part of the disk. */
struct stage {
	struct vb_dev dev;
	struct vb_ring rings[RINGS];
	struct load loads[RINGS];
	uint64_t seed;
};

static void stage_begin(struct stage *s, const struct vb_args *args, uint64_t features)
{
	uint64_t sectors = args->disk_bytes / SECTOR / RINGS;

	memset(s, 0, sizeof(*s));
	s->seed = args->seed * 31 + 7;
	vb_prepare(&s->dev, args, features);
	vb_backend(&s->dev, 0);
	for (unsigned int n = 0; n < RINGS; n++) {
		ring_init(&s->rings[n], &s->dev, n, 256);
		ring_start(&s->rings[n]);
		s->loads[n] = (struct load) { .ring = &s->rings[n], .first_sector = n * sectors, .sectors = sectors,
					      .depth = 8, .seed = s->seed + n };
		load_start(&s->loads[n]);
	}
}

static void stage_end(struct stage *s)
{
	for (unsigned int n = 0; n < RINGS; n++) {
		load_wait(&s->loads[n], 10);
		load_end(&s->loads[n]);
		ring_stop(&s->rings[n]);
	}
	vb_close(&s->dev);
}

/*
 * Stops a ring that has requests. The requests completed must agree with the
 * base, and the ring must continue there.
 */
static void stop_and_start(const struct vb_args *args)
{
	static struct vb_chain chain;
	struct vb_buffer buffers[32];
	struct vb_dev dev;
	struct vb_ring ring;

	vb_prepare(&dev, args, FEATURES);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, 128);
	for (unsigned int n = 0; n < 32; n++)
		buffers[n] = buffer_new(&dev, 0, 65536, 4096);
	ring_start(&ring);
	for (unsigned int round = 0; round < 100; round++) {
		uint16_t base;

		for (unsigned int n = 0; n < 32; n++) {
			memset(buffers[n].data, round + n, 65536);
			chain_request(&dev, &chain, &buffers[n], VIRTIO_BLK_T_OUT, n * 128, 65536, 0, NULL);
			ring_push(&ring, &chain);
			if (n % 8 == 0)
				ring_kick(&ring);
		}
		ring_kick(&ring);
		if (round % 2)
			usleep(round * 20);
		ring_stop(&ring);
		base = ring_base(&ring);
		require(base == ring.used->idx, "round %u: base %u, %u are used: not all that was taken is answered",
			round, base, ring.used->idx);
		ring_reap(&ring);
		/*
		 * The same position; what was not taken yet is taken now, by the kick that is
		 * pending or a new one.
		 */
		ring_start(&ring);
		ring_kick(&ring);
		for (unsigned int n = 0; n < ring.num; n++)
			ring_wait(&ring, n);
		for (unsigned int n = 0; n < 32; n++)
			require(*buffer_status(&buffers[n], 65536) == VIRTIO_BLK_S_OK, "round %u: status %u", round,
				*buffer_status(&buffers[n], 65536));
	}
	vb_close(&dev);
}

static void kick_before_start(const struct vb_args *args)
{
	static struct vb_chain chain;
	struct vb_buffer buffer;
	struct vb_dev dev;
	struct vb_ring ring;

	vb_prepare(&dev, args, FEATURES);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 3, 16);
	buffer = buffer_new(&dev, 0, 4096, 4096);
	for (unsigned int round = 0; round < 50; round++) {
		int head;

		chain_request(&dev, &chain, &buffer, VIRTIO_BLK_T_IN, 0, 4096, 0, NULL);
		head = ring_push(&ring, &chain);
		ring_kick(&ring);
		ring_start(&ring);
		ring_wait(&ring, head);
		ring_stop(&ring);
	}
	vb_close(&dev);
}

static void backend_away(const struct vb_args *args)
{
	struct vhost_blk_backend away = { .size = sizeof(away), .fd = -1 };
	struct stage s;

	stage_begin(&s, args, FEATURES);
	usleep(200000);
	for (unsigned int n = 0; n < RINGS; n++)
		load_end(&s.loads[n]);
	vb_ok(s.dev.fd, VHOST_BLK_SET_BACKEND, &away, "taking the backend away");
	for (unsigned int n = 0; n < RINGS; n++) {
		require(!ring_stats(&s.rings[n]).running, "ring %u runs without a backend", n);
		require(ring_switch(&s.rings[n], true) == ENODEV, "start without a backend: not ENODEV");
	}
	vb_backend(&s.dev, 0);
	for (unsigned int n = 0; n < RINGS; n++) {
		ring_start(&s.rings[n]);
		load_start(&s.loads[n]);
	}
	usleep(200000);
	stage_end(&s);
}

/*
 * The backend goes while rings are full; nothing is lost, what was not taken waits for the next
 * backend.
 */
static void backend_away_loaded(const struct vb_args *args)
{
	struct vhost_blk_backend away = { .size = sizeof(away), .fd = -1 };
	struct stage s;

	stage_begin(&s, args, FEATURES);
	for (unsigned int round = 0; round < 30; round++) {
		usleep(10000 + chance(&s.seed, 20000));
		vb_ok(s.dev.fd, VHOST_BLK_SET_BACKEND, &away, "taking the backend away");
		vb_backend(&s.dev, 0);
		for (unsigned int n = 0; n < RINGS; n++) {
			struct vhost_vring_state state = { .index = n };
			int error;

			/* The driver's own position is ahead of what the device took. */
			vb_ok(s.dev.fd, VHOST_GET_VRING_BASE, &state, "VHOST_GET_VRING_BASE");
			require(state.num == s.rings[n].used->idx, "ring %u: base %u, %u are used", n, state.num,
				s.rings[n].used->idx);
			error = ring_switch(&s.rings[n], true);
			require(!error, "start of ring %u: %s", n, strerror(error));
			ring_kick(&s.rings[n]);
		}
	}
	stage_end(&s);
}

static void attach(struct stage *s, unsigned int ring, unsigned int worker)
{
	struct vhost_vring_worker at = { .index = ring, .worker_id = worker };

	vb_ok(s->dev.fd, VHOST_ATTACH_VRING_WORKER, &at, "VHOST_ATTACH_VRING_WORKER");
}

/* Workers are made, given rings and freed while all rings are busy. */
static void workers_loop(const struct vb_args *args)
{
	unsigned int at[RINGS] = { 0 }, rounds = 0;
	uint64_t end = now_ms() + 4000;
	struct stage s;

	stage_begin(&s, args, FEATURES);
	while (now_ms() < end || rounds < 20) {
		struct vhost_worker_state worker = { 0 };
		unsigned int ring = chance(&s.seed, RINGS), old = at[ring], users = 0;

		vb_ok(s.dev.fd, VHOST_NEW_WORKER, &worker, "VHOST_NEW_WORKER");
		attach(&s, ring, worker.worker_id);
		at[ring] = worker.worker_id;
		for (unsigned int n = 0; n < RINGS; n++)
			users += at[n] == old;
		if (!users && old) {
			worker.worker_id = old;
			vb_ok(s.dev.fd, VHOST_FREE_WORKER, &worker, "VHOST_FREE_WORKER of one without rings");
		}
		/* And two rings on one worker. */
		if (chance(&s.seed, 2)) {
			ring = chance(&s.seed, RINGS);
			attach(&s, ring, at[(ring + 1) % RINGS]);
			old = at[ring];
			at[ring] = at[(ring + 1) % RINGS];
			users = 0;
			for (unsigned int n = 0; n < RINGS; n++)
				users += at[n] == old;
			worker.worker_id = old;
			if (!users && old)
				vb_ok(s.dev.fd, VHOST_FREE_WORKER, &worker, "VHOST_FREE_WORKER of one without rings");
		}
		usleep(chance(&s.seed, 5000));
		rounds++;
	}
	stage_end(&s);
}

/* The owner is killed with everything in flight; what it had pinned is counted by the caller. */
static void kills(const struct vb_args *args)
{
	uint64_t seed = args->seed * 5 + 3;

	for (unsigned int round = 0; round < KILLS; round++) {
		int status;
		pid_t child = fork();

		if (!child) {
			struct stage s;

			stage_begin(&s, args, FEATURES);
			if (round % 2) {
				struct vhost_worker_state worker = { 0 };

				vb_ok(s.dev.fd, VHOST_NEW_WORKER, &worker, "VHOST_NEW_WORKER");
				attach(&s, 0, worker.worker_id);
				attach(&s, 1, worker.worker_id);
			}
			usleep(20000000);
			_exit(3);
		}
		usleep(50000 + chance(&seed, 200000));
		require(waitpid(child, &status, WNOHANG) == 0, "round %u: the owner ended by itself", round);
		kill(child, SIGKILL);
		require(waitpid(child, &status, 0) == child && WIFSIGNALED(status),
			"round %u: status %x", round, status);
	}
}

/* Closing, without stopping anything first. */
static void close_loaded(const struct vb_args *args)
{
	static struct vb_chain chain;

	for (unsigned int round = 0; round < 30; round++) {
		struct vb_buffer buffers[16];
		struct vb_ring ring;
		struct vb_dev dev;

		vb_prepare(&dev, args, FEATURES);
		vb_backend(&dev, 0);
		ring_init(&ring, &dev, round % VHOST_BLK_VRINGS_MAX, 256);
		ring_start(&ring);
		for (unsigned int n = 0; n < 16; n++) {
			buffers[n] = buffer_new(&dev, 0, 65536, n % 2 ? 4096 : 4);
			chain_request(&dev, &chain, &buffers[n], n % 3 ? VIRTIO_BLK_T_IN : VIRTIO_BLK_T_OUT, n * 128,
				      65536, 0, NULL);
			ring_push(&ring, &chain);
		}
		ring_kick(&ring);
		usleep(round * 50);
		vb_close(&dev);
		ring_free(&ring);
	}
}

/* VHOST_RESET_OWNER stops all and forgets the owner. */
static void reset_owner(const struct vb_args *args)
{
	struct vhost_vring_state state = { .num = 1 };
	struct stage s;

	stage_begin(&s, args, FEATURES);
	usleep(100000);
	for (unsigned int n = 0; n < RINGS; n++)
		load_end(&s.loads[n]);
	vb_ok(s.dev.fd, VHOST_RESET_OWNER, NULL, "VHOST_RESET_OWNER");
	vb_fails(s.dev.fd, VHOST_BLK_SET_VRING, &state, EPERM, "ring after VHOST_RESET_OWNER");
	vb_ok(s.dev.fd, VHOST_SET_OWNER, NULL, "VHOST_SET_OWNER again");
	vb_close(&s.dev);
}

/*
 * The memory table is set again, with the same and with less, while requests are in flight: no harm
 * to the kernel.
 */
static void tables(const struct vb_args *args)
{
	struct stage s;

	stage_begin(&s, args, FEATURES);
	for (unsigned int round = 0; round < 200; round++) {
		vb_mem_table(&s.dev);
		usleep(2000);
	}
	stage_end(&s);
}

struct switcher {
	struct vb_dev *dev;
	bool stop;
};

static void *switch_features(void *argument)
{
	struct switcher *switcher = argument;
	uint64_t on = switcher->dev->features | 1ull << VHOST_F_LOG_ALL, off = switcher->dev->features;

	while (!__atomic_load_n(&switcher->stop, __ATOMIC_RELAXED)) {
		vb_ok(switcher->dev->fd, VHOST_SET_FEATURES, &on, "VHOST_SET_FEATURES, log on");
		usleep(3000);
		vb_ok(switcher->dev->fd, VHOST_SET_FEATURES, &off, "VHOST_SET_FEATURES, log off");
		usleep(3000);
	}
	return NULL;
}

static unsigned int marks_in(const uint64_t *log, size_t words)
{
	unsigned int marked = 0;

	for (size_t n = 0; n < words; n++)
		marked += __builtin_popcountll(__atomic_load_n(&log[n], __ATOMIC_RELAXED));
	return marked;
}

static void logging_switched(const struct vb_args *args)
{
	/* A bit a page of 4 KiB, up to the end of the second region. */
	static uint64_t log[(6ull << 30) / 4096 / 64];
	const size_t words = sizeof(log) / sizeof(*log);
	uint64_t *base = log, end = now_ms() + WAIT_MS;
	struct switcher switcher = { 0 };
	unsigned int marked;
	pthread_t thread;
	struct stage s;

	stage_begin(&s, args, FEATURES);
	vb_ok(s.dev.fd, VHOST_SET_LOG_BASE, &base, "VHOST_SET_LOG_BASE");
	switcher.dev = &s.dev;
	require(!pthread_create(&thread, NULL, switch_features, &switcher), "pthread_create");
	usleep(1500000);
	while (marks_in(log, words) <= 10 && now_ms() < end)
		usleep(10000);
	__atomic_store_n(&switcher.stop, true, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	stage_end(&s);
	marked = marks_in(log, words);
	require(marked > 10 && marked < REGIONS * REGION_BYTES / 4096, "%u pages are marked", marked);
}

/* What an IN writes, and nothing else, is marked: data, status, used ring. */
static void logging_exact(const struct vb_args *args)
{
	static uint64_t log[(6ull << 30) / 4096 / 64], should[(6ull << 30) / 4096 / 64];
	uint64_t *base = log, gpa;
	struct vb_buffer buffer;
	struct vb_dev dev;
	struct vb_ring ring;

	vb_prepare(&dev, args, FEATURES);
	vb_ok(dev.fd, VHOST_SET_LOG_BASE, &base, "VHOST_SET_LOG_BASE");
	/* The log's place first: the feature is refused without it. */
	dev.features |= 1ull << VHOST_F_LOG_ALL;
	vb_ok(dev.fd, VHOST_SET_FEATURES, &dev.features, "VHOST_SET_FEATURES");
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 1, 64);
	ring_start(&ring);
	buffer = buffer_new(&dev, 0, 5 * 4096 + 512, 512);
	require(do_request(&ring, &buffer, VIRTIO_BLK_T_IN, 0, buffer.bytes) == VIRTIO_BLK_S_OK, "IN failed");
	require(do_request(&ring, &buffer, VIRTIO_BLK_T_OUT, 0, 512) == VIRTIO_BLK_S_OK, "OUT failed");
	ring_stop(&ring);
	for (size_t at = 0; at <= buffer.bytes; at += 512) {
		gpa = vb_gpa(&dev, buffer.data + at);
		should[gpa / 4096 / 64] |= 1ull << gpa / 4096 % 64;
	}
	/* The ring's start writes flags, each request its element and the index. */
	for (size_t at = 0; at < sizeof(*ring.used) + 2 * sizeof(struct vring_used_elem); at++) {
		gpa = vb_gpa(&dev, (char *)ring.used + at);
		should[gpa / 4096 / 64] |= 1ull << gpa / 4096 % 64;
	}
	gpa = vb_gpa(&dev, (char *)ring.used + sizeof(*ring.used) + 64 * sizeof(struct vring_used_elem));
	for (size_t n = 0; n < sizeof(log) / sizeof(*log); n++) {
		uint64_t missing = should[n] & ~log[n], more = log[n] & ~should[n];

		/* avail_event, behind the used ring. */
		if (n == gpa / 4096 / 64)
			more &= ~(1ull << gpa / 4096 % 64);
		require(!missing, "written and not marked: pages %llx of word %zu", (unsigned long long)missing, n);
		require(!more, "marked and not written: pages %llx of word %zu", (unsigned long long)more, n);
	}
	vb_close(&dev);
}

const struct vb_case cases_life[] = {
	{ "life", "stopped and started with requests in it, 100 times", stop_and_start },
	{ "life", "a kick before the start is seen", kick_before_start },
	{ "life", "the backend taken away and set again", backend_away },
	{ "life", "the backend taken away under load, 30 times", backend_away_loaded },
	{ "life", "workers made, attached, freed under load", workers_loop },
	{ "life", "the memory table set again under load", tables },
	{ "life", "VHOST_RESET_OWNER", reset_owner },
	{ "life", "closed with requests in flight, 30 times", close_loaded },
	{ "life", "the owner killed under load, 20 times", kills },
	{ "life", "the log: pages written, and no others", logging_exact },
	{ "life", "the log switched on and off under load", logging_switched },
	{ .body = NULL },
};
