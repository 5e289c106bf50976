// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Requests in flight over the death of the owner. The guest is this process, the owner a child that
 * is killed: the next one repairs the region as the vhost-user protocol says, hands it over, and
 * has the rest begun again. The driver notices a request that is lost (it waits in vain), one that
 * is done twice (its head is not in flight then), and data that is wrong.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "vb.h"

#define FEATURES	(1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX)
#define RINGS		2
#define NUM		128
/* Of the region, which may be larger than the ring. */
#define REGION_NUM	256
#define KILLS		12

struct state {
	uint8_t inflight;
	uint8_t padding[5];
	uint16_t next;
	uint64_t counter;
};

/* One ring's part of the region, and what the next owner finds in it. */
struct note {
	struct {
		uint64_t features;
		uint16_t version;
		uint16_t desc_num;
		uint16_t last_batch_head;
		uint16_t used_idx;
		struct state desc[REGION_NUM];
	} region;
	struct {
		uint16_t flags;
		uint16_t idx;
		uint16_t ring[REGION_NUM];
	} replays;
	unsigned int replay_num;
	uint64_t counter;
	/* Requests that were begun again, of all owners. */
	uint64_t replayed;
};

struct guest {
	struct vb_dev dev;
	struct vb_ring rings[RINGS];
	struct load loads[RINGS];
	/* Shared with the owners. */
	struct note *notes;
	unsigned int used_rings;
	pid_t owner;
	int to_owner, from_owner;
};

static void *shared(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	require(at != MAP_FAILED, "mmap: %s", strerror(errno));
	return at;
}

/*
 * "When reconnecting": finishes the last batch, lists what is in flight in the order in which it
 * was taken.
 */
static void recover(struct note *note, struct vb_ring *ring)
{
	uint16_t used = __atomic_load_n(&ring->used->idx, __ATOMIC_ACQUIRE), at = note->region.last_batch_head;

	if (!note->region.version) {
		note->region.desc_num = REGION_NUM;
		note->region.used_idx = used;
		note->region.version = 1;
	}
	for (uint16_t n = used - note->region.used_idx; n; n--) {
		require(n <= NUM && at < REGION_NUM, "ring %u: the last batch leads to %u", ring->index, at);
		note->region.desc[at].inflight = 0;
		at = note->region.desc[at].next;
	}
	note->region.used_idx = used;
	note->replay_num = 0;
	note->counter = 0;
	for (unsigned int head = 0; head < REGION_NUM; head++) {
		struct state *state = &note->region.desc[head];
		unsigned int place = note->replay_num;

		if (!state->inflight)
			continue;
		require(head < NUM && ring->busy[head], "ring %u: head %u is marked, and is not in flight",
			ring->index, head);
		for (; place && note->region.desc[note->replays.ring[place - 1]].counter > state->counter; place--)
			note->replays.ring[place] = note->replays.ring[place - 1];
		note->replays.ring[place] = head;
		note->replay_num++;
		if (state->counter >= note->counter)
			note->counter = state->counter + 1;
	}
	note->replayed += note->replay_num;
}

static struct vhost_blk_vring_inflight told(const struct note *note, unsigned int index)
{
	return (struct vhost_blk_vring_inflight) {
		.size = sizeof(struct vhost_blk_vring_inflight),
		.index = index,
		.region_user_addr = (uintptr_t)&note->region,
		.counter = note->counter,
		.replay_user_addr = (uintptr_t)&note->replays,
		.num = REGION_NUM,
		.last_batch_head = note->region.last_batch_head,
		.replay_num = note->replay_num,
	};
}

/*
 * Starts a ring with the requests that a former owner had in flight. The ring
 * continues after them.
 */
static void start_noted(struct vb_ring *ring, struct note *note)
{
	struct vhost_blk_vring_inflight inflight = told(note, ring->index);
	struct vhost_vring_state state = { .index = ring->index };
	uint64_t one = 1;
	int error;

	state.num = (uint16_t)(note->region.used_idx + note->replay_num);
	ring_set_up(ring);
	vb_ok(ring->dev->fd, VHOST_SET_VRING_BASE, &state, "VHOST_SET_VRING_BASE");
	vb_ok(ring->dev->fd, VHOST_BLK_SET_VRING_INFLIGHT, &inflight, "VHOST_BLK_SET_VRING_INFLIGHT");
	error = ring_switch(ring, true);
	require(!error, "start of ring %u: %s", ring->index, strerror(error));
	/* The owner before may have died between the used index and the signal. */
	require(write(ring->call, &one, sizeof(one)) == sizeof(one), "call: %s", strerror(errno));
}

