package main

import (
	"os"
	"syscall"
)

const (
	memory = "/dev/shm" // a file system in memory, on Linux
	// memoryMin is the free space, in bytes, that tests and the linker have enough of.
	memoryMin = 4 << 30
	noExec    = 8 // ST_NOEXEC of statfs(2)
)

// temporaryFolder returns where tests keep temporary files, the servers' data included: in memory if there is room,
// because most of their time would be spent on creating and syncing files. TMPDIR overrides it.
func temporaryFolder() string {
	var found syscall.Statfs_t
	if os.Getenv("TMPDIR") != "" || syscall.Statfs(memory, &found) != nil || found.Flags&noExec != 0 ||
		found.Bavail*uint64(found.Bsize) < memoryMin {
		return os.TempDir()
	}
	return memory
}
