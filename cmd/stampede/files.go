package main

import (
	"math"
	"syscall"
)

// Files that an ingress and a worker may open beside the connections of clients: connections to Redis
// (ingress: up to 64; worker: 16 and one per partition), connections to Postgres (each needs a second
// one while a query is cancelled), and the listener, the poller, the log, and look-ups of names and keys.
const (
	ingressFiles = 64 + 32 + 32
	workerFiles  = 16 + 64 + 32
)

// maxConnections is how many connections clients may have open at the same time: the limit of open
// files, which Go has raised as far as allowed, minus reserved. If reserved is more than half of the
// limit, it is half of the limit.
func maxConnections(reserved uint64) int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return int(min(limit.Cur-min(reserved, limit.Cur/2), math.MaxInt32))
}
