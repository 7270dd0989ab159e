package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// maxLanes bounds how many workers of one host get a name by themselves.
const maxLanes = 64

// consumerName is the name under which a worker reads: the given one, or else the host's name and
// the first free lane. A worker that comes back finds, by its stable name, what it left pending; and
// two workers of one host must not share a name, or each would take the other's work for its own.
// The name is taken until free is called, or the process ends in whatever way.
func consumerName(given string, logger *slog.Logger) (name string, free func(), err error) {
	if given != "" {
		return given, func() {}, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", nil, fmt.Errorf("name this worker (STAMPEDE_CONSUMER does it too): %w", err)
	}
	folder := filepath.Join(os.TempDir(), "stampede-lanes-"+strconv.Itoa(os.Getuid()))
	lane, free, err := takeLane(folder)
	switch {
	case errors.Is(err, errNoLane):
		return "", nil, fmt.Errorf("%w: name this worker by STAMPEDE_CONSUMER", err)
	case err != nil:
		// As in a container with a read-only file system, where there is one worker to a host.
		logger.Warn("cannot see whether other workers run on this host; if so, name them by STAMPEDE_CONSUMER", "err", err)
		return host + "-0", func() {}, nil
	}
	return host + "-" + strconv.Itoa(lane), free, nil
}

var errNoLane = fmt.Errorf("all %d lanes of this host are taken", maxLanes)

// takeLane locks the first file of the folder that nobody has locked. The kernel frees the lock with
// the process, even one that is killed.
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
			return lane, func() { _ = f.Close() }, nil
		}
		_ = f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return 0, nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	return 0, nil, errNoLane
}
