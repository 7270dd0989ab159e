package rig

import (
	_ "embed"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Conditions are what a real shop's disks and network add to those of this machine. They are the same for every
// candidate.
type Conditions struct {
	// Sync is how long Redis and Postgres wait before each fsync and fdatasync.
	Sync time.Duration
	// RoundTrip is the time that a request to Redis or Postgres and its answer are on their way, half of it each.
	RoundTrip time.Duration
	// CountSyncs makes Shop.Syncs count.
	CountSyncs bool
}

// conditions hold for shops that are opened now.
var conditions Conditions

func init() {
	flag.DurationVar(&conditions.Sync, "sync", 0,
		"`time` that Redis and Postgres wait before each fsync and fdatasync; needs a C compiler")
	flag.DurationVar(&conditions.RoundTrip, "round-trip", 0,
		"`time` that a request to Redis or Postgres and its answer are on their way, beside what this machine takes")
}

// Under makes shops that are opened from now on have the conditions, until restore is called.
func Under(c Conditions) (restore func()) {
	before := conditions
	conditions = c
	return func() { conditions = before }
}

//go:embed preload/syncs.c
var syncsSource string

// buildSyncs compiles the preloaded library once.
var buildSyncs = sync.OnceValues(func() (path string, err error) {
	compiler, err := exec.LookPath("cc")
	if err != nil {
		return "", errors.New("waits and counts of fsync need a C compiler: apt-get install gcc libc6-dev")
	}
	folder, err := os.MkdirTemp("", "stampede-bench-")
	if err != nil {
		return "", err
	}
	AtExit(func() { _ = os.RemoveAll(folder) })
	// The user of the private Postgres reads it.
	if err := os.Chmod(folder, 0o755); err != nil {
		return "", err
	}
	path = filepath.Join(folder, "syncs.so")
	build := exec.Command(compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-x", "c", "-o", path, "-")
	build.Stdin, build.Stderr = strings.NewReader(syncsSource), os.Stderr
	return path, build.Run()
})

// CanSlowSyncs says why this machine cannot wait for and count fsync; nil means that it can.
func CanSlowSyncs() error {
	_, err := buildSyncs()
	return err
}

// preload returns the environment of a server with the library, and keeps the file of its count.
func (s *servers) preload(b testing.TB, c Conditions, role string) (env []string) {
	b.Helper()
	if c.Sync == 0 && !c.CountSyncs {
		return nil
	}
	library, err := buildSyncs()
	require.NoError(b, err)
	file, err := os.CreateTemp(filepath.Dir(library), "count-")
	require.NoError(b, err)
	require.NoError(b, file.Truncate(8))
	require.NoError(b, file.Close())
	require.NoError(b, os.Chmod(file.Name(), 0o666)) // for the user of the private Postgres
	s.syncs[role] = file.Name()
	return []string{
		"LD_PRELOAD=" + library, "STAMPEDE_BENCH_SYNCS=" + file.Name(),
		"STAMPEDE_BENCH_SYNC_NS=" + strconv.FormatInt(c.Sync.Nanoseconds(), 10),
	}
}

// Syncs are numbers of calls of fsync and fdatasync by server. Without CountSyncs or Sync it is empty.
type Syncs map[string]int64

// Since are the calls since an earlier count.
func (n Syncs) Since(before Syncs) Syncs {
	since := make(Syncs)
	for role, calls := range n {
		since[role] = calls - before[role]
	}
	return since
}

// Syncs are the calls of the servers of the shop so far.
func (s *Shop) Syncs() Syncs {
	s.b.Helper()
	n := make(Syncs)
	for role, file := range s.servers.syncs {
		count, err := os.ReadFile(file)
		require.NoError(s.b, err)
		n[role] = int64(binary.NativeEndian.Uint64(count))
	}
	return n
}

// distanceEnv makes the process of a benchmark the proxy in front of a server: "delay address".
const distanceEnv = "BENCH_DISTANCE"

// startProxy starts a proxy in a process of its own, whose CPU time is counted apart.
func startProxy(b testing.TB, delay time.Duration, target string) *Process {
	b.Helper()
	self, err := os.Executable()
	require.NoError(b, err)
	return Run(b, "the proxy of "+target, proxyAddress, exec.Command(self), distanceEnv+"="+delay.String()+" "+target)
}

const proxyAddress = "proxy listens on "

// proxyMain is the process of startProxy. It ends with its parent.
func proxyMain(text string) error {
	wait, target, _ := strings.Cut(text, " ")
	delay, err := time.ParseDuration(wait)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	p := &proxy{delay: delay, onTheWay: make(chan packet, packetsMax)}
	p.buffers.New = func() any { return new([packetBytes]byte) }
	go p.deliver()
	fmt.Println(proxyAddress + listener.Addr().String())
	for {
		client, err := listener.Accept()
		if err != nil {
			return err
		}
		server, err := net.Dial("tcp", target)
		if err != nil {
			return err
		}
		go p.carry(client, server)
		go p.carry(server, client)
	}
}

// proxy holds everything that it passes for the same time. So one queue has all packets in the order of their arrival.
type proxy struct {
	delay    time.Duration
	onTheWay chan packet
	buffers  sync.Pool
}

const (
	packetsMax  = 4096
	packetBytes = 16 << 10
)

// packet is what one read returned.
type packet struct {
	due    time.Time
	to     net.Conn
	buffer *[packetBytes]byte
	n      int  // the bytes of buffer that are filled
	end    bool // nothing follows
}

func (p *proxy) carry(from, to net.Conn) {
	for {
		buffer := p.buffers.Get().(*[packetBytes]byte)
		n, err := from.Read(buffer[:])
		p.onTheWay <- packet{due: time.Now().Add(p.delay), to: to, buffer: buffer, n: n, end: err != nil}
		if err != nil {
			return
		}
	}
}

// deliver sends packets when they are due. It sleeps in the kernel: Go's timers may be a millisecond late.
func (p *proxy) deliver() {
	runtime.LockOSThread()
	for next := range p.onTheWay {
		for left := time.Until(next.due); left > 0; left = time.Until(next.due) {
			pause := syscall.NsecToTimespec(left.Nanoseconds())
			_ = syscall.Nanosleep(&pause, nil) // a signal may end it early
		}
		_, err := next.to.Write(next.buffer[:next.n])
		if next.end || err != nil {
			_ = next.to.Close()
		}
		p.buffers.Put(next.buffer)
	}
}

// through returns the URL of a server by way of a proxy, if there is a distance.
func (s *Shop) through(server string) string {
	s.b.Helper()
	if s.conditions.RoundTrip == 0 {
		return server
	}
	u, err := url.Parse(server)
	require.NoError(s.b, err)
	proxy := startProxy(s.b, s.conditions.RoundTrip/2, u.Host)
	s.proxies = append(s.proxies, proxy)
	u.Host = proxy.Addr
	return u.String()
}
