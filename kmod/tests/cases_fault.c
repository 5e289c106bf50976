// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Disks that fail or are slow; the rig makes them: `fault-medium` (scsi_debug; 0x1234 to 0x123d
 * cannot be read), `fault-some` (a disk that fails now and then), `fault-slow` (a second a
 * request).
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include "vb.h"

#define BAD_SECTOR	0x1234
#define BAD_SECTORS	10
/* Of the slow disk, less what a clock may be off. */
#define SLOW_MS		900

static void bad_sectors(const struct vb_args *args)
{
	struct vb_dev dev;
	struct vb_ring ring;
	struct vb_buffer buffer;
	struct vhost_blk_vring_stats stats;
	uint8_t status;

	vb_prepare(&dev, args, 1ull << VIRTIO_BLK_F_FLUSH);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, 64);
	ring_start(&ring);
	buffer = buffer_new(&dev, 0, 1 << 20, 4096);
	for (uint64_t sector = BAD_SECTOR - 64; sector < BAD_SECTOR + 64; sector += 8) {
		bool bad = sector + 8 > BAD_SECTOR && sector < BAD_SECTOR + BAD_SECTORS;

		status = do_request(&ring, &buffer, VIRTIO_BLK_T_IN, sector, 4096);
		require(status == (bad ? VIRTIO_BLK_S_IOERR : VIRTIO_BLK_S_OK), "sector %llx: status %u",
			(unsigned long long)sector, status);
	}
	/* One bad sector in many bios' worth is the request's error, once. */
	status = do_request(&ring, &buffer, VIRTIO_BLK_T_IN, BAD_SECTOR - 1000, 1 << 20);
	require(status == VIRTIO_BLK_S_IOERR, "1 MiB with a bad sector: status %u", status);
	stats = ring_stats(&ring);
	require(stats.errors == 3, "%llu errors are counted, there were 3", (unsigned long long)stats.errors);
	ring_stop(&ring);
	vb_close(&dev);
}

/* Whether some requests have failed and some have not. */
static bool mixed(struct load *load)
{
	uint64_t errors = __atomic_load_n(&load->errors, __ATOMIC_RELAXED);

	return errors && errors < __atomic_load_n(&load->done, __ATOMIC_RELAXED);
}

/* What fails is told; what is told to be well is well. */
static void some_fail(const struct vb_args *args)
{
	struct vb_dev dev;
	struct vb_ring ring;
	struct load load = { .ring = &ring, .depth = 16, .seed = args->seed, .errors_allowed = true };
	uint64_t end = now_ms() + WAIT_MS;
	struct vhost_blk_vring_stats stats;

	vb_prepare(&dev, args, 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_BLK_F_FLUSH);
	vb_backend(&dev, 0);
	ring_init(&ring, &dev, 0, 256);
	ring_start(&ring);
	/* Over the sectors that cannot be read, where the disk has such. */
	load.first_sector = BAD_SECTOR - 128;
	load.sectors = args->disk_bytes / SECTOR - load.first_sector;
	load_start(&load);
	usleep(4000000);
	/* Both ways: a slow machine has not come to it yet. */
	while (now_ms() < end && !mixed(&load))
		usleep(10000);
	load_end(&load);
	stats = ring_stats(&ring);
	require(load.errors, "the disk did not fail: the test tests nothing (%llu requests)",
		(unsigned long long)load.done);
	require(load.errors < load.done, "nothing succeeded");
	require(stats.errors == load.errors && stats.requests == load.done, "%llu errors of %llu, counted %llu of %llu",
		(unsigned long long)load.errors, (unsigned long long)load.done, (unsigned long long)stats.errors,
		(unsigned long long)stats.requests);
	ring_stop(&ring);
	vb_close(&dev);
}

