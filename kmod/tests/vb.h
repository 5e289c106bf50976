/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The driver side of /dev/vhost-blk by hand: one process is owner and guest at once.
 *
 * Used by the cases in this folder, which run in a small VM: a static program, no library. A case
 * runs in a process of its own; what it finds wrong it says with fail(), which ends it.
 */
#ifndef VB_H
#define VB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <linux/vhost.h>
#include <linux/virtio_blk.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <linux/vhost_blk.h>

/* Since Linux 6.5; this machine's headers may be older. */
#ifndef VHOST_NEW_WORKER
struct vhost_worker_state {
	unsigned int worker_id;
};

struct vhost_vring_worker {
	unsigned int index;
	unsigned int worker_id;
};

#define VHOST_NEW_WORKER _IOR(VHOST_VIRTIO, 0x8, struct vhost_worker_state)
#define VHOST_FREE_WORKER _IOW(VHOST_VIRTIO, 0x9, struct vhost_worker_state)
#define VHOST_ATTACH_VRING_WORKER _IOW(VHOST_VIRTIO, 0x15, struct vhost_vring_worker)
#define VHOST_GET_VRING_WORKER _IOWR(VHOST_VIRTIO, 0x16, struct vhost_vring_worker)
#endif

#define SECTOR		512u
#define REGIONS		2
#define REGION_BYTES	(8u << 20)
/*
 * Nothing takes as long as this, under TCG with lock and slab checks on a machine that others use
 * neither.
 */
#define WAIT_MS		60000
/* A status that no device writes. */
#define NO_STATUS	0xee

/* What every case gets: the command line. */
struct vb_args {
	const char *device;
	const char *disk;
	uint64_t disk_bytes;
	uint64_t seed;
};

/* Guest memory is two regions, at guest addresses that are not their offsets. */
struct vb_dev {
	const struct vb_args *args;
	int fd;
	int disk;
	uint64_t features;
	char *mem[REGIONS];
	size_t taken[REGIONS];
};

struct vb_ring {
	struct vb_dev *dev;
	unsigned int index;
	unsigned int num;
	struct vring_desc *desc;
	struct vring_avail *avail;
	struct vring_used *used;
	int kick, call, err;
	/* As the driver counts them; the device's view is avail->idx and used->idx. */
	uint16_t next_avail;
	uint16_t last_used;
	uint16_t free_head;
	unsigned int free_count;
	uint16_t *next_free;
	uint16_t *chain_length;
	/* By head. */
	bool *busy;
	uint32_t *used_len;
};

struct vb_chain {
	unsigned int n;
	struct vring_desc d[VHOST_BLK_VRING_NUM_MAX];
	/* Where an indirect table goes; NULL: descriptors of the ring. */
	struct vring_desc *table;
};

/* A buffer of guest memory with room for a header before and a status after it. */
struct vb_buffer {
	struct virtio_blk_outhdr *hdr;
	uint8_t *data;
	size_t bytes;
};

void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
#define require(what, ...) do { if (!(what)) fail(__VA_ARGS__); } while (0)

uint64_t now_ms(void);
uint32_t chance(uint64_t *seed, uint32_t below);

int vb_open(const struct vb_args *args);
void vb_memory(struct vb_dev *dev, const struct vb_args *args, uint64_t features);
void vb_own(struct vb_dev *dev);
void vb_prepare(struct vb_dev *dev, const struct vb_args *args, uint64_t features);
void vb_close(struct vb_dev *dev);
void *vb_alloc(struct vb_dev *dev, int region, size_t bytes, size_t align);
uint64_t vb_gpa(struct vb_dev *dev, const void *at);
void vb_backend(struct vb_dev *dev, uint32_t flags);
void vb_mem_table(struct vb_dev *dev);

/* An ioctl that must succeed, and one that must fail with this errno. */
void vb_ok(int fd, unsigned long request, void *argument, const char *name);
void vb_fails(int fd, unsigned long request, void *argument, int error, const char *name);

