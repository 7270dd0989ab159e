// Preloaded into Redis and Postgres, for rig.Conditions: counts what they sync to the disk, and waits
// before each. STAMPEDE_BENCH_SYNCS is the file of the count, STAMPEDE_BENCH_SYNC_NS the time to wait.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic long *count;
static struct timespec wait;

__attribute__((constructor)) static void begin(void) {
	long ns = atol(getenv("STAMPEDE_BENCH_SYNC_NS"));
	int file = open(getenv("STAMPEDE_BENCH_SYNCS"), O_RDWR);
	wait.tv_sec = ns / 1000000000;
	wait.tv_nsec = ns % 1000000000;
	// Shared with the children, which Postgres has for each connection.
	void *shared = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (shared == MAP_FAILED)
		abort();
	count = shared;
	close(file);
}

static int slowly(long call, int file) {
	atomic_fetch_add(count, 1);
	if (wait.tv_sec || wait.tv_nsec)
		nanosleep(&wait, NULL);
	return syscall(call, file);
}

int fsync(int file) { return slowly(SYS_fsync, file); }
int fdatasync(int file) { return slowly(SYS_fdatasync, file); }
