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
	"stampede/internal/dev/loadgen"
	"stampede/internal/format"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/stream"
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

// crash holds the figures of the killed worker.
type crash struct {
	orphans   int64         // its pending orders
	takenOver time.Duration // from the kill until other workers had claimed all of them
}

// thawedFor is how long a worker that was frozen while it was not reading may go on before it is frozen again.
const thawedFor = 5 * time.Millisecond

var errTooShort = errors.New("the sale ended before a worker had pending orders: use more --stock or a longer --over")

// killWorker waits until part of the stock is sold, and then kills a worker that has pending orders, by SIGKILL.
func (d *demo) killWorker(ctx context.Context, buyers *loadgen.Crowd) error {
	enough := int(killAt * float64(min(d.config.orders(), int64(d.config.Buyers))))
	for buyers.Progress().Accepted < enough {
		if d.soldOut(buyers) {
			return errTooShort
		}
		if !retry.Pause(time.Millisecond, ctx.Done()) {
			return context.Cause(ctx)
		}
	}
	victim := stream.First(d.stream(), workers) // it reads the stream
	worker := d.fleet.workers[victim]
	worker.expectEnd()
	over := func() bool { return d.soldOut(buyers) }
	err := await(ctx, "pending orders of "+victim, func() (bool, error) { return d.freezeWithOrders(ctx, worker, over) })
	if err != nil {
		return err
	}
	worker.Signal(syscall.SIGKILL)
	<-worker.Done()
	killed := time.Now()
	if d.crash.orphans, err = d.pendingOrders(ctx, victim); err != nil {
		return err
	}
	d.story.add("kill -9 of %s with %s pending orders", victim, format.Count(d.crash.orphans))

	if !retry.Pause(replaceAfter, ctx.Done()) {
		return context.Cause(ctx)
	}
	env := d.env()
	if d.config.Dashboard { // which knows the address of the killed one
		env = append(env, "STAMPEDE_METRICS_ADDR="+worker.metrics)
	}
	if err := d.fleet.startWorker(ctx, "worker-3", env); err != nil {
		return err
	}
	err = await(ctx, "the claim of the orders of "+victim, func() (bool, error) {
		pending, err := d.pendingOrders(ctx, victim)
		return pending == 0, err
	})
	if err != nil {
		return err
	}
	d.crash.takenOver = time.Since(killed)
	d.story.add("other workers took over all of them within %.1f s; worker-3 is started as a replacement", d.crash.takenOver.Seconds())
	return nil
}

// freezeWithOrders freezes a worker and reports whether it has pending orders, which it cannot process while frozen.
// Redis delivers entries to a waiting reader even then. A worker that was frozen while it was not reading leaves the
// next entry unread, and is thawed. It returns errTooShort if there are no such orders and the sale is over.
func (d *demo) freezeWithOrders(ctx context.Context, worker *process, over func() bool) (bool, error) {
	worker.Signal(syscall.SIGSTOP)
	for {
		last := over()
		pending, err := d.pendingOrders(ctx, worker.name)
		if pending > 0 || err != nil {
			return true, err
		}
		backlog, err := stream.ReadBacklog(ctx, d.redis, d.stream(), reservation.Group)
		switch {
		case err != nil:
			return false, err
		case backlog.Lag > 0:
			worker.Signal(syscall.SIGCONT)
			retry.Pause(thawedFor, ctx.Done())
			return false, nil
		case last:
			return false, errTooShort
		}
		if !retry.Pause(time.Millisecond, ctx.Done()) {
			return false, context.Cause(ctx)
		}
	}
}

// soldOut reports whether the crowd gets no more orders.
func (d *demo) soldOut(buyers *loadgen.Crowd) bool {
	select {
	case <-buyers.Done():
		return true
	default:
		return int64(buyers.Progress().Accepted) >= d.config.orders()
	}
}
