package demo

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"stampede/internal/dev/child"
)

// stopWithin is how long a process may take to stop before it is killed.
const stopWithin = 5 * time.Second

// fleet holds the processes of the demo: children that run this program. They end with this process.
type fleet struct {
	self string
	logs string // folder
	// onLoss is called when a process ends unexpectedly.
	onLoss  context.CancelCauseFunc
	workers map[string]*process

	mu        sync.Mutex
	processes []*process
	watchers  sync.WaitGroup
}

var errStatus0 = errors.New("exit status 0")

type process struct {
	*child.Process
	name     string
	metrics  string // its address, of a worker
	log      *os.File
	expected atomic.Bool
}

func (p *process) expectEnd() { p.expected.Store(true) }

func newFleet(logs string) (*fleet, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &fleet{self: self, logs: logs, workers: make(map[string]*process)}, nil
}

// start runs a command of this program. Its output goes to its log, and its standard error also to watch if not nil.
func (f *fleet) start(name string, env []string, watch io.Writer, args ...string) (*process, error) {
	log, err := os.Create(filepath.Join(f.logs, name+".log"))
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(f.self, args...)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = log, log
	if watch != nil {
		cmd.Stderr = io.MultiWriter(log, watch)
	}
	started, err := child.Start(cmd, syscall.SIGKILL)
	if err != nil {
		_ = log.Close()
		return nil, err
	}
	p := &process{Process: started, name: name, log: log}
	f.mu.Lock()
	f.processes = append(f.processes, p)
	f.mu.Unlock()
	f.watchers.Go(func() {
		if err := p.Wait(); !p.expected.Load() {
			f.onLoss(fmt.Errorf("%s ended unexpectedly (%v)", name, cmp.Or(err, errStatus0)))
		}
		_ = p.log.Close()
	})
	return p, nil
}

// startIngress returns the address at which the ingress listens.
func (f *fleet) startIngress(ctx context.Context, env []string) (addr string, err error) {
	found := newAddrWatch("ingress listens")
	if _, err := f.start("ingress", env, found, "serve"); err != nil {
		return "", err
	}
	return found.await(ctx, "the ingress")
}

// startWorker adds a worker, and waits for the address of its metrics.
func (f *fleet) startWorker(ctx context.Context, name string, env []string) error {
	found := newAddrWatch("metrics are served")
	p, err := f.start(name, append(slices.Clone(env), "STAMPEDE_CONSUMER="+name), found, "work")
	if err != nil {
		return err
	}
	f.workers[name] = p
	p.metrics, err = found.await(ctx, name)
	return err
}

// startDashboard returns the address of a dashboard that watches processes by the URLs of their metrics.
func (f *fleet) startDashboard(ctx context.Context, env, watched []string) (addr string, err error) {
	found := newAddrWatch("dashboard listens")
	if _, err := f.start("dashboard", env, found, "dashboard", "--addr=127.0.0.1:0",
		"--scrape="+strings.Join(watched, ",")); err != nil {
		return "", err
	}
	return found.await(ctx, "the dashboard")
}

// stop ends all processes, at the same time.
func (f *fleet) stop() {
	var stopping sync.WaitGroup
	f.mu.Lock()
	for _, p := range f.processes {
		p.expectEnd()
		stopping.Go(func() { p.Stop(syscall.SIGTERM, stopWithin) })
	}
	f.mu.Unlock()
	stopping.Wait()
	f.watchers.Wait()
}

// addrWatch finds the address at which a process listens in its log, by the message.
type addrWatch struct {
	message string
	addr    chan string
	rest    []byte
	done    bool
}

func newAddrWatch(message string) *addrWatch {
	return &addrWatch{message: message, addr: make(chan string, 1)}
}

func (w *addrWatch) await(ctx context.Context, name string) (addr string, err error) {
	select {
	case addr = <-w.addr:
		return addr, nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	case <-time.After(patience):
		return "", fmt.Errorf("%s does not listen after %s", name, patience)
	}
}

// Write implements io.Writer.
func (w *addrWatch) Write(p []byte) (int, error) {
	if w.done {
		return len(p), nil
	}
	w.rest = append(w.rest, p...)
	for {
		line, rest, whole := bytes.Cut(w.rest, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		w.rest = rest
		var record struct{ Msg, Addr string }
		if json.Unmarshal(line, &record) == nil && record.Msg == w.message {
			w.addr <- record.Addr
			w.done, w.rest = true, nil
			return len(p), nil
		}
	}
}
