// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * One file with nothing behind it, which is the root of a mount, and a channel of it: see floor.h.
 *
 * Threads share the data of read replies, which is never written, and nothing else.
 * What must never happen: work that a request does not ask for, for then this is no floor; a mount
 * that is left behind.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "floor.h"

static char zeroes[DATA_BYTES_MAX] __attribute__((aligned(PAGE_BYTES)));
static const char *mounted_at;
static uint64_t file_bytes;
static uint32_t flags2;

static void unmount(void)
{
	umount2(mounted_at, MNT_DETACH | UMOUNT_NOFOLLOW);
}

/* Only after the mount: what is mounted there is ours. */
static void leave(int signal_number)
{
	(void)signal_number;
	unmount();
	_exit(0);
}

void floor_die(const char *what)
{
	perror(what);
	unmount();
	_exit(1);
}

int floor_mount(const char *mountpoint, uint64_t size_bytes, uint32_t init_flags2)
{
	const int session = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[96];

	mounted_at = mountpoint;
	file_bytes = size_bytes;
	flags2 = init_flags2;
	/* Pages that were never written are the kernel's zero page, which it copies more slowly. */
	memset(zeroes, 0, sizeof(zeroes));
	snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=0,group_id=0,max_read=%d",
		 session, DATA_BYTES_MAX);
	if (session < 0 || mount("floor", mountpoint, "fuse", MS_NOSUID | MS_NODEV, options)) {
		perror("floor: mount");
		_exit(1);
	}
	signal(SIGTERM, leave);
	return session;
}

static int init(const struct fuse_init_in *in, struct fuse_init_out *out)
{
	if (flags2 & ~((in->flags & FUSE_INIT_EXT) ? in->flags2 : 0)) {
		errno = EOPNOTSUPP;
		floor_die("floor: INIT: the kernel does not offer what this transport needs");
	}
	*out = (struct fuse_init_out){
		.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
		.flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_BIG_WRITES | FUSE_MAX_PAGES |
			 (flags2 ? FUSE_INIT_EXT : 0),
		.flags2 = flags2,
		.max_write = DATA_BYTES_MAX, .max_pages = DATA_BYTES_MAX / PAGE_BYTES,
		.max_background = 4096, .congestion_threshold = 4096,
	};
	return sizeof(*out);
}

int floor_answer(const struct fuse_in_header *in, const void *args, union floor_body *body)
{
	switch (in->opcode) {
	case FUSE_WRITE:
		body->write.size = ((const struct fuse_write_in *)args)->size;
		return sizeof(body->write);
	case FUSE_INIT:
		return init(args, &body->init);
	case FUSE_GETATTR:
		body->attr.attr = (struct fuse_attr){
			.ino = FUSE_ROOT_ID, .mode = S_IFREG | 0600, .nlink = 1, .size = file_bytes,
		};
		return sizeof(body->attr);
	case FUSE_OPEN:
		body->open.open_flags = FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES;
		return sizeof(body->open);
	case FUSE_FLUSH:
	case FUSE_RELEASE:
	case FUSE_FSYNC:
		return 0;
	default:
		return -ENOSYS;
	}
}

static void reply(int fd, const struct fuse_in_header *in)
{
	const void *args = in + 1;
	union floor_body body = { 0 };
	struct fuse_out_header out = { .unique = in->unique };
	struct iovec parts[2] = { { &out, sizeof(out) }, { &body, 0 } };
	int bytes;

	if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET)
		return;	/* no process waits for a reply */
	if (in->opcode == FUSE_READ) {
		parts[1].iov_base = zeroes;
		bytes = ((const struct fuse_read_in *)args)->size;
	} else {
		bytes = floor_answer(in, args, &body);
	}
	if (bytes < 0)
		out.error = bytes;
	else
		parts[1].iov_len = bytes;
	out.len = sizeof(out) + parts[1].iov_len;
	/* ENOENT: the caller was interrupted and is gone; ENODEV: the mount is gone. */
	if (writev(fd, parts, bytes > 0 ? 2 : 1) < 0 && errno != ENOENT && errno != ENODEV)
		floor_die("floor: write to /dev/fuse");
}

void floor_serve_one(int fd, void *request)
{
	if (read(fd, request, REQUEST_BYTES) >= 0)
		reply(fd, request);
	else if (errno == ENODEV)
		_exit(0);	/* unmounted by someone else, or aborted */
	else if (errno != EINTR && errno != EAGAIN && errno != ENOENT)
		floor_die("floor: read of /dev/fuse");
}
