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

	"stampede/internal/dev/child"
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