static void nothing_is_marked(struct vb_ring *ring, const struct note *note)
{
	for (unsigned int n = 0; n < REGION_NUM; n++)
		require(!note->region.desc[n].inflight, "ring %u: head %u is marked when all is done", ring->index, n);
	require(note->region.used_idx == ring->used->idx, "ring %u: used index %u is noted, not %u", ring->index,
		note->region.used_idx, ring->used->idx);
	require(note->region.version == 1 && note->region.desc_num == REGION_NUM, "the head of the region changed");
}

static void own(struct guest *g, int from, int to)
{
	char byte;

	g->dev.fd = vb_open(g->dev.args);
	vb_own(&g->dev);
	vb_backend(&g->dev, 0);
	for (unsigned int n = 0; n < g->used_rings; n++) {
		recover(&g->notes[n], &g->rings[n]);
		start_noted(&g->rings[n], &g->notes[n]);
	}
	require(write(to, "", 1) == 1, "pipe");
	/* Until it is killed, or told to end. */
	if (read(from, &byte, 1) != 1)
		_exit(0);
	for (unsigned int n = 0; n < g->used_rings; n++) {
		uint16_t base;

		ring_stop(&g->rings[n]);
		base = ring_base(&g->rings[n]);
		require(base == g->rings[n].used->idx, "ring %u: base %u, %u are used", n, base, g->rings[n].used->idx);
	}
	_exit(0);
}

static void owner_begin(struct guest *g)
{
	int to[2], from[2];
	char byte;

	require(!pipe(to) && !pipe(from), "pipe: %s", strerror(errno));
	g->owner = fork();
	if (!g->owner) {
		close(to[1]);
		close(from[0]);
		own(g, to[0], from[1]);
	}
	close(to[0]);
	close(from[1]);
	g->to_owner = to[1];
	g->from_owner = from[0];
	require(read(g->from_owner, &byte, 1) == 1, "(in the owner)");
}

static void owner_gone(struct guest *g, bool killed)
{
	int status;

	if (killed)
		kill(g->owner, SIGKILL);
	else
		require(write(g->to_owner, "", 1) == 1, "pipe");
	require(waitpid(g->owner, &status, 0) == g->owner, "waitpid");
	require(killed ? WIFSIGNALED(status) : !status, "the owner ended with status %x", status);
	close(g->to_owner);
	close(g->from_owner);
}

static void guest_begin(struct guest *g, const struct vb_args *args, unsigned int rings)
{
	memset(g, 0, sizeof(*g));
	vb_memory(&g->dev, args, FEATURES);
	g->notes = shared(RINGS * sizeof(*g->notes));
	g->used_rings = rings;
	for (unsigned int n = 0; n < rings; n++)
		ring_init(&g->rings[n], &g->dev, n, NUM);
	owner_begin(g);
}

static void killed(const struct vb_args *args)
{
	uint64_t sectors = args->disk_bytes / SECTOR / RINGS, seed = args->seed * 9 + 5, replayed = 0;
	static struct guest g;

	guest_begin(&g, args, RINGS);
	for (unsigned int n = 0; n < RINGS; n++) {
		g.loads[n] = (struct load) { .ring = &g.rings[n], .first_sector = n * sectors, .sectors = sectors,
					     .depth = 16, .seed = seed + n };
		load_start(&g.loads[n]);
	}
	for (unsigned int round = 0; round < KILLS; round++) {
		for (unsigned int n = 0; n < RINGS; n++)
			load_wait(&g.loads[n], __atomic_load_n(&g.loads[n].done, __ATOMIC_RELAXED) + 20);
		usleep(chance(&seed, 50000));
		owner_gone(&g, true);
		owner_begin(&g);
	}
	for (unsigned int n = 0; n < RINGS; n++) {
		load_wait(&g.loads[n], __atomic_load_n(&g.loads[n].done, __ATOMIC_RELAXED) + 20);
		load_end(&g.loads[n]);
	}
	owner_gone(&g, false);
	for (unsigned int n = 0; n < RINGS; n++) {
		nothing_is_marked(&g.rings[n], &g.notes[n]);
		replayed += g.notes[n].replayed;
	}
	require(replayed, "%u kills, and no request was begun again", KILLS);
}

#define SLOW	4

/*
 * Requests that the disk has not done when the owner is killed are exactly those that the next one
 * begins again.
 */
