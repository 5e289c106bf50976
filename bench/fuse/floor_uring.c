// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The floor of FUSE over io_uring (Linux 6.14): a server that does nothing but answer. A thread for
 * each CPU that there could be serves that CPU's queue: every entry that came back is answered and
 * handed in again, all in one io_uring_enter.
 *
 *	floor_uring MOUNTPOINT SIZE_BYTES QUEUES pinned|free
 *
 * bench/fuse/floor.py compiles it; the fuse-null case runs it as one contestant among the others.
 * QUEUES: as many as CPUs are possible. pinned: each thread on its queue's CPU; free: where the
 * kernel likes. The main thread has the session's channel of /dev/fuse, for INIT and the little
 * that does not go by rings.
 *
 * An entry is a header and a payload buffer. The kernel fills them with a request and gives the
 * entry back by a completion; one submission, COMMIT_AND_FETCH, takes the reply from them and waits
 * for the next request. Entries belong to the queue's thread, but while the kernel has them. Each
 * has a payload buffer of its own, as it must in a server that serves.
 *
 * Tried on 2 CPUs, Linux 6.18, and no faster: COOP_TASKRUN or none for DEFER_TASKRUN; 8, 16 and 256
 * entries; looking for completions for a while before the wait. SCHED_BATCH makes 4k requests of
 * one job a tenth faster where it is pinned, files known by index a little.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "floor.h"

#define ENTRIES			64	/* of a queue, as vshunt has; a power of two */
/* Of a payload buffer: as long as the bench's longest request. */
#define TOUCHED_BYTES		(128 << 10)
/* A page more than they are long: lest all payload buffers want the same lines of a cache. */
#define PAYLOAD_STRIDE		((size_t)DATA_BYTES_MAX + PAGE_BYTES)

/* What headers older than Linux 6.14 lack; own names, so that newer ones do not clash. */
#define INIT2_OVER_IO_URING	(1U << (41 - 32))	/* of INIT's second flags */
#define CMD_REGISTER		1
#define CMD_COMMIT_AND_FETCH	2
#define SETUP_NO_SQARRAY	(1U << 16)

#define CACHE_LINE_BYTES	64

/* struct fuse_uring_req_header */
struct entry_header {
	union {
		struct fuse_in_header in;
		struct fuse_out_header out;
		char in_out[128];
	};
	char args[128];
	uint64_t flags;
	uint64_t commit_id;
	uint32_t payload_bytes;
	uint32_t padding;
	uint64_t reserved;
} __attribute__((aligned(CACHE_LINE_BYTES)));

/* struct fuse_uring_cmd_req */
struct command {
	uint64_t flags;
	uint64_t commit_id;
	uint16_t qid;
	uint8_t padding[6];
};

struct wide_sqe {
	struct io_uring_sqe sqe;	/* the command begins within it */
	char more[64];
};

struct queue {
	int ring;	/* registered: an index, no descriptor */
	uint16_t qid;
	uint32_t sq_tail;	/* ours; *sq_tail_shared follows */
	uint32_t *sq_tail_shared;
	uint32_t *cq_head_shared;
	uint32_t *cq_tail_shared;
	uint32_t cq_mask;
	struct io_uring_cqe *cqes;
	struct wide_sqe *sqes;
	struct entry_header headers[ENTRIES];
	char *payloads;
};

static int session;
static int pinned;

static char *payload(const struct queue *q, uint64_t index)
{
	return q->payloads + index * PAYLOAD_STRIDE;
}

static void *map(size_t bytes, int flags, int fd, off_t offset)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, offset);

	if (at == MAP_FAILED)
		floor_die("floor: mmap");
	return at;
}

/* Makes /dev/fuse and the ring known by index: no look-up in each submission and each enter. */
static void register_files(struct queue *q, int ring)
{
	struct io_uring_rsrc_update ring_fd = { .offset = -1U, .data = ring };

	if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_FILES, &session, 1))
		floor_die("floor: IORING_REGISTER_FILES");
	if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_RING_FDS, &ring_fd, 1) != 1)
		floor_die("floor: IORING_REGISTER_RING_FDS");
	q->ring = ring_fd.offset;
}

/* On the queue's thread, which alone may use the ring. */
static void set_up(struct queue *q)
{
	struct io_uring_params p = {
		.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN |
			 IORING_SETUP_SQE128 | SETUP_NO_SQARRAY,
	};
	const int ring = syscall(__NR_io_uring_setup, ENTRIES, &p);
	const int shared = MAP_SHARED | MAP_POPULATE;
	char *rings;

	if (ring < 0)
		floor_die("floor: io_uring_setup");
	rings = map(p.cq_off.cqes + p.cq_entries * sizeof(*q->cqes), shared, ring,
		    IORING_OFF_SQ_RING);
	q->sq_tail_shared = (void *)(rings + p.sq_off.tail);
	q->cq_head_shared = (void *)(rings + p.cq_off.head);
	q->cq_tail_shared = (void *)(rings + p.cq_off.tail);
	q->cq_mask = *(uint32_t *)(rings + p.cq_off.ring_mask);
	q->cqes = (void *)(rings + p.cq_off.cqes);
	q->sqes = map(ENTRIES * sizeof(*q->sqes), shared, ring, IORING_OFF_SQES);
	q->payloads = map(ENTRIES * PAYLOAD_STRIDE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			  -1, 0);
	for (int i = 0; i < ENTRIES; i++)
		memset(payload(q, i), 0, TOUCHED_BYTES);
	register_files(q, ring);
}

