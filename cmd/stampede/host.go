package main

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// maxLanes bounds how many workers of one host get a name automatically.
const maxLanes = 64

// consumerName is the name under which a worker reads: the given one, or else the host's name and
// the first free lane. A restarted worker finds its pending entries by its stable name. Two workers of
// one host must not share a name, or each would process the pending entries of the other.
// The name is reserved until free is called or the process ends.
func consumerName(given string, logger *slog.Logger) (name string, free func(), err error) {
	if given != "" {
		return given, func() {}, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", nil, fmt.Errorf("name this worker (or set STAMPEDE_CONSUMER): %w", err)
	}
	folder := filepath.Join(os.TempDir(), "stampede-lanes-"+strconv.Itoa(os.Getuid()))
	lane, free, err := takeLane(folder)
	switch {
	case errors.Is(err, errNoLane):
		return "", nil, fmt.Errorf("%w: set STAMPEDE_CONSUMER to a name for this worker", err)
	case err != nil:
		// For example in a container with a read-only file system, which has its own host name.
		logger.Warn("cannot see whether other workers run on this host; if so, set STAMPEDE_CONSUMER for each", "error", err)
		return host + "-0", func() {}, nil
	}
	return host + "-" + strconv.Itoa(lane), free, nil
}

var errNoLane = fmt.Errorf("all %d lanes of this host are taken", maxLanes)

// takeLane locks the first unlocked file of the folder. The kernel frees the lock when the process
// ends, even if it is killed.
func takeLane(folder string) (lane int, free func(), err error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return 0, nil, err
	}
	for lane := range maxLanes {
		f, err := os.OpenFile(filepath.Join(folder, strconv.Itoa(lane)), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return 0, nil, err
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return lane, func() {
				// A child that was just forked holds a copy of the file, which would keep the lock.
				_ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN)
				_ = f.Close()
			}, nil
		}
		_ = f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return 0, nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	return 0, nil, errNoLane
}

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
