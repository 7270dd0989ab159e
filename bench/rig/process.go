package rig

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/child"
)

const (
	startWithin = 30 * time.Second
	stopWithin  = 10 * time.Second
)

// Process is a process of a candidate. It ends with the benchmark, or the process of the benchmark, at
// the latest.
type Process struct {
	Addr string // where it listens, host:port; of a worker, which does not, its name

	b      testing.TB
	name   string
	child  *child.Process
	output *output
	ended  bool
}

// Run starts a program with environment variables beside ours, those of Stampede excepted, and waits
// until it has written a line with announce, behind which its address stands.
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
		b.Fatalf("%s ended instead of starting: %v", name, p.child.Wait())
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
func (p *Process) Stop() { p.end(syscall.SIGTERM) }

func (p *Process) end(signal syscall.Signal) {
	if !p.ended {
		p.ended = true
		p.child.Stop(signal, stopWithin)
	}
}

// mustRun fails the benchmark if the process has ended by itself.
func (p *Process) mustRun() {
	p.b.Helper()
	select {
	case <-p.child.Done():
		if !p.ended {
			p.b.Fatalf("%s ended by itself: %v", p.name, p.child.Wait())
		}
	default:
	}
}

// output collects what a process writes, and finds the line with its address.
type output struct {
	announce  string
	announced chan string // gets the address, once

	mu    sync.Mutex
	text  bytes.Buffer
	found bool
}

// outputMax is how much of a process's output is kept.
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
