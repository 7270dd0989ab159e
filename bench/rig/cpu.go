package rig

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The roles whose CPU time is measured separately.
const (
	Front    = "front" // includes a design's background work in the same process
	Worker   = "worker"
	Redis    = "Redis"
	Postgres = "Postgres"
	Load     = "load" // the benchmark itself
)

// Roles lists all roles in the order in which an order passes them.
var Roles = []string{Load, Front, Redis, Worker, Postgres}

// Usage is CPU time, user and system, by role.
type Usage map[string]time.Duration

// Since is the usage since an earlier one.
func (u Usage) Since(before Usage) Usage {
	since := make(Usage)
	for role, d := range u {
		since[role] = d - before[role]
	}
	return since
}

// PerOrder is the CPU time of each role per order in microseconds.
func (u Usage) PerOrder(orders int64) map[string]float64 {
	each := make(map[string]float64)
	for role, d := range u {
		each[role] = float64(d.Microseconds()) / float64(orders)
	}
	return each
}

// CPU is the CPU time that the servers of the shop and the benchmark itself have used so far.
func (s *Shop) CPU() Usage {
	s.b.Helper()
	var self syscall.Rusage
	require.NoError(s.b, syscall.Getrusage(syscall.RUSAGE_SELF, &self))
	return Usage{
		Redis:    ProcessCPU(s.b, s.servers.redis.Pid()),
		Postgres: treeCPU(s.b, s.servers.postgres.Pid()),
		Load:     time.Duration(self.Utime.Nano() + self.Stime.Nano()),
	}
}

// ProcessCPU is the CPU time that a process has used so far.
func ProcessCPU(b testing.TB, pid int) time.Duration {
	b.Helper()
	p, err := readStat(pid)
	require.NoError(b, err)
	return p.used
}

// treeCPU is the CPU time of a process and its children, including ended ones. Postgres's postmaster
// has a child for each connection.
func treeCPU(b testing.TB, pid int) time.Duration {
	b.Helper()
	root, err := readStat(pid)
	require.NoError(b, err)
	sum := root.used + root.usedByEnded
	all, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(b, err)
	for _, folder := range all {
		id, _ := strconv.Atoi(filepath.Base(folder))
		if p, err := readStat(id); err == nil && p.parent == pid { // a process may have ended meanwhile
			sum += p.used
		}
	}
	return sum
}

// stat is a part of /proc/PID/stat.
type stat struct {
	parent            int
	used, usedByEnded time.Duration
}

// tick is the unit of /proc/PID/stat: Linux reports 100 per second to programs, whatever its own clock
// is.
const tick = 10 * time.Millisecond

// readStat reads /proc/PID/stat, see proc(5).
func readStat(pid int) (stat, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	// The name, in parentheses, may hold anything; the third field follows it.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	field := func(n int) int {
		value, convErr := strconv.Atoi(string(fields[n-3]))
		if err == nil {
			err = convErr
		}
		return value
	}
	s := stat{parent: field(4)}
	s.used = time.Duration(field(14)+field(15)) * tick
	s.usedByEnded = time.Duration(field(16)+field(17)) * tick
	return s, err
}