static void slow_begin(struct vb_dev *dev, struct vb_ring *ring, const struct vb_args *args)
{
	static struct vb_chain chain;
	struct vhost_blk_vring_stats stats;
	uint64_t end = now_ms() + WAIT_MS;
	struct vb_buffer buffer;

	vb_prepare(dev, args, 1ull << VIRTIO_BLK_F_FLUSH);
	vb_backend(dev, 0);
	ring_init(ring, dev, 0, 64);
	ring_start(ring);
	for (unsigned int n = 0; n < 8; n++) {
		/* Two of them through the module's own pages. */
		buffer = buffer_new(dev, 0, 4096, n < 2 ? 1 : 4096);
		chain_request(dev, &chain, &buffer, n % 2 ? VIRTIO_BLK_T_OUT : VIRTIO_BLK_T_IN, n * 8, 4096, 0, NULL);
		ring_push(ring, &chain);
	}
	ring_kick(ring);
	/* Until they are taken; who is kept from looking for a second finds the first ones done. */
	do {
		usleep(2000);
		stats = ring_stats(ring);
		require(now_ms() < end, "%u requests are in flight, should be 8", stats.in_flight);
	} while (stats.in_flight + stats.requests < 8);
}

static void slow_stop(const struct vb_args *args)
{
	struct vb_dev dev;
	struct vb_ring ring;
	uint64_t begin = now_ms();

	slow_begin(&dev, &ring, args);
	ring_stop(&ring);
	require(now_ms() - begin >= SLOW_MS, "the ring stopped after %llu ms, the disk takes longer",
		(unsigned long long)(now_ms() - begin));
	require(ring_reap(&ring) == 8, "stopped, and not all is answered");
	require(ring_base(&ring) == 8, "base %u after 8 requests", ring_base(&ring));
	vb_close(&dev);
}

/*
 * Reads the base of a running ring. Requests that were taken are completed,
 * and the ring continues.
 */
static void slow_base(const struct vb_args *args)
{
	struct vb_buffer buffer;
	struct vb_dev dev;
	struct vb_ring ring;
	uint64_t begin = now_ms();
	unsigned int base;

	slow_begin(&dev, &ring, args);
	base = ring_base(&ring);
	require(now_ms() - begin >= SLOW_MS, "the base is told after %llu ms, the disk takes longer",
		(unsigned long long)(now_ms() - begin));
	require(base == 8 && ring_reap(&ring) == 8, "base %u, and not all is answered", base);
	buffer = buffer_new(&dev, 0, 4096, 4096);
	require(do_request(&ring, &buffer, VIRTIO_BLK_T_IN, 0, 4096) == VIRTIO_BLK_S_OK, "it does not go on");
	ring_stop(&ring);
	vb_close(&dev);
}

static void slow_reset(const struct vb_args *args)
{
	struct vb_dev dev;
	struct vb_ring ring;
	uint64_t begin = now_ms();

	slow_begin(&dev, &ring, args);
	vb_ok(dev.fd, VHOST_RESET_OWNER, NULL, "VHOST_RESET_OWNER");
	require(now_ms() - begin >= SLOW_MS, "reset after %llu ms, the disk takes longer",
		(unsigned long long)(now_ms() - begin));
	require(ring_reap(&ring) == 8, "reset, and not all is answered");
	vb_close(&dev);
}

static void slow_close(const struct vb_args *args)
{
	struct vb_dev dev;
	struct vb_ring ring;
	uint64_t begin = now_ms();

	slow_begin(&dev, &ring, args);
	vb_close(&dev);
	require(now_ms() - begin >= SLOW_MS, "closed after %llu ms, the disk takes longer",
		(unsigned long long)(now_ms() - begin));
}

/* Killed while all is in flight: its workers are gone when the disk answers. */
static void slow_kill(const struct vb_args *args)
{
	for (unsigned int round = 0; round < 3; round++) {
		int ready[2], status;
		char byte;
		pid_t child;

		require(!pipe(ready), "pipe");
		child = fork();
		if (!child) {
			struct vb_dev dev;
			struct vb_ring ring;

			slow_begin(&dev, &ring, args);
			require(write(ready[1], "", 1) == 1, "pipe");
			if (round == 1)
				ring_switch(&ring, false);
			sleep(20);
			_exit(3);
		}
		close(ready[1]);
		require(read(ready[0], &byte, 1) == 1, "(in the owner)");
		close(ready[0]);
		usleep(100000);
		kill(child, SIGKILL);
		require(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "status %x", status);
	}
}

/* block_bio_queue says what the block layer was asked for, before it is split or merged. */
#define TRACE	"/sys/kernel/tracing/"

static void tracing(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_TRUNC | O_CLOEXEC);

	require(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text), "%s: %s", file, strerror(errno));
	close(fd);
}

