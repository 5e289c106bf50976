// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The floor of /dev/fuse: a server that does nothing but answer. One file with nothing behind it is
 * the root of the mount; each thread reads a request and writes its reply, in turn.
 *
 *	floor MOUNTPOINT SIZE_BYTES THREADS
 *
 * bench/fuse/floor.py compiles it; the fuse-null case runs it as one contestant among the others.
 * The main thread has the session's descriptor, each other thread a clone of it. They share the
 * data of read replies, which nobody writes, and nothing else. SIGTERM takes the mount away.
 * What must never happen: work that a request does not ask for, for then this is no floor.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define DATA_BYTES_MAX	(1 << 20)
#define PAGE_BYTES	4096
#define REQUEST_BYTES	(DATA_BYTES_MAX + PAGE_BYTES)	/* a write's data, and its headers */

static char zeroes[DATA_BYTES_MAX] __attribute__((aligned(PAGE_BYTES)));
static const char *mountpoint;
static uint64_t size_bytes;

/* Only after the mount: what is mounted there is ours. */
static void leave(int signal_number)
{
	umount2(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW);
	_exit(signal_number == SIGTERM ? 0 : 1);
}

static void die(const char *what)
{
	perror(what);
	leave(0);
}

static void answer(int fd, const struct fuse_in_header *in)
{
	union {
		struct fuse_init_out init;
		struct fuse_attr_out attr;
		struct fuse_open_out open;
		struct fuse_write_out write;
	} body = { 0 };
	struct fuse_out_header out = { .unique = in->unique };
	struct iovec reply[2] = { { &out, sizeof(out) }, { &body, 0 } };

	switch (in->opcode) {
	case FUSE_READ:
		reply[1].iov_base = zeroes;
		reply[1].iov_len = ((const struct fuse_read_in *)(in + 1))->size;
		break;
	case FUSE_WRITE:
		body.write.size = ((const struct fuse_write_in *)(in + 1))->size;
		reply[1].iov_len = sizeof(body.write);
		break;
	case FUSE_INIT:
		body.init = (struct fuse_init_out){
			.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
			.flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_BIG_WRITES | FUSE_MAX_PAGES,
			.max_write = DATA_BYTES_MAX, .max_pages = DATA_BYTES_MAX / PAGE_BYTES,
			.max_background = 4096, .congestion_threshold = 4096,
		};
		reply[1].iov_len = sizeof(body.init);
		break;
	case FUSE_GETATTR:
		body.attr.attr = (struct fuse_attr){
			.ino = FUSE_ROOT_ID, .mode = S_IFREG | 0600, .nlink = 1, .size = size_bytes,
		};
		reply[1].iov_len = sizeof(body.attr);
		break;
	case FUSE_OPEN:
		body.open.open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES;
		reply[1].iov_len = sizeof(body.open);
		break;
	case FUSE_FLUSH:
	case FUSE_RELEASE:
	case FUSE_FSYNC:
		break;
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
		return;	/* nobody waits for a reply */
	default:
		out.error = -ENOSYS;
	}
	out.len = sizeof(out) + reply[1].iov_len;
	/* ENOENT: who asked was interrupted and is gone; ENODEV: the mount is. */
	if (writev(fd, reply, reply[1].iov_len ? 2 : 1) < 0 && errno != ENOENT && errno != ENODEV)
		die("floor: write to /dev/fuse");
}

static void *serve(void *arg)
{
	const int fd = (intptr_t)arg;
	void *request = aligned_alloc(PAGE_BYTES, REQUEST_BYTES);

	for (;;) {
		if (read(fd, request, REQUEST_BYTES) >= 0)
			answer(fd, request);
		else if (errno == ENODEV)
			_exit(0);	/* unmounted by someone else, or aborted */
		else if (errno != EINTR && errno != EAGAIN && errno != ENOENT)
			die("floor: read of /dev/fuse");
	}
}

int main(int argc, char **argv)
{
	const int threads = argc == 4 ? atoi(argv[3]) : 0;
	const int session = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[96];
	pthread_t thread;

	if (threads < 1)
		return 2;	/* how it is called stands above */
	mountpoint = argv[1];
	size_bytes = strtoull(argv[2], NULL, 10);
	/* Touched: of pages that nobody wrote to, the kernel copies its one zero page, by a slow way. */
	memset(zeroes, 0, sizeof(zeroes));
	snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=0,group_id=0,max_read=%d",
		 session, DATA_BYTES_MAX);
	if (session < 0 || mount("floor", mountpoint, "fuse", MS_NOSUID | MS_NODEV, options)) {
		perror("floor: mount");
		return 1;
	}
	signal(SIGTERM, leave);
	for (int i = 1; i < threads; i++) {
		int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

		if (fd < 0 || ioctl(fd, FUSE_DEV_IOC_CLONE, &session))
			die("floor: clone of /dev/fuse");
		if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd))
			die("floor: thread");
	}
	serve((void *)(intptr_t)session);
}