/* Hands in what was prepared, and waits until an entry is back. */
static void enter(const struct queue *q, uint32_t count)
{
	const unsigned int flags = IORING_ENTER_GETEVENTS | IORING_ENTER_REGISTERED_RING;

	__atomic_store_n(q->sq_tail_shared, q->sq_tail, __ATOMIC_RELEASE);
	while (syscall(__NR_io_uring_enter, q->ring, count, 1, flags, NULL, 0) < 0)
		if (errno != EINTR)
			floor_die("floor: io_uring_enter");
}

/*
 * Prepares an operation. There is always room: for as many submissions as there are entries, and
 * each entry is in one at most.
 */
static struct io_uring_sqe *prepare(struct queue *q, uint32_t operation, uint64_t index,
				    uint64_t commit_id)
{
	struct wide_sqe *wide = &q->sqes[q->sq_tail++ % ENTRIES];
	const struct command command = { .commit_id = commit_id, .qid = q->qid };

	wide->sqe = (struct io_uring_sqe){
		.opcode = IORING_OP_URING_CMD, .flags = IOSQE_FIXED_FILE, .fd = 0,
		.cmd_op = operation, .user_data = index,
	};
	memcpy((char *)wide + offsetof(struct io_uring_sqe, cmd), &command, sizeof(command));
	return &wide->sqe;
}

static void register_entries(struct queue *q)
{
	struct iovec parts[ENTRIES][2];	/* read when they are handed in */

	for (uint64_t i = 0; i < ENTRIES; i++) {
		struct io_uring_sqe *sqe = prepare(q, CMD_REGISTER, i, 0);

		parts[i][0] = (struct iovec){ &q->headers[i], sizeof(q->headers[i]) };
		parts[i][1] = (struct iovec){ payload(q, i), DATA_BYTES_MAX };
		sqe->addr = (uintptr_t)parts[i];
		sqe->len = 2;
	}
	enter(q, ENTRIES);
}

static void answer(struct queue *q, uint64_t index)
{
	struct entry_header *h = &q->headers[index];
	union floor_body *body = (void *)payload(q, index);
	const uint64_t unique = h->in.unique;
	int bytes;

	if (h->in.opcode == FUSE_READ) {
		bytes = ((struct fuse_read_in *)h->args)->size;
	} else {
		memset(body, 0, sizeof(*body));
		bytes = floor_answer(&h->in, h->args, body);
	}
	h->payload_bytes = bytes < 0 ? 0 : bytes;
	h->out = (struct fuse_out_header){
		.len = sizeof(h->out) + h->payload_bytes,
		.error = bytes < 0 ? bytes : 0,
		.unique = unique,
	};
	prepare(q, CMD_COMMIT_AND_FETCH, index, h->commit_id);
}

/* Where and when the calling thread runs. If either cannot be, it is a floor all the same. */
static void place(uint16_t cpu)
{
	cpu_set_t cpus;

	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	/* An offline CPU makes no requests. */
	if (pinned)
		sched_setaffinity(0, sizeof(cpus), &cpus);
	/*
	 * So that it preempts no process that makes requests on this CPU: when it runs, there are
	 * several.
	 */
	sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){ 0 });
}

/* An entry came back without a request. */
static void lost(int error)
{
	if (error == ENOTCONN || error == ECONNABORTED || error == ENODEV)
		_exit(0);	/* unmounted by someone else, or aborted */
	errno = error;
	floor_die("floor: entry");
}

static void *serve(void *arg)
{
	struct queue *q = arg;
	uint32_t head = 0;

	place(q->qid);
	set_up(q);
	register_entries(q);
	for (;;) {
		const uint32_t tail = __atomic_load_n(q->cq_tail_shared, __ATOMIC_ACQUIRE);
		const uint32_t count = tail - head;

		for (; head != tail; head++) {
			const struct io_uring_cqe *cqe = &q->cqes[head & q->cq_mask];

			if (cqe->res)
				lost(-cqe->res);
			answer(q, cqe->user_data);
		}
		__atomic_store_n(q->cq_head_shared, head, __ATOMIC_RELEASE);
		enter(q, count);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	const int queues = argc == 5 ? atoi(argv[3]) : 0;
	void *request = aligned_alloc(PAGE_BYTES, REQUEST_BYTES);
	pthread_t thread;

	if (queues < 1 || (strcmp(argv[4], "pinned") && strcmp(argv[4], "free")))
		return 2;	/* how it is called stands above */
	pinned = argv[4][0] == 'p';
	session = floor_mount(argv[1], strtoull(argv[2], NULL, 10), INIT2_OVER_IO_URING);
	floor_serve_one(session, request);	/* INIT, the first that comes */
	for (int i = 0; i < queues; i++) {
		struct queue *q = aligned_alloc(CACHE_LINE_BYTES, sizeof(*q));

		memset(q, 0, sizeof(*q));
		q->qid = i;
		if (pthread_create(&thread, NULL, serve, q))
			floor_die("floor: thread");
	}
	for (;;)
		floor_serve_one(session, request);
}
