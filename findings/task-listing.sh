#!/bin/sh
# Linux: a listing of /proc/self/task lacks threads that live, if another thread ends meanwhile.
#
# Expected: each thread that lives before, during and after a listing is in it. Seen with Linux
# 6.18.44 and 6.12.95: the listing ends at a thread that ends at that moment, and lacks all threads
# that started after that one. Neither an error nor an entry tells so. proc(5) does not mention it.
# The number of threads (field 20 of /proc/self/stat), read before, shows it: the listing has fewer
# entries.
#
# Output with Linux 6.18.44, two CPUs, of one run:
#     9305 listings: 42 lacked a live thread, and the number of threads showed each
#
# Needs a C compiler and two CPUs. Fails if no listing lacks a thread, or the number does not show
# it.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat >"$dir/listing.c" <<'C'
#include <dirent.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int go, live_id, turn;
static sem_t started, end;

static void *ends(void *unused)
{
	sem_post(&started);
	while (!go)
		;
	/* Ends in the middle of the listing, in some turns. */
	for (volatile int i = 0; i < turn % 3000; i++)
		;
	return NULL;
}

static void *lives(void *unused)
{
	live_id = syscall(SYS_gettid);
	sem_post(&started);
	sem_wait(&end);
	return NULL;
}

static int threads(void)
{
	char text[1024] = "", *at;
	int i, n;
	FILE *f = fopen("/proc/self/stat", "r");

	n = fread(text, 1, sizeof(text) - 1, f);
	fclose(f);
	text[n] = '\0';
	at = strrchr(text, ')') + 1;
	for (i = 3; i < 20; i++)
		at = strchr(at + 1, ' ');
	return atoi(at);
}

int main(void)
{
	time_t until = time(NULL) + 20;
	int lacked = 0, shown = 0;

	sem_init(&started, 0, 0);
	sem_init(&end, 0, 0);
	for (turn = 0; time(NULL) < until; turn++) {
		int before, entries = 0, found = 0;
		struct dirent *entry;
		pthread_t one, other;
		DIR *dir;

		go = 0;
		pthread_create(&one, NULL, ends, NULL);
		sem_wait(&started);
		pthread_create(&other, NULL, lives, NULL);
		sem_wait(&started);
		before = threads();
		dir = opendir("/proc/self/task");
		go = 1;
		while ((entry = readdir(dir))) {
			entries += entry->d_name[0] != '.';
			found |= atoi(entry->d_name) == live_id;
		}
		closedir(dir);
		lacked += !found;
		shown += !found && entries < before;
		sem_post(&end);
		pthread_join(one, NULL);
		pthread_join(other, NULL);
	}
	if (lacked && shown == lacked)
		printf("%d listings: %d lacked a live thread, and the number of threads showed each\n", turn, lacked);
	else
		printf("%d listings: %d lacked a live thread, the number of threads showed %d\n", turn, lacked, shown);
	return !lacked || shown != lacked;
}
C
cc -O2 -pthread -o "$dir/listing" "$dir/listing.c"
echo "Linux $(uname -r)"
"$dir/listing"
