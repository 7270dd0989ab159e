// Package crashpoint lets a test kill a process at the instant that matters: where the process
// passes a named point, it ends itself with SIGKILL, as a power switch would. Which point, and at
// which pass, is said by the environment: STAMPEDE_CRASH_AT=after-commit or after-commit:3. With
// STAMPEDE_FREEZE_AT the process is frozen there by SIGSTOP instead, until the test lets it go on.
package crashpoint

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// The points, in the order in which an order passes them.
const (
	// BeforePersist: a batch was read and is not yet in Postgres.
	BeforePersist = "before-persist"
	// AfterCommit: its transaction is committed, and nobody has been told.
	AfterCommit = "after-commit"
	// BeforeAck: all is done but the ack.
	BeforeAck = "before-ack"

	// BeforeExpire: overdue orders are locked, and nothing is written.
	BeforeExpire = "before-expire"
	// BeforeExpireCommit: their expiry is written, and not committed.
	BeforeExpireCommit = "before-expire-commit"
	// AfterExpire: it is committed, and Redis has not been told.
	AfterExpire = "after-expire"
	// BeforeRelease: releases were taken from their table, and Redis has not been told.
	BeforeRelease = "before-release"
	// AfterRelease: Redis has the units back, and that they were taken is not committed.
	AfterRelease = "after-release"
	// AfterReleaseCommit: that is committed.
	AfterReleaseCommit = "after-release-commit"

	// RebuildBegun: a rebuild has its lock, and knows the Redis server.
	RebuildBegun = "rebuild-begun"
	// RebuildDistrusted: nobody sells from the partition any more.
	RebuildDistrusted = "rebuild-distrusted"
	// RebuildClosed: the sales are closed in Redis.
	RebuildClosed = "rebuild-closed"
	// RebuildDrained: what was in the stream is in Postgres.
	RebuildDrained = "rebuild-drained"
	// RebuildRaised: the next epoch of a sale has begun in Postgres.
	RebuildRaised = "rebuild-raised"
	// RebuildStaging: some of its buyers are on their way to Redis.
	RebuildStaging = "rebuild-staging"
	// RebuildStaged: all of them are there, and the sale is still closed.
	RebuildStaged = "rebuild-staged"
	// RebuildOpened: it is open, as far as its server is verified.
	RebuildOpened = "rebuild-opened"
	// RebuildPublished: and Postgres knows that Redis knows.
	RebuildPublished = "rebuild-published"
	// RebuildServerSaved: Postgres names the server, and Redis does not know it yet.
	RebuildServerSaved = "rebuild-server-saved"
	// RebuildVerified: the server is verified, and sales that are over are still closed.
	RebuildVerified = "rebuild-verified"

	// ProjectionsWatch: a rebuild of the projections has changes of orders noted, and has nothing else yet.
	ProjectionsWatch = "projections-watch"
	// ProjectionsFilled: the new table has the rows of the log as it was, and nothing but its rows.
	ProjectionsFilled = "projections-filled"
	// ProjectionsBuilt: it lacks only what has changed since.
	ProjectionsBuilt = "projections-built"
	// ProjectionsSwap: it is in place, and that is not committed.
	ProjectionsSwap = "projections-swap"
	// ProjectionsSwapped: that is committed, and the old table is still there.
	ProjectionsSwapped = "projections-swapped"
)

const (
	// Env is the variable that arms a point.
	Env = "STAMPEDE_CRASH_AT"
	// FreezeEnv arms a point at which the process is frozen.
	FreezeEnv = "STAMPEDE_FREEZE_AT"
)

var names = []string{
	BeforePersist, AfterCommit, BeforeAck,
	BeforeExpire, BeforeExpireCommit, AfterExpire, BeforeRelease, AfterRelease, AfterReleaseCommit,
	RebuildBegun, RebuildDistrusted, RebuildClosed, RebuildDrained, RebuildRaised, RebuildStaging, RebuildStaged,
	RebuildOpened, RebuildPublished, RebuildServerSaved, RebuildVerified,
	ProjectionsWatch, ProjectionsFilled, ProjectionsBuilt, ProjectionsSwap, ProjectionsSwapped,
}

// These are nil in every process but those of crash tests; they are set once, before main.
var (
	armed, armErr       = parse(Env)
	freezing, freezeErr = parse(FreezeEnv)
)

type point struct {
	name string
	// left is how many passes are left; the one that makes it 0 kills.
	left atomic.Int64
}

// Hit kills or freezes the process if the point is the armed one and this is the pass that was asked
// for. It costs two loads where nothing is armed.
func Hit(name string) {
	if freezing.reached(name) {
		goOn := make(chan os.Signal, 1)
		signal.Notify(goOn, syscall.SIGCONT)
		fmt.Fprintln(os.Stderr, "frozen at "+name)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-goOn // the signal may take an instant, in which nothing more may happen here
		signal.Stop(goOn)
	}
	if armed.reached(name) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal may take an instant, in which nothing more may happen
	}
}

func (p *point) reached(name string) bool {
	return p != nil && p.name == name && p.left.Add(-1) == 0
}

// Check returns an error for a setting that names no point: a crash test that never crashes would
// pass without having tested anything.
func Check() error { return errors.Join(armErr, freezeErr) }

func parse(variable string) (*point, error) {
	setting := os.Getenv(variable)
	if setting == "" {
		return nil, nil
	}
	name, pass, counted := strings.Cut(setting, ":")
	n := int64(1)
	if counted {
		var err error
		if n, err = strconv.ParseInt(pass, 10, 64); err != nil || n < 1 {
			return nil, fmt.Errorf("%s=%q: the pass must be a whole number from 1", variable, setting)
		}
	}
	if !slices.Contains(names, name) {
		return nil, fmt.Errorf("%s=%q: the points are %s", variable, setting, strings.Join(names, ", "))
	}
	p := &point{name: name}
	p.left.Store(n)
	return p, nil
}
