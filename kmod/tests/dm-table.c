// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * dm-table NAME SECTORS TARGET ARGUMENT...: makes a device-mapper device of one target and prints
 * its path. What dmsetup does, for a VM without it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <linux/dm-ioctl.h>

#define ROOM	4096

static union {
	struct dm_ioctl head;
	char bytes[ROOM];
} request;

static void ask(int fd, unsigned long what, const char *name, const char *text)
{
	request.head.version[0] = DM_VERSION_MAJOR;
	request.head.data_size = ROOM;
	request.head.data_start = sizeof(request.head);
	snprintf(request.head.name, sizeof(request.head.name), "%s", name);
	if (ioctl(fd, what, &request) < 0) {
		fprintf(stderr, "dm-table: %s: %s\n", text, strerror(errno));
		exit(1);
	}
}

int main(int argc, char **argv)
{
	struct dm_target_spec *target = (void *)(request.bytes + sizeof(request.head));
	char *parameters = (char *)(target + 1);
	size_t used = 0, room = ROOM - sizeof(request.head) - sizeof(*target);
	int fd = open("/dev/mapper/control", O_RDWR);

	if (argc < 5 || fd < 0) {
		fprintf(stderr, "dm-table: %s\n",
			fd < 0 ? "/dev/mapper/control is missing" : "NAME SECTORS TARGET ARGUMENT...");
		return 2;
	}
	ask(fd, DM_DEV_CREATE, argv[1], "create");
	memset(&request, 0, sizeof(request));
	request.head.target_count = 1;
	target->length = strtoull(argv[2], NULL, 0);
	snprintf(target->target_type, sizeof(target->target_type), "%s", argv[3]);
	for (int n = 4; n < argc; n++)
		used += snprintf(parameters + used, used < room ? room - used : 0, "%s%s", n > 4 ? " " : "", argv[n]);
	if (used >= room) {
		fprintf(stderr, "dm-table: too many arguments\n");
		return 2;
	}
	ask(fd, DM_TABLE_LOAD, argv[1], "table");
	/* Without the flag that asks for suspension: it resumes, with the new table. */
	memset(&request, 0, sizeof(request));
	ask(fd, DM_DEV_SUSPEND, argv[1], "resume");
	printf("/dev/dm-%u\n", minor(request.head.dev));
	return 0;
}