/*
 * How a request reaches the disk: the flags of the bios that it became, as the kernel's trace shows
 * them. A leading F is a flush before, one behind the W a write that is stable when it ends.
 */
static void flags_of(struct vb_ring *ring, struct vb_buffer *buffer, uint32_t type, size_t bytes, char *flags,
		     size_t room)
{
	char line[512];
	FILE *trace;

	tracing(TRACE "trace", "\n");
	/* Names of tasks are learnt at each switch, whose code is patched for it; we need none. */
	tracing(TRACE "options/record-cmd", "0");
	tracing(TRACE "events/block/block_bio_queue/enable", "1");
	require(do_request(ring, buffer, type, 64, bytes) == VIRTIO_BLK_S_OK, "type %u failed", type);
	tracing(TRACE "events/block/block_bio_queue/enable", "0");
	trace = fopen(TRACE "trace", "re");
	require(trace, "no trace");
	flags[0] = 0;
	while (fgets(line, sizeof(line), trace)) {
		char *at = strstr(line, "block_bio_queue: "), what[16];

		if (at && sscanf(at, "block_bio_queue: %*s %15s", what) == 1)
			snprintf(flags + strlen(flags), room - strlen(flags), "%s ", what);
	}
	fclose(trace);
}

/* How many bios have flags that begin so. */
static unsigned int begin_with(const char *flags, const char *prefix)
{
	unsigned int count = 0;

	for (; flags; flags = strchr(flags, ' ') ? strchr(flags, ' ') + 1 : NULL)
		count += !strncmp(flags, prefix, strlen(prefix));
	return count;
}

/* Writes that are stable when the request ends: each by itself, or all by a flush after them. */
static bool stable(const char *flags)
{
	return begin_with(flags, "W") + begin_with(flags, "F") &&
	       (begin_with(flags, "F") || begin_with(flags, "WF") == begin_with(flags, "W"));
}

/*
 * Without VIRTIO_BLK_F_FLUSH an OUT is stable when it is answered; with it, a FLUSH makes it so,
 * and only that.
 */
static void durable(const struct vb_args *args)
{
	struct vb_buffer buffer;
	struct vb_ring ring;
	struct vb_dev dev;
	char flags[256];

	for (unsigned int flush = 0; flush < 2; flush++) {
		vb_prepare(&dev, args, flush ? 1ull << VIRTIO_BLK_F_FLUSH : 0);
		vb_backend(&dev, 0);
		ring_init(&ring, &dev, 0, 64);
		ring_start(&ring);
		buffer = buffer_new(&dev, 0, 1 << 20, 4096);
		/* One bio's worth and more: all of it, also what ends first. */
		for (size_t bytes = 4096; bytes <= 1 << 20; bytes <<= 4) {
			flags_of(&ring, &buffer, VIRTIO_BLK_T_OUT, bytes, flags, sizeof(flags));
			require(begin_with(flags, "W"), "OUT of %zu bytes: no write, but %s", bytes, flags);
			require(stable(flags) == !flush, "OUT of %zu bytes, %s: the disk saw %s", bytes,
				flush ? "FLUSH negotiated" : "no FLUSH", flags);
		}
		flags_of(&ring, &buffer, VIRTIO_BLK_T_FLUSH, 0, flags, sizeof(flags));
		require(begin_with(flags, "F"), "FLUSH: the disk saw %s", flags);
		ring_stop(&ring);
		vb_close(&dev);
	}
}

const struct vb_case cases_fault[] = {
	{ "durable", "write-through without FLUSH, write-back with it", durable },
	{ "fault-medium", "sectors that cannot be read", bad_sectors },
	{ "fault-medium", "verified load over sectors that cannot be read", some_fail },
	{ "fault-some", "verified load on a disk that fails now and then", some_fail },
	{ "fault-slow", "stopping waits for the disk", slow_stop },
	{ "fault-slow", "the base of a ring that runs", slow_base },
	{ "fault-slow", "VHOST_RESET_OWNER waits for the disk", slow_reset },
	{ "fault-slow", "closing waits for the disk", slow_close },
	{ "fault-slow", "the owner killed while the disk works", slow_kill },
	{ .body = NULL },
};