static void slow(const struct vb_args *args)
{
	static struct vb_chain chain;
	struct vb_buffer buffers[SLOW];
	static struct guest g;
	int heads[SLOW];

	guest_begin(&g, args, 1);
	for (unsigned int n = 0; n < SLOW; n++) {
		buffers[n] = buffer_new(&g.dev, 0, 4096, 4096);
		fill(buffers[n].data, 4096, args->seed + n);
		chain_request(&g.dev, &chain, &buffers[n], VIRTIO_BLK_T_OUT, 8 * n, 4096, 0, NULL);
		heads[n] = ring_push(&g.rings[0], &chain);
	}
	ring_kick(&g.rings[0]);
	for (uint64_t end = now_ms() + WAIT_MS; !g.notes[0].region.desc[heads[SLOW - 1]].inflight;) {
		require(now_ms() < end, "the last request is not marked");
		usleep(1000);
	}
	require(!g.rings[0].used->idx, "the disk is too quick for this");
	owner_gone(&g, true);
	/*
	 * Their places in the available ring are used again by then: what is there says
	 * nothing about them.
	 */
	for (unsigned int n = 0; n < NUM; n++)
		g.rings[0].avail->ring[n] = 0xffff;
	owner_begin(&g);
	require(g.notes[0].replay_num == SLOW, "%u requests begun again, not %u", g.notes[0].replay_num, SLOW);
	for (unsigned int n = 0; n < SLOW; n++)
		require(g.notes[0].replays.ring[n] == heads[n], "head %u of those in flight is %u", n,
			g.notes[0].replays.ring[n]);
	/* Stops the ring while they are under way: it waits for them. */
	owner_gone(&g, false);
	require(ring_reap(&g.rings[0]) == SLOW, "not all of them were put back");
	for (unsigned int n = 0; n < SLOW; n++) {
		uint8_t data[4096];

		require(*buffer_status(&buffers[n], 4096) == VIRTIO_BLK_S_OK, "status %u",
			*buffer_status(&buffers[n], 4096));
		if (!n)
			g.dev.disk = open_disk(args, O_RDONLY | O_DIRECT);
		disk_read(&g.dev, 8 * n, data, sizeof(data));
		require_same(data, buffers[n].data, sizeof(data), "what was begun again");
	}
	nothing_is_marked(&g.rings[0], &g.notes[0]);
}

static void arguments(const struct vb_args *args)
{
	struct vhost_blk_vring_inflight good, bad;
	struct vhost_vring_state state = { .num = 1 };
	struct note *note = shared(sizeof(*note));
	struct vb_ring ring;
	struct vb_dev dev;

	good = told(note, 0);
	bad = good;
	dev.fd = vb_open(args);
	vb_fails(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &bad, EPERM, "before VHOST_SET_OWNER");
	close(dev.fd);
	vb_prepare(&dev, args, FEATURES);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, NUM);
#define REFUSED(error, field, value) do { \
		bad = good; \
		bad.field = (value); \
		vb_fails(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &bad, error, #field " = " #value); \
	} while (0)
	REFUSED(EINVAL, size, VHOST_BLK_VRING_INFLIGHT_SIZE_VER0 - 1);
	REFUSED(E2BIG, size, 1 << 20);
	REFUSED(EINVAL, index, VHOST_BLK_VRINGS_MAX);
	REFUSED(EINVAL, reserved, 1);
	REFUSED(EINVAL, region_user_addr, good.region_user_addr + 4);
	REFUSED(EINVAL, region_user_addr, 0);
	REFUSED(EFAULT, region_user_addr, 1ull << 63);
	REFUSED(EFAULT, region_user_addr, ~0ull - 7);
	REFUSED(EINVAL, replay_user_addr, good.replay_user_addr + 1);
	REFUSED(EFAULT, replay_user_addr, 1ull << 63);
	REFUSED(EINVAL, num, VHOST_BLK_VRING_NUM_MAX + 1);
	REFUSED(EINVAL, replay_num, REGION_NUM + 1);
	vb_ok(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &good, "VHOST_BLK_SET_VRING_INFLIGHT");
	/* Room for fewer than the ring has. */
	bad = good;
	bad.num = NUM / 2;
	vb_ok(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &bad, "VHOST_BLK_SET_VRING_INFLIGHT");
	ring_set_up(&ring);
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, &state, EINVAL, "a ring that is larger than its region");
	/* More requests of a former owner than the ring has descriptors. */
	bad = good;
	bad.replay_num = NUM + 1;
	vb_ok(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &bad, "VHOST_BLK_SET_VRING_INFLIGHT");
	vb_fails(dev.fd, VHOST_BLK_SET_VRING, &state, EINVAL, "more requests to begin again than descriptors");
	vb_ok(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &good, "VHOST_BLK_SET_VRING_INFLIGHT");
	vb_ok(dev.fd, VHOST_BLK_SET_VRING, &state, "VHOST_BLK_SET_VRING");
	vb_fails(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &good, EBUSY, "a ring that runs");
	ring_stop(&ring);
	vb_close(&dev);
}

