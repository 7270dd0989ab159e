package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/mattn/go-isatty"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"stampede/dashboard"
	"stampede/dashboard/fleet"
	"stampede/internal/connect"
	"stampede/internal/forwarded"
	"stampede/internal/operators"
	"stampede/internal/telemetry"
)

// dashboardPostgresConns are those of the fleet, three for a reconcile, and those of the pages.
const dashboardPostgresConns = fleetPostgresConns + 6

type dashboardCmd struct {
	storesFlags
	scrapeFlags
	Addr           string            `env:"STAMPEDE_DASHBOARD_ADDR" default:"127.0.0.1:8090" type:"addr" placeholder:"HOST:PORT" help:"Address to listen on (${default}). Behind a proxy with TLS only."`
	AdminToken     string            `placeholder:"TOKEN" help:"Token of the operator admin, who may do everything; without it and without --operators-file nobody can log in."`
	OperatorsFile  string            `placeholder:"FILE" help:"Further operators, one a line: name, role (viewer, cashier, operator or admin), SHA-256 of the token in hex. Changes are in force within ten seconds, and end the sessions of who lost a role."`
	TrustedProxies forwarded.Proxies `placeholder:"PREFIXES" help:"Proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted, such as 10.0.0.0/8,192.0.2.1."`
}

// Validate is called by kong.
func (c *dashboardCmd) Validate() error { return c.keysFlags.Validate() }

func (c *dashboardCmd) Run(ctx context.Context, logger *slog.Logger) error {
	b, err := c.openDashboard(ctx, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := checkSchema(ctx, b.pool, logger); err != nil {
		return err
	}
	run, err := newDashboard(b, c.scrapeFlags, operators.Config{
		File: c.OperatorsFile, AdminToken: c.AdminToken, Logger: logger,
	}, c.TrustedProxies, logger)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Addr)
	if err != nil {
		return listenError(err, "STAMPEDE_DASHBOARD_ADDR", "--addr")
	}
	logger.Info("dashboard listens", "addr", listener.Addr().String(), "watches", len(c.Scrape))
	return run(ctx, listener)
}

func (f storesFlags) openDashboard(ctx context.Context, logger *slog.Logger) (*backend, error) {
	return f.open(ctx, dashboardPostgresConns, logger, connect.Named("dashboard"))
}

// newDashboard returns the function that runs a dashboard, with its fleet and its operators, until its context ends.
func newDashboard(
	b *backend, watched scrapeFlags, who operators.Config, trusted forwarded.Proxies, logger *slog.Logger,
) (run func(context.Context, net.Listener) error, err error) {
	metrics := telemetry.NewRegistry()
	who.Registerer = metrics
	registry, err := operators.New(who)
	if err != nil {
		return nil, err
	}
	seen, err := watched.fleet(b, logger)
	if err != nil {
		return nil, err
	}
	pages, err := dashboard.New(dashboard.Config{
		Fleet: seen, Catalog: b.catalog,
		Operators: registry, TrustedProxies: trusted, Metrics: metrics, Logger: logger,
	})
	if err != nil {
		return nil, err
	}
	watchClock, err := watchClock(metrics, b.pool)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, listener net.Listener) error {
		running, ctx := errgroup.WithContext(ctx)
		running.Go(func() error { watchClock(ctx); return nil })
		running.Go(func() error { registry.Run(ctx); return nil })
		running.Go(func() error { return seen.Run(ctx) })
		running.Go(func() error { return pages.Serve(ctx, listener) })
		return running.Wait()
	}, nil
}

// localDashboard listens for the dashboard of stampede dev: on the address, or without one on the usual port, or
// another if that is in use.
func localDashboard(ctx context.Context, addr string) (net.Listener, error) {
	const usual, free = "127.0.0.1:8090", "127.0.0.1:0"
	var config net.ListenConfig
	if addr != "" {
		listener, err := config.Listen(ctx, "tcp", addr)
		return listener, listenError(err, "STAMPEDE_DASHBOARD_ADDR", "--dashboard-addr")
	}
	listener, err := config.Listen(ctx, "tcp", usual)
	if errors.Is(err, syscall.EADDRINUSE) {
		listener, err = config.Listen(ctx, "tcp", free)
	}
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	return listener, nil
}

// fleetPostgresConns is how many connections a fleet uses: one for the sales, one for the rest, which may be slower.
const fleetPostgresConns = 2

// scrapeFlags name the processes that a fleet watches.
type scrapeFlags struct {
	Scrape []string `env:"STAMPEDE_SCRAPE" placeholder:"URL,…" help:"Metrics of the ingresses, workers and relays to watch, such as http://10.0.0.7:9090/metrics. With dns+http://worker:9090/metrics each address of the name is a process. Without any, only Redis and Postgres are watched."`
}

