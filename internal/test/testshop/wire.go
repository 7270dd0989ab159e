package testshop

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
)

// Fate is what happens to a call of a script.
type Fate int

const (
	Passes     Fate = iota
	Lost            // it does not leave
	Unanswered      // its answer is lost
	Late            // it takes a few milliseconds
)

var errWire = errors.New("the connection is gone")

// Wire is the network between an ingress and Redis, for the scripts that change a sale or count its shards.
type Wire struct {
	mu    sync.Mutex
	next  func() Fate // nil if all pass
	calls [][]any     // the arguments of all calls, also of lost ones: any of them may arrive late
}

// Wired returns a client of the server at the URL, and its wire.
func Wired(t testing.TB, url string) (*redis.Client, *Wire) {
	t.Helper()
	rdb, w := testkit.Client(t, url), &Wire{}
	rdb.AddHook(testkit.Hook(w.process))
	return rdb, w
}

func (w *Wire) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	args := cmd.Args()
	if cmd.Name() != "evalsha" || strings.HasSuffix(args[3].(string), ":server") {
		return next(ctx, cmd)
	}
	switch w.send(args) {
	case Lost:
		cmd.SetErr(errWire)
		return errWire
	case Unanswered:
		_ = next(ctx, cmd)
		cmd.SetErr(errWire)
		return errWire
	case Late:
		retry.Pause(time.Duration(rand.IntN(int(3*time.Millisecond))), ctx.Done())
	}
	return next(ctx, cmd)
}

func (w *Wire) send(args []any) Fate {
	w.mu.Lock()
	defer w.mu.Unlock()
	call := slices.Clone(args)
	for i, arg := range call {
		if text, ok := arg.(*string); ok { // of a call that is used again
			call[i] = *text
		}
	}
	w.calls = append(w.calls, call)
	if w.next == nil {
		return Passes
	}
	return w.next()
}

// Set sets the fate of the next calls.
func (w *Wire) Set(next func() Fate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = next
}

// Calls returns all calls so far.
func (w *Wire) Calls() [][]any {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls)
}

// KilledAfter is the fate of the calls of a process that is killed after n of them.
func KilledAfter(n int) func() Fate {
	return func() Fate {
		if n--; n >= 0 {
			return Passes
		}
		return Lost
	}
}

// Losing is the fate of the calls if these are lost, or their answers, in turns.
func Losing(which ...int) func() Fate {
	call := 0
	return func() Fate {
		call++
		switch at := slices.Index(which, call); {
		case at < 0:
			return Passes
		case at%2 == 0:
			return Unanswered
		default:
			return Lost
		}
	}
}

// Forget drops the calls of an earlier sale.
func (w *Wire) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls = nil
}

// Repeat sends a call late. It has no effect if Redis has dropped the script meanwhile.
func Repeat(t require.TestingT, rdb redis.UniversalClient, call []any) {
	if err := rdb.Do(context.Background(), call...).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
		require.NoError(t, err, "%v", call)
	}
}