struct scribbler {
	struct note *note;
	bool stop;
};

static void *scribble(void *argument)
{
	struct scribbler *s = argument;
	uint64_t seed = 77;

	while (!__atomic_load_n(&s->stop, __ATOMIC_RELAXED)) {
		uint32_t *word = (uint32_t *)&s->note->region + chance(&seed, sizeof(s->note->region) / 4);

		__atomic_store_n(word, chance(&seed, 0x7fffffff), __ATOMIC_RELAXED);
	}
	return NULL;
}

/*
 * Whatever the front end writes to the region, the ring is served as always; where it takes it away
 * the ring breaks.
 */
static void hostile(const struct vb_args *args)
{
	struct note *note = shared(sizeof(*note));
	struct scribbler s = { .note = note };
	struct vb_buffer buffer;
	struct vb_ring ring;
	struct vb_dev dev;
	struct load load = { .ring = &ring, .sectors = args->disk_bytes / SECTOR, .depth = 8, .seed = args->seed + 3 };
	static struct vb_chain chain;
	pthread_t thread;

	vb_prepare(&dev, args, FEATURES);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, NUM);
	note->region.used_idx = 0;
	start_noted(&ring, note);
	require(!pthread_create(&thread, NULL, scribble, &s), "pthread_create");
	load_start(&load);
	load_wait(&load, 500);
	load_end(&load);
	__atomic_store_n(&s.stop, true, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	require(!mprotect(note, sizeof(*note), PROT_READ), "mprotect: %s", strerror(errno));
	buffer = buffer_new(&dev, 0, 4096, 4096);
	chain_request(&dev, &chain, &buffer, VIRTIO_BLK_T_IN, 0, 4096, 0, NULL);
	ring_push(&ring, &chain);
	ring_kick(&ring);
	for (uint64_t end = now_ms() + WAIT_MS; !ring_broken(&ring); usleep(1000))
		require(now_ms() < end, "a ring continues although its region cannot be written to");
	require(*buffer_status(&buffer, 4096) == NO_STATUS, "a request that was not noted was done");
	ring_stop(&ring);
	vb_close(&dev);
}

/* Heads that are none, or that come twice: the ring breaks, and can be stopped. */
static void wrong_replays(const struct vb_args *args)
{
	struct note *note = shared(sizeof(*note));
	struct vb_ring ring;
	struct vb_dev dev;

	for (unsigned int round = 0; round < 3; round++) {
		vb_prepare(&dev, args, FEATURES);
		vb_backend(&dev, 0);
		ring_init(&ring, &dev, 0, NUM);
		memset(note, 0, sizeof(*note));
		note->replay_num = REGION_NUM / 2;
		/*
		 * Heads without a ring's size; of chains that are zeroes; and where nothing is
		 * mapped.
		 */
		memset(note->replays.ring, round ? 0 : 0xff, sizeof(note->replays.ring));
		if (round == 2) {
			struct vhost_blk_vring_inflight inflight = told(note, 0);

			inflight.replay_user_addr = 4096;
			ring_set_up(&ring);
			vb_ok(dev.fd, VHOST_BLK_SET_VRING_INFLIGHT, &inflight, "VHOST_BLK_SET_VRING_INFLIGHT");
			require(!ring_switch(&ring, true), "start");
		} else {
			start_noted(&ring, note);
		}
		for (uint64_t end = now_ms() + WAIT_MS; !ring_broken(&ring); usleep(1000))
			require(now_ms() < end, "round %u: wrong heads are no fault", round);
		ring_stop(&ring);
		require(!ring_stats(&ring).in_flight, "round %u: %u in flight on a ring that is stopped", round,
			ring_stats(&ring).in_flight);
		vb_close(&dev);
		ring_free(&ring);
	}
}

const struct vb_case cases_inflight[] = {
	{ "inflight", "arguments", arguments },
	{ "inflight", "a region that the front end writes to, and takes away", hostile },
	{ "inflight", "heads to begin again that are none", wrong_replays },
	{ "inflight-kill", "owners killed under verified load, 12 times, each followed by another", killed },
	{ "inflight-slow", "what a killed owner had in flight is begun again, and no more", slow },
	{ .body = NULL },
};
