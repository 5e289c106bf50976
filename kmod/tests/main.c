// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * vhost-blk-test [--device PATH] [--disk PATH] [--seed N] GROUP...: cases of these groups, one
 * after the other, each in a process of its own. One line a case: "ok NAME (ms)" or "not ok NAME:
 * what was seen".
 *
 * After each case the module must be as before: no process has it open, every pinned page was given
 * back. A case that does not end is killed; one that cannot be killed hangs in the kernel, and says
 * where.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <linux/fs.h>
#include <unistd.h>
#include "vb.h"

#define TEXT_BYTES	4096
/*
 * What a case may take: more than WAIT_MS, so that one that waits in vain can say so. They take
 * seconds.
 */
#define LIMIT_MS	(2 * WAIT_MS)
/* What a killed process may take to leave the kernel: its requests in flight end first. */
#define LEAVE_MS	60000
/* What is given back after a case may be so much later. */
#define SETTLE_MS	30000

static const struct vb_case * const groups[] = {
	cases_errors, cases_io, cases_life, cases_hostile, cases_fault, cases_data,
	cases_inflight,
};

/* A counter of /proc/vmstat, with what the CPUs keep for themselves folded in. */
static long counter_of(const char *name)
{
	FILE *refresh = fopen("/proc/sys/vm/stat_refresh", "w");
	FILE *file = fopen("/proc/vmstat", "r");
	char line[256];
	long value = -1;
	size_t length = strlen(name);

	if (refresh) {
		fputs("1\n", refresh);
		fclose(refresh);
	}
	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, name, length) && line[length] == ' ')
			value = strtol(line + length, NULL, 10);
	if (file)
		fclose(file);
	return value;
}

static long pinned(void)
{
	return counter_of("nr_foll_pin_acquired") - counter_of("nr_foll_pin_released");
}

static long module_users(void)
{
	FILE *file = fopen("/sys/module/vhost_blk/refcnt", "r");
	long value = 0;

	if (file) {
		if (fscanf(file, "%ld", &value) != 1)
			value = -1;
		fclose(file);
	}
	return value;
}

static void show_stack(pid_t pid, char *text, size_t room)
{
	char path[64];
	FILE *file;
	size_t used = strlen(text), got;

	snprintf(path, sizeof(path), "/proc/%d/stack", pid);
	file = fopen(path, "r");
	if (!file)
		return;
	got = fread(text + used, 1, room - used - 1, file);
	text[used + got] = 0;
	fclose(file);
}

/* Waits for the case's process; its exit status, or -1 when it does not end. */
static int wait_for_case(pid_t pid, unsigned int limit_ms)
{
	uint64_t end = now_ms() + limit_ms;
	int status;

	while (waitpid(pid, &status, WNOHANG) == 0) {
		if (now_ms() > end)
			return -1;
		usleep(5000);
	}
	return status;
}

/* What the case said, what happened to it, and how it left the module; empty: all well. */
static void judge(pid_t pid, int said, long pinned_before, char *text)
{
	int status = wait_for_case(pid, LIMIT_MS);
	ssize_t got;
	long now;

	if (status == -1) {
		snprintf(text, TEXT_BYTES, "not within %u s; ", LIMIT_MS / 1000);
		show_stack(pid, text, TEXT_BYTES);
		kill(pid, SIGKILL);
		if (wait_for_case(pid, LEAVE_MS) == -1) {
			snprintf(text, TEXT_BYTES, "hangs in the kernel, killed or not: ");
			show_stack(pid, text, TEXT_BYTES);
			return;
		}
	}
	kill(-pid, SIGKILL);
	got = read(said, text + strlen(text), TEXT_BYTES - strlen(text) - 1);
	if (got > 0)
		return;
	if (status != -1 && WIFSIGNALED(status))
		snprintf(text, TEXT_BYTES, "ended by signal %d", WTERMSIG(status));
	else if (status > 0)
		snprintf(text, TEXT_BYTES, "ended with %d", WEXITSTATUS(status));
	if (text[0])
		return;
	/* The last file reference may be dropped by a worker's task work a moment later. */
	for (int n = 0; n < SETTLE_MS / 10 && (module_users() || pinned() != pinned_before); n++)
		usleep(10000);
	now = pinned();
	if (module_users())
		snprintf(text, TEXT_BYTES, "the module has %ld users after the case", module_users());
	else if (now != pinned_before)
		snprintf(text, TEXT_BYTES, "%ld pages are still pinned", now - pinned_before);
}

static bool run(const struct vb_case *test, const struct vb_args *args)
{
	static char text[TEXT_BYTES];
	long before = pinned();
	uint64_t begin = now_ms();
	int said[2];
	pid_t pid;

	if (pipe(said))
		return false;
	fflush(stdout);
	pid = fork();
	if (!pid) {
		/* A group, so that what a case leaves behind ends with it. */
		setpgid(0, 0);
		dup2(said[1], 2);
		test->body(args);
		_exit(0);
	}
	fcntl(said[0], F_SETFL, O_NONBLOCK);
	close(said[1]);
	memset(text, 0, sizeof(text));
	judge(pid, said[0], before, text);
	close(said[0]);
	for (char *at = text; *at; at++)
		if (*at == '\n')
			*at = '|';
	if (text[0])
		printf("not ok %s on %s: %s: %s\n", test->group, args->disk, test->name, text);
	else
		printf("ok %s on %s: %s (%llu ms)\n", test->group, args->disk, test->name,
		       (unsigned long long)(now_ms() - begin));
	fflush(stdout);
	return !text[0];
}

static uint64_t disk_size(const char *path)
{
	uint64_t bytes = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || ioctl(fd, BLKGETSIZE64, &bytes) < 0) {
		fprintf(stderr, "%s: %s\n", path, strerror(errno));
		exit(2);
	}
	close(fd);
	return bytes;
}

int main(int argc, char **argv)
{
	struct vb_args args = { .device = "/dev/vhost-blk", .disk = "/dev/ram0", .seed = 1 };
	unsigned int failed = 0, ran = 0;
	int at = 1;

	for (; at + 1 < argc && !strncmp(argv[at], "--", 2); at += 2) {
		if (!strcmp(argv[at], "--device"))
			args.device = argv[at + 1];
		else if (!strcmp(argv[at], "--disk"))
			args.disk = argv[at + 1];
		else if (!strcmp(argv[at], "--seed"))
			args.seed = strtoull(argv[at + 1], NULL, 0) | 1;
		else
			break;
	}
	args.disk_bytes = disk_size(args.disk);
	for (; at < argc; at++) {
		unsigned int here = 0;

		for (size_t g = 0; g < sizeof(groups) / sizeof(*groups); g++)
			for (const struct vb_case *test = groups[g]; test->body; test++) {
				if (strcmp(argv[at], test->group))
					continue;
				here++;
				failed += !run(test, &args);
			}
		if (!here) {
			fprintf(stderr, "vhost-blk-test: no group %s\n", argv[at]);
			return 2;
		}
		ran += here;
	}
	return failed || !ran;
}
