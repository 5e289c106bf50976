/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the floors share: the mount of one file with nothing behind it, what to reply, and a channel
 * of /dev/fuse.
 *
 * Included by floor.c (channels only) and floor_uring.c (FUSE over io_uring).
 */
#ifndef FLOOR_H
#define FLOOR_H

#include <linux/fuse.h>
#include <stdint.h>

#define DATA_BYTES_MAX	(1 << 20)	/* of a read or a write */
#define PAGE_BYTES	4096
#define REQUEST_BYTES	(DATA_BYTES_MAX + PAGE_BYTES)	/* a write's data, and its headers */

/* What follows the header of a reply that has no data. */
union floor_body {
	struct fuse_init_out init;
	struct fuse_attr_out attr;
	struct fuse_open_out open;
	struct fuse_write_out write;
};

/**
 * floor_mount - mount the file
 * @mountpoint: a regular file
 * @size_bytes: the size that the mounted file is said to have
 * @init_flags2: high half of INIT's flags; the program ends if the kernel does not offer them
 *
 * From then on SIGTERM takes the mount away and ends the program. If it cannot be mounted, the
 * program ends with a message.
 *
 * Return: the session's descriptor of /dev/fuse.
 */
int floor_mount(const char *mountpoint, uint64_t size_bytes, uint32_t init_flags2);

/**
 * floor_answer - what to reply to anything but FUSE_READ, whose data the transport has
 * @in: header of the request
 * @args: its arguments
 * @body: the reply's body, all zero before
 *
 * Return: bytes of @body to send, or a negative errno.
 */
int floor_answer(const struct fuse_in_header *in, const void *args, union floor_body *body);

/**
 * floor_serve_one - read a request from a channel of /dev/fuse and reply to it
 * @fd: the channel
 * @request: REQUEST_BYTES of room
 *
 * When the mount is gone, the program ends.
 */
void floor_serve_one(int fd, void *request);

/* After floor_mount(), says what failed (by errno), takes the mount away, ends with status 1. */
void floor_die(const char *what) __attribute__((noreturn));

#endif
