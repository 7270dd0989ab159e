package rig

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/designs"
	"stampede/bench/front"
	"stampede/bench/httpload"
	"stampede/internal/dev/child"
	"stampede/internal/dev/loadgen"
	"stampede/reservation"
)

const (
	startWithin = 30 * time.Second
	stopWithin  = 10 * time.Second
)

// Process is a process of a candidate. It ends at the latest with the benchmark, or with the process of
// the benchmark.
type Process struct {
	Addr string // host:port of its listener; for a worker its name

	b      testing.TB
	name   string
	child  *child.Process
	output *output
	ended  bool
}

// Run starts a program with additional environment variables and without inherited ones of Stampede. It
// waits for a line of output with announce, which is followed by the address.
func Run(b testing.TB, name, announce string, cmd *exec.Cmd, env ...string) *Process {
	b.Helper()
	p := &Process{b: b, name: name, output: &output{announce: announce, announced: make(chan string, 1)}}
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "STAMPEDE_")
	}), env...)
	cmd.Stdout, cmd.Stderr = p.output, p.output
	var err error
	p.child, err = child.Start(cmd, syscall.SIGKILL)
	require.NoError(b, err)
	b.Cleanup(func() {
		inUse := !p.ended
		p.Kill()
		if inUse && b.Failed() {
			b.Logf("%s wrote:\n%s", name, p.output)
		}
	})
	timeout := time.NewTimer(startWithin)
	defer timeout.Stop()
	select {
	case p.Addr = <-p.output.announced:
	case <-p.child.Done():
		b.Fatalf("%s ended during its start: %v", name, p.child.Wait())
	case <-timeout.C:
		b.Fatalf("%s was not ready within %v", name, startWithin)
	}
	return p
}

// Pid is the process id.
func (p *Process) Pid() int { return p.child.Pid() }

// Kill ends the process by SIGKILL. It may be called more than once.
func (p *Process) Kill() { p.end(syscall.SIGKILL) }

// Stop lets the process finish what it has begun.
func (p *Process) stop() { p.end(syscall.SIGTERM) }

func (p *Process) end(signal syscall.Signal) {
	if !p.ended {
		p.ended = true
		p.child.Stop(signal, stopWithin)
	}
}

// requireRunning fails the benchmark if the process has ended unexpectedly.
func (p *Process) requireRunning() {
	p.b.Helper()
	select {
	case <-p.child.Done():
		if !p.ended {
			p.b.Fatalf("%s ended unexpectedly: %v", p.name, p.child.Wait())
		}
	default:
	}
}

// output collects the output of a process, and finds the line with its address.
type output struct {
	announce  string
	announced chan string // receives the address once

	mu    sync.Mutex
	text  bytes.Buffer
	found bool
}

