package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strconv"
	"time"

	"github.com/mattn/go-isatty"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"stampede/dashboard/fleet"
	"stampede/internal/connect"
)

type topCmd struct {
	storesFlags
	scrapeFlags
	look
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
