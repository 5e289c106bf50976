// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The floor of /dev/fuse: a server that does nothing but answer. Each thread reads a request from
 * its channel and writes the reply, in turn.
 *
 *	floor MOUNTPOINT SIZE_BYTES THREADS
 *
 * bench/fuse/floor.py compiles it; the fuse-null case runs it as one contestant among the others.
 * The main thread has the session's descriptor, each other thread a clone of it.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "floor.h"

static void *serve(void *arg)
{
	const int fd = (intptr_t)arg;
	void *request = aligned_alloc(PAGE_BYTES, REQUEST_BYTES);

	for (;;)
		floor_serve_one(fd, request);
	return NULL;
}

int main(int argc, char **argv)
{
	const int threads = argc == 4 ? atoi(argv[3]) : 0;
	pthread_t thread;
	int session;

	if (threads < 1)
		return 2;	/* how it is called stands above */
	session = floor_mount(argv[1], strtoull(argv[2], NULL, 10), 0);
	for (int i = 1; i < threads; i++) {
		int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

		if (fd < 0 || ioctl(fd, FUSE_DEV_IOC_CLONE, &session))
			floor_die("floor: clone of /dev/fuse");
		if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd))
			floor_die("floor: thread");
	}
	serve((void *)(intptr_t)session);
}
