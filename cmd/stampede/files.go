package main

import (
	"math"
	"syscall"
)

// How many files an ingress and a worker may open beside the connections of clients: up to 64
// connections to Redis for an ingress (a worker: 16, and one for each partition), those to
// Postgres, of which each needs a second one while a query is cancelled, and the listener, the
// poller, the log, and look-ups of names and keys.
const (
	ingressFiles = 64 + 32 + 32
	workerFiles  = 16 + 64 + 32
)

// maxConnections is how many connections clients may have open at once: the limit of open files,
// which Go has raised as far as it may, less what the rest of the process needs. Under a very low
// limit that is half of it.
func maxConnections(reserved uint64) int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur-min(reserved, limit.Cur/2), math.MaxInt32))
}