// fleet returns a fleet that watches the processes and the servers of b.
func (f scrapeFlags) fleet(b *backend, logger *slog.Logger) (*fleet.Fleet, error) {
	watched, err := fleet.New(fleet.Config{
		Catalog: b.catalog, Targets: f.Scrape, Logger: logger,
	})
	if err != nil {
		return nil, &usageError{fmt.Errorf("--scrape: %w", err)}
	}
	return watched, nil
}

type topCmd struct {
	storesFlags
	scrapeFlags
	readOnly
	outputFlag
	Once bool `env:"STAMPEDE_TOP_ONCE" help:"Print one snapshot and end. This is also what happens if standard output is no terminal."`
}

const (
	// onceNumber is the first snapshot that --once prints: rates need two scrapes, and the look at the orders follows that
	// at the sales.
	onceNumber = 3
	// onceWait bounds the wait for what a later one will tell, such as an ingress that has not been ready for long enough.
	// onceRatesWait bounds that for rates: where processes share an address, they stay unknown.
	onceWait, onceRatesWait = 40 * time.Second, 10 * time.Second
)

// The control sequences of the terminal.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l" // the alternate screen, without a cursor
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	goHome      = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// errNothingSeen ends a command that could look at nothing.
var errNothingSeen = errors.New("neither Redis nor Postgres nor any process answers")

// Run shows the installation until it is interrupted.
func (c *topCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	screen, live := s.out.(*os.File)
	live = live && !c.Once && !c.json() && isatty.IsTerminal(screen.Fd())
	if live && isTerminal(s.err) {
		logger = slog.New(slog.DiscardHandler) // it would be written across the screen
		slog.SetDefault(logger)
	}
	b, err := c.open(ctx, fleetPostgresConns, logger, connect.Service("top"))
	if err != nil {
		return err
	}
	defer b.Close()
	watched, err := c.fleet(b, logger)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return watched.Run(ctx) })
	running.Go(func() error {
		defer stop()
		if live {
			return c.live(ctx, screen, watched)
		}
		return c.once(ctx, s.out, watched)
	})
	return running.Wait()
}

// once prints a snapshot.
func (c *topCmd) once(ctx context.Context, w io.Writer, watched *fleet.Fleet) error {
	began := time.Now()
	limited, cancel := context.WithDeadline(ctx, began.Add(onceWait))
	defer cancel()
	snapshot, err := watched.Next(limited, onceNumber-1)
	for err == nil && (!snapshot.IsSettled(began.Add(onceWait)) ||
		!snapshot.IsMeasured() && snapshot.At.Sub(began) < onceRatesWait) {
		snapshot, err = watched.Next(limited, snapshot.Number)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		snapshot = watched.Snapshot()
	}
	if c.json() {
		err = writeJSON(w, snapshot)
	} else {
		_, err = io.WriteString(w, topView{width: cmp.Or(columns(), 100)}.text(snapshot))
	}
	if err == nil && !sees(snapshot) {
		err = unchecked(errNothingSeen)
	}
	return err
}

// live shows each snapshot in the place of the one before, until ctx is done.
func (c *topCmd) live(ctx context.Context, screen *os.File, watched *fleet.Fleet) (err error) {
	if _, err := screen.WriteString(enterScreen); err != nil {
		return err
	}
	defer func() {
		_, left := screen.WriteString(leaveScreen)
		err = errors.Join(err, left)
	}()
	shown, seen := uint64(0), false
	for {
		snapshot, err := watched.Next(ctx, shown)
		switch {
		case err != nil && shown > 0 && !seen:
			return unchecked(errNothingSeen)
		case err != nil:
			return nil //nolint:nilerr // the end of ctx is how it is stopped
		}
		shown, seen = snapshot.Number, seen || sees(snapshot)
		view := topView{width: 80, height: 24, color: os.Getenv("NO_COLOR") == "", live: true}
		if size, err := unix.IoctlGetWinsize(int(screen.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && size.Row > 0 {
			view.width, view.height = int(size.Col), int(size.Row)
		}
		if _, err := screen.WriteString(view.frame(snapshot)); err != nil {
			return err
		}
	}
}

// sees is true if anything has answered.
func sees(s *fleet.Snapshot) bool {
	for i := range s.Processes {
		if s.Processes[i].Up {
			return true
		}
	}
	return s.Postgres.Reachable || s.Redis.Reachable
}

// columns is the width that the environment asks for, 0 for none.
func columns() int {
	n, err := strconv.Atoi(os.Getenv("COLUMNS"))
	if err != nil || n < 0 {
		return 0
	}
	return n
}
