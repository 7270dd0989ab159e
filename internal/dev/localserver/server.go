package localserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"stampede/internal/dev/child"
)

const (
	// startWithin bounds a start. It takes less than a second, or longer with a large log to recover.
	startWithin = 30 * time.Second
	// stopWithin is how long a server may take to stop before it is killed.
	stopWithin = 10 * time.Second
	// portTries is how many ports are tried: another process may take one between freePort and the start.
	portTries = 5
)

// Ports are chosen below the range that kernels give to clients (from 32768 on Linux, 49152 elsewhere).
// Otherwise a client that redials a killed server could get the server's port as its own, connect to
// itself, and block the restart.
const (
	portMin = 15_000
	portMax = 32_000
)

var errPortTaken = errors.New("the port was taken by another process")

// server is a child that serves a port, with its data in a folder.
type server struct {
	name    string
	binary  string
	args    func(port int) []string
	env     []string
	account account
	folder  *serverFolder
	port    int
	// orderly is the signal for a clean stop.
	orderly syscall.Signal
	// readyMark is in the output of the server when it serves.
	readyMark string

	mu      sync.Mutex
	process *child.Process // nil while the server is down
	stopped bool
}

// newServer returns a server that is ready when it writes readyMark, with an empty folder. The caller sets its args.
func newServer(name, binary string, orderly syscall.Signal) (*server, error) {
	a, err := serverAccount()
	if err != nil {
		return nil, err
	}
	folder, err := newFolder(strings.ToLower(strings.ReplaceAll(name, " ", "-")), a)
	if err != nil {
		return nil, err
	}
	return &server{
		name: name, binary: binary, account: a, folder: folder, orderly: orderly, readyMark: readyMark,
	}, nil
}

// start starts the server on a port from pick. After an error the folder is removed.
func (s *server) start(ctx context.Context, pick func() (int, error)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errPortTaken
	for range portTries {
		if !errors.Is(err, errPortTaken) {
			break
		}
		if s.port, err = pick(); err == nil {
			err = s.launch(ctx)
		}
	}
	if err != nil {
		s.folder.remove()
	}
	return err
}

// launch starts the process on s.port and waits until it serves.
func (s *server) launch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	out := newOutput(s.readyMark)
	cmd := exec.Command(s.binary, s.args(s.port)...)
	cmd.Dir = s.folder.path
	cmd.Env = append(serverEnv(), s.env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = []*os.File{s.folder.lock} // see serverFolder
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: s.account.credential}
	process, err := child.Start(cmd, syscall.SIGINT) // a clean stop for both servers
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	select {
	case <-out.ready:
		s.process = process
		return nil
	case <-process.Done():
		if strings.Contains(out.String(), "Address already in use") {
			return fmt.Errorf("%s on port %d: %w", s.name, s.port, errPortTaken)
		}
		return fmt.Errorf("%s ended instead of starting: %w; it wrote:\n%s", s.name, process.Wait(), out)
	case <-ctx.Done():
		process.Stop(syscall.SIGKILL, stopWithin)
		return fmt.Errorf("%s was not ready: %w; it wrote:\n%s", s.name, ctx.Err(), out)
	}
}

// restart starts the server on the same port and data. A running server is stopped first.
func (s *server) restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return fmt.Errorf("restart %s: it was stopped and its data is deleted", s.name)
	}
	s.end(s.orderly)
	return s.launch(ctx)
}

// interrupt ends the process with a signal and keeps its data for a restart.
func (s *server) interrupt(signal syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(signal)
}

// stop ends the process with a signal and removes its data. It may be called more than once.
func (s *server) stop(signal syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return
	}
	s.stopped = true
	s.end(signal)
	s.folder.remove()
}

// signal sends the process a signal that does not end it. If the server is down it does nothing.
func (s *server) signal(signal syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != nil {
		s.process.Signal(signal)
	}
}

// end ends the process. The caller holds s.mu.
func (s *server) end(signal syscall.Signal) {
	if s.process != nil {
		if signal != syscall.SIGKILL {
			s.process.Signal(syscall.SIGCONT) // a frozen process would not handle the signal
		}
		s.process.Stop(signal, stopWithin)
		s.process = nil
	}
}

// pid is the process id of the server, 0 while it is down.
func (s *server) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.Pid()
}

// watch returns nil when ctx ends, or an error when the current process ends before.
func (s *server) watch(ctx context.Context) error {
	s.mu.Lock()
	process := s.process
	s.mu.Unlock()
	if process == nil {
		return fmt.Errorf("the private %s is down", s.name)
	}
	select {
	case <-process.Done():
		if ctx.Err() == nil {
			return fmt.Errorf("the private %s ended unexpectedly (%v)", s.name, process.Wait())
		}
	case <-ctx.Done():
	}
	return nil
}

// serverEnv is the environment of this process without variables that change settings of the servers
// or the language of their messages.
func serverEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	})
	return append(env, "LC_ALL=C")
}

// freePort returns an unused port of the loopback.
func freePort() (int, error) {
	var err error
	for range 100 {
		port := portMin + rand.IntN(portMax-portMin)
		var listener net.Listener
		if listener, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			return port, listener.Close()
		}
	}
	return 0, fmt.Errorf("find a free port: %w", err)
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// outputMax bounds, in bytes, how much of a server's output is kept.
const outputMax = 64 << 10

// Marks in the lines that servers write when they are ready, also after recovery. Unlike a connection to the port, they
// cannot come from another process.
const (
	readyMark         = "ready to accept connections" // of Redis and Postgres
	sentinelReadyMark = "sentinel id is"
)

// output keeps the end of a server's output, and signals when the server is ready.
type output struct {
	mu      sync.Mutex
	kept    []byte
	mark    string        // of readiness, in lower case
	ready   chan struct{} // closed when mark was written
	isReady bool
}

func newOutput(mark string) *output { return &output{mark: mark, ready: make(chan struct{})} }

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.kept = append(o.kept, p...)
	if !o.isReady && bytes.Contains(bytes.ToLower(o.kept), []byte(o.mark)) {
		o.isReady = true
		close(o.ready)
	}
	if extra := len(o.kept) - outputMax; extra > 0 {
		o.kept = append(o.kept[:0], o.kept[extra:]...)
	}
	return len(p), nil
}

// String returns the end of the output.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(bytes.TrimSpace(o.kept))
}