void ring_init(struct vb_ring *ring, struct vb_dev *dev, unsigned int index, unsigned int num);
void ring_set_up(struct vb_ring *ring);
int ring_switch(struct vb_ring *ring, bool on);
void ring_start(struct vb_ring *ring);
void ring_stop(struct vb_ring *ring);
uint16_t ring_base(struct vb_ring *ring);
void ring_free(struct vb_ring *ring);
struct vhost_blk_vring_stats ring_stats(struct vb_ring *ring);

/*
 * Puts a chain into the ring; its head. The device may take it as soon as it is published: lies go
 * in between.
 */
int ring_prepare(struct vb_ring *ring, const struct vb_chain *chain);
void ring_publish(struct vb_ring *ring, uint16_t idx);
/* Both at once. */
int ring_push(struct vb_ring *ring, const struct vb_chain *chain);
void ring_kick(struct vb_ring *ring);
/* Takes what is used; the number of requests. */
unsigned int ring_reap(struct vb_ring *ring);
/* Waits until `head` is used. */
void ring_wait(struct vb_ring *ring, int head);
/*
 * Waits for something used; false when nothing came in time. A request used without a signal is a
 * fault.
 */
bool ring_poll(struct vb_ring *ring, int timeout_ms);
bool ring_broken(struct vb_ring *ring);

void chain_add(struct vb_dev *dev, struct vb_chain *chain, void *at, size_t bytes, bool write);
void chain_split(struct vb_dev *dev, struct vb_chain *chain, void *at, size_t bytes, bool write, unsigned int pieces,
		 uint64_t *seed);
struct vb_buffer buffer_new(struct vb_dev *dev, int region, size_t bytes, size_t align);
/*
 * A request in the plainest layout, or with `pieces` > 0 header, data and status as two ranges cut
 * at random, so that any of them may be split or share a descriptor.
 */
void chain_request(struct vb_dev *dev, struct vb_chain *chain, struct vb_buffer *buffer, uint32_t type, uint64_t sector,
		   size_t bytes, unsigned int pieces, uint64_t *seed);
uint8_t *buffer_status(struct vb_buffer *buffer, size_t bytes);
/* Sends a request and waits for its status. */
uint8_t do_request(struct vb_ring *ring, struct vb_buffer *buffer, uint32_t type, uint64_t sector, size_t bytes);

/* The disk itself, beside the module. */
int open_disk(const struct vb_args *args, int flags);
void disk_read(struct vb_dev *dev, uint64_t sector, void *data, size_t bytes);
void disk_write(struct vb_dev *dev, uint64_t sector, const void *data, size_t bytes);
void fill(void *data, size_t bytes, uint64_t seed);
void require_same(const void *is, const void *should, size_t bytes, const char *what);

struct slot;

/* Requests with verification on one ring, on a thread. */
struct load {
	struct vb_ring *ring;
	uint64_t first_sector;
	uint64_t sectors;
	unsigned int depth;
	uint64_t seed;
	/* Statuses other than OK are counted, not refused. */
	bool errors_allowed;
	/* any thread */
	bool stop;
	uint64_t done;
	uint64_t errors;
	unsigned long thread;
	struct slot *slots;
};

void load_start(struct load *load);
/* Waits until so many requests are done in all. */
void load_wait(struct load *load, uint64_t done);
void load_end(struct load *load);

/* One thing that is tested. */
struct vb_case {
	const char *group;
	const char *name;
	void (*body)(const struct vb_args *args);
};

extern const struct vb_case cases_errors[];
extern const struct vb_case cases_io[];
extern const struct vb_case cases_life[];
extern const struct vb_case cases_hostile[];
extern const struct vb_case cases_fault[];
extern const struct vb_case cases_data[];
extern const struct vb_case cases_inflight[];

#endif
