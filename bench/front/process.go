package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/google/uuid"

	"stampede/internal/accept"
)

// Env is the environment variable with the Spec of a front process, in JSON.
const Env = "STAMPEDE_BENCH_FRONT"

// Spec says what a front sells, and how.
type Spec struct {
	Design  string // its name in the registry
	Backend Backend
	Sale    uuid.UUID
	Stock   int64
	Addr    string // host:port to listen on; port 0 takes a free one
}

// Environ is the variable that makes a process of this program a front.
func (s Spec) Environ() (string, error) {
	text, err := json.Marshal(s)
	return Env + "=" + string(text), err
}

// drainTimeout bounds how long a stopping front may take to answer its buyers.
const drainTimeout = 10 * time.Second

// Main runs the front that the environment asks for until SIGTERM, and returns the exit status. It
// prints its address in one line on standard output.
func Main(find func(design string) (New, bool)) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv(Env), find, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "front:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, text string, find func(design string) (New, bool), out io.Writer) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // as `stampede serve` does
	}
	uuid.EnableRandPool() // without the pool each order would cost the design a system call
	var spec Spec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("read %s: %w", Env, err)
	}
	open, found := find(spec.Design)
	if !found {
		return fmt.Errorf("unknown design %q", spec.Design)
	}
	design, err := open(ctx, spec.Backend)
	if err != nil {
		return fmt.Errorf("open %s: %w", spec.Design, err)
	}
	if err := design.Prepare(ctx, spec.Sale, spec.Stock); err != nil {
		return fmt.Errorf("prepare the sale for %s: %w", spec.Design, err)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", spec.Addr)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, announce(listener))
	return serve(ctx, listener, design, spec)
}

// serve answers buyers until ctx is done or the design fails. The background work of the design is stopped
// after the last answer, so that it can finish accepted orders.
func serve(ctx context.Context, listener net.Listener, design Design, spec Spec) error {
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	worked := make(chan error, 1)
	go func() { worked <- design.Run(background) }()

	server := newServer(design, spec.Sale)
	var served <-chan error
	shutdown := server.Shutdown
	if spec.Backend.Options[PlainReader] == "on" {
		connections := accept.New(listener, 0)
		served = accept.Serve(background, server, connections, plainReader(design, spec.Sale))
		shutdown = func(ctx context.Context) error {
			return errors.Join(connections.Drain(ctx), server.Shutdown(ctx))
		}
	} else {
		ended := make(chan error, 1)
		go func() { ended <- server.Serve(listener); close(ended) }()
		served = ended
	}

	var failed error
	select {
	case err := <-worked:
		worked <- err
		failed = errors.New("the design's background work ended early")
	case failed = <-served:
	case <-ctx.Done():
	}
	draining, cancel := context.WithTimeout(background, drainTimeout)
	defer cancel()
	unfinished := shutdown(draining)
	if unfinished != nil {
		_ = server.Close()
	}
	stop()
	if failed == nil {
		failed = ignore(ignore(<-served, http.ErrServerClosed), net.ErrClosed)
	}
	return errors.Join(failed, unfinished, ignore(<-worked, context.Canceled))
}

// ignore returns err unless it is the expected one.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}