// outputMax is how much output of a process is kept.
const outputMax = 64 << 10

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.text.Len() < outputMax {
		o.text.Write(p)
	}
	if !o.found {
		_, rest, _ := strings.Cut(o.text.String(), o.announce)
		if line, _, whole := strings.Cut(rest, "\n"); whole {
			addr, _, _ := strings.Cut(line, " ")
			o.found = true
			o.announced <- addr
		}
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// The roles whose CPU time is measured separately.
const (
	Front    = "front" // includes a design's background work in the same process
	Worker   = "worker"
	Redis    = "Redis"
	Postgres = "Postgres"
	Load     = "load"  // the benchmark itself
	Proxy    = "proxy" // the distance of Conditions
)

// Roles lists all roles but the proxy in the order in which an order passes them.
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

const adminToken = "token-of-the-operators"

// Stampede is the product as processes: `stampede serve` and `stampede work`.
type Stampede struct {
	Partitions int // 0 means the default
	Workers    int // 0 means one
	// Env are additional settings as NAME=value: STAMPEDE_BATCH_MAX=100.
	Env []string
}

// Start starts Stampede with a sale that is open when it returns.
func (c Stampede) Start(b testing.TB, stock int64) *System {
	b.Helper()
	s := &System{Shop: Open(b), b: b}
	s.launch = func() { c.launch(s) }
	s.launch()
	b.Cleanup(s.Close)
	var err error
	s.Sale, err = loadgen.CreateSale(b.Context(), "http://"+s.Fronts[0].Addr, adminToken,
		reservation.Terms{Name: "bench", Stock: stock})
	require.NoError(b, err)
	c.awaitOpen(s)
	return s
}

// launch starts the processes. Each has its own name and port, and the names are the same after a
// restart, as under a supervisor.
func (c Stampede) launch(s *System) {
	s.b.Helper()
	env := append([]string{
		"REDIS_URL=" + s.Shop.RedisURL, "DATABASE_URL=" + s.Shop.DatabaseURL, "STAMPEDE_KEY_PREFIX=" + s.Shop.prefix,
		fmt.Sprint("STAMPEDE_PARTITIONS=", max(1, c.Partitions)),
		"STAMPEDE_AUTH=header", "STAMPEDE_ADMIN_TOKEN=" + adminToken,
		"STAMPEDE_HTTP_ADDR=127.0.0.1:0", "STAMPEDE_METRICS_ADDR=127.0.0.1:0",
		"STAMPEDE_STOP_DELAY=0s",
	}, c.Env...)
	binary, err := buildBinary()
	require.NoError(s.b, err, "build Stampede")
	for i := range max(1, c.Workers) {
		s.Workers = append(s.Workers, Run(s.b, "stampede work", "msg=\"worker started\" consumer=",
			exec.Command(binary, "work"),
			append(env, fmt.Sprint("STAMPEDE_CONSUMER=worker-", i))...))
	}
	s.Fronts = append(s.Fronts, Run(s.b, "stampede serve", "msg=\"ingress listens\" addr=",
		exec.Command(binary, "serve"), env...))
	if s.Sale != [16]byte{} {
		c.awaitOpen(s)
	}
}

// awaitOpen waits until every front sells: a worker must first verify the partition. It requests more
// units than an order may hold, which sells nothing.
func (c Stampede) awaitOpen(s *System) {
	s.b.Helper()
	const refused = http.StatusUnprocessableEntity
	deadline := time.Now().Add(startWithin)
	for _, p := range s.Fronts {
		probe := httpload.Load{
			Addrs: []string{p.Addr}, Connections: 1, For: time.Second, Most: 1, Status: refused,
			Request: func(dst []byte, _ uint64) []byte {
				return append(dst, PurchaseHead(s.Sale)+"probe"+strings.Replace(PurchaseEnd, "1", "2", 1)...)
			},
		}
		for answers := s.Measure(probe); answers.Wanted == 0; answers = s.Measure(probe) {
			if time.Now().After(deadline) {
				s.b.Fatalf("the sale was not open within %v: %s", startWithin, answers)
			}
		}
	}
}

// buildBinary builds Stampede once, from the sources that this module's go.mod replaces it with.
var buildBinary = sync.OnceValues(func() (path string, err error) {
	folder, err := os.MkdirTemp("", "stampede-bench-")
	if err != nil {
		return "", err
	}
	AtExit(func() { _ = os.RemoveAll(folder) })
	path = filepath.Join(folder, "stampede")
	build := exec.Command("go", "build", "-o", path, "./cmd/stampede")
	build.Dir = "../.." // a package's benchmarks run in its folder
	build.Stderr = os.Stderr
	return path, build.Run()
})

// StartDesign starts a design of the ladder with a sale. The options are added to the design's own.
func StartDesign(b testing.TB, name string, options map[string]string, stock int64) *System {
	b.Helper()
	entry, found := designs.All[name]
	require.True(b, found, "unknown design %q", name)
	shop := Open(b)
	s := &System{Shop: shop, b: b}
	s.Sale = shop.InsertSale(stock)
	if !entry.Guarded {
		shop.dropGuard()
	}
	spec := front.Spec{
		Design: name, Sale: s.Sale, Stock: stock, Addr: "127.0.0.1:0",
		Backend: front.Backend{
			RedisURL: shop.RedisURL, DatabaseURL: shop.DatabaseURL, Prefix: shop.prefix,
			Options: map[string]string{},
		},
	}
	maps.Copy(spec.Backend.Options, entry.Options)
	maps.Copy(spec.Backend.Options, options)
	variable, err := spec.Environ()
	require.NoError(b, err)
	self, err := os.Executable()
	require.NoError(b, err)
	s.launch = func() {
		for range max(1, entry.Fronts) {
			s.Fronts = append(s.Fronts, Run(b, name, front.AddressLine, exec.Command(self), variable))
		}
	}
	s.launch()
	b.Cleanup(s.Close)
	return s
}
