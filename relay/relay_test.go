package relay_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/connect"
	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/relay"
	"stampede/relay/target"
	"stampede/reservation"
	"stampede/sql"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

// command runs a relay, in a process that a test kills.
func command() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := runRelay(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runRelay(ctx context.Context) error {
	if err := crashpoint.Check(); err != nil {
		return err
	}
	pool, err := connect.Postgres(ctx, os.Getenv("DATABASE_URL"), target.Max)
	if err != nil {
		return err
	}
	defer pool.Close()
	rdb, err := connect.Control(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = rdb.Close() }()
	r, err := relay.New(relay.Config{
		Pool: pool, Redis: rdb, Keys: reservation.Keys{Prefix: os.Getenv("STAMPEDE_KEY_PREFIX")},
		Name: fmt.Sprint(os.Getpid()), Source: "/test", Scan: 50 * time.Millisecond, Lease: time.Second, Stdout: os.Stdout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func TestEachTargetGetsAllEvents(t *testing.T) {
	t.Parallel()
	b := setup(t)
	before := b.write(t, 20)
	one, two := newReceiver(t), newReceiver(t)
	b.add(t, "one", one.url)
	b.add(t, "two", two.url)
	stop := b.run(t, nil)
	after := b.write(t, 20)
	for name, r := range map[string]*receiver{"one": one, "two": two} {
		r.await(t, slices.Concat(before, after))
		b.rest(t, name)
		require.Zero(t, r.repeats())
	}
	stop()
	missed := b.write(t, 5)
	b.run(t, nil)
	one.await(t, slices.Concat(before, after, missed))
	require.Zero(t, one.repeats(), "a stop records what was delivered")
}

func TestSlowAndFailingReceiversHoldUpNoOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	good, slow, failing := newReceiver(t), newReceiver(t), newReceiver(t)
	hang := make(chan struct{})
	t.Cleanup(sync.OnceFunc(func() { close(hang) }))
	slow.respond(func(http.ResponseWriter, string) int { <-hang; return http.StatusNoContent })
	failing.respond(func(http.ResponseWriter, string) int { return http.StatusInternalServerError })
	b.add(t, "good", good.url)
	b.add(t, "slow", slow.url)
	b.add(t, "failing", failing.url)
	b.add(t, "dead", "http://127.0.0.1:1/")
	b.run(t, func(c *relay.Config) { c.DrainTimeout = time.Millisecond })
	events := b.write(t, 200)
	good.await(t, events)
	b.rest(t, "good")
	require.Zero(t, b.standing(t, "slow").Position)
	require.LessOrEqual(t, slow.asked(), 64, "in flight")
	for _, name := range []string{"failing", "dead"} {
		testkit.Eventually(t, within, "a noted failure", func() bool { return b.standing(t, name).Failures > 1 })
		s := b.standing(t, name)
		require.Zero(t, s.Position)
		require.NotEmpty(t, s.LastError)
		require.Positive(t, s.Waiting(time.Now()))
	}
	require.Contains(t, b.standing(t, "failing").LastError, "500 Internal Server Error")
	require.LessOrEqual(t, failing.asked(), 64+20, "one event is tried until it succeeds")
}

// An event that fails stops its target. When it succeeds the others follow, and those that were delivered before are
// not sent again.
func TestFailureStopsTargetAtItsEvent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	events := b.write(t, 30)
	r := newReceiver(t)
	var failing atomic.Bool
	failing.Store(true)
	bad := events[2]
	r.respond(func(_ http.ResponseWriter, id string) int {
		if id == bad && failing.Load() {
			return http.StatusBadGateway
		}
		return http.StatusNoContent
	})
	b.add(t, "shop", r.url)
	b.run(t, nil)
	testkit.Eventually(t, within, "failures", func() bool { return b.standing(t, "shop").Failures >= 3 })
	require.EqualValues(t, 2, b.standing(t, "shop").Position, "all events before it are delivered")
	require.NotContains(t, r.got(), events[3], "the next version of its order")
	failing.Store(false)
	r.await(t, events)
	b.rest(t, "shop")
	require.Zero(t, r.repeats())
	require.Zero(t, b.standing(t, "shop").Failures)
}

// A position that several events have, from archives of other databases, is passed when all of them are delivered.
func TestPositionOfTwoEventsIsNotPassedByOne(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, position := range []int{1, 2, 2} {
		_, err := b.pool.Exec(t.Context(), `INSERT INTO order_events
			(position, order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at)
			OVERRIDING SYSTEM VALUE
			SELECT $1, $2, 2, 'OrderConfirmed', $2, 'ann', 1, now(), now() WHERE next_position() > 0`,
			position, uuid.Must(uuid.NewV7()))
		require.NoError(t, err)
	}
	rows, _ := b.pool.Query(t.Context(), sql.RelayReadOrders, 0, 2, 3) // its error comes with the rows
	events, err := pgx.CollectRows(rows, pgx.RowToMap)
	require.NoError(t, err)
	last := uuid.UUID(events[2]["order_id"].([16]byte)).String() + ".2"
	r := newReceiver(t)
	r.respond(func(_ http.ResponseWriter, id string) int {
		if id == last {
			testkit.Eventually(t, within, "the others are delivered", func() bool { return len(r.got()) == 2 })
			return http.StatusBadGateway
		}
		return http.StatusNoContent
	})
	b.add(t, "shop", r.url)
	b.run(t, nil)
	testkit.Eventually(t, within, "a noted failure", func() bool { return b.standing(t, "shop").Failures > 0 })
	require.EqualValues(t, 1, b.standing(t, "shop").Position)
	r.respond(nil)
	b.rest(t, "shop")
	require.Contains(t, r.got(), last)
}

func TestGoneDisablesTarget(t *testing.T) {
	t.Parallel()
	b := setup(t)
	events := b.write(t, 3)
	r := newReceiver(t)
	r.respond(func(http.ResponseWriter, string) int { return http.StatusGone })
	b.add(t, "shop", r.url)
	b.run(t, nil)
	testkit.Eventually(t, within, "disabled", func() bool { return b.standing(t, "shop").State == target.Disabled })
	require.Contains(t, b.standing(t, "shop").LastError, "410 Gone")
	asked := r.asked()
	more := b.write(t, 3)
	require.Equal(t, asked, r.asked())
	r.respond(nil)
	require.NoError(t, b.targets.SetState(t.Context(), "shop", target.Active))
	r.await(t, slices.Concat(events, more))
}

func TestRetryAfterIsObeyed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.write(t, 1)
	r := newReceiver(t)
	r.respond(func(w http.ResponseWriter, _ string) int {
		w.Header().Set("Retry-After", "3600")
		return http.StatusServiceUnavailable
	})
	b.add(t, "shop", r.url)
	stop := b.run(t, nil)
	testkit.Eventually(t, within, "a noted failure", func() bool { return b.standing(t, "shop").Failures == 1 })
	wait := time.Until(time.Time(b.standing(t, "shop").RetryAt))
	require.Greater(t, wait, 50*time.Minute)
	require.LessOrEqual(t, wait, time.Hour)
	// The next process waits as well, until an operator resumes the target.
	stop()
	before := b.standing(t, "shop").Fence
	b.run(t, nil)
	testkit.Eventually(t, within, "a claim", func() bool { return b.standing(t, "shop").Fence != before })
	require.Equal(t, 1, r.asked())
	r.respond(nil)
	require.NoError(t, b.targets.SetState(t.Context(), "shop", target.Active))
	b.rest(t, "shop")
}

func TestOperatorsChangesTakeEffect(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := newReceiver(t)
	b.add(t, "shop", r.url)
	b.run(t, nil)
	events := b.write(t, 5)
	r.await(t, events)
	b.rest(t, "shop")
	require.NoError(t, b.targets.SetState(t.Context(), "shop", target.Paused))
	asked := r.asked()
	paused := b.write(t, 4)
	require.NoError(t, b.targets.SetState(t.Context(), "shop", target.Active))
	r.await(t, slices.Concat(events, paused))
	b.rest(t, "shop")
	require.Equal(t, asked+len(paused), r.asked())

	_, err := b.pool.Exec(t.Context(), "INSERT INTO sales (id, name, stock) VALUES ($1, 'autumn', 1)", events[4][:36])
	require.NoError(t, err)
	position, err := target.PositionAt(t.Context(), b.pool, events[4])
	require.NoError(t, err)
	_, err = b.targets.SetPosition(t.Context(), "shop", position)
	require.NoError(t, err)
	again := len(events) + len(paused) - int(position)
	testkit.Eventually(t, within, "repeats", func() bool { return r.repeats() == again })
	b.rest(t, "shop")

	require.NoError(t, b.targets.Remove(t.Context(), "shop"))
	b.write(t, 1)
	other := newReceiver(t)
	b.add(t, "other", other.url)
	b.rest(t, "other")
	require.Len(t, r.got(), len(events)+len(paused))
}

// New secrets are used for the next event, without a restart.
func TestSecretsAreReplacedWhileRunning(t *testing.T) {
	t.Parallel()
	b := setup(t)
	signatures := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		signatures <- r.Header.Get("webhook-signature")
		w.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(server.Close)
	b.add(t, "shop", server.URL)
	b.run(t, nil)
	to, err := target.ParseAddress(server.URL)
	require.NoError(t, err)
	testkit.Eventually(t, within, "a claim", func() bool { return b.standing(t, "shop").Fence != 0 })
	for secrets, list := range [][][]byte{{secret}, {[]byte("another secret of 24 byte"), secret}} {
		before := b.standing(t, "shop").Fence
		require.NoError(t, b.targets.Renew(t.Context(), "shop", to, list, true))
		testkit.Eventually(t, within, "another claim", func() bool {
			fence := b.standing(t, "shop").Fence
			return fence != before && fence != before+1
		})
		ids, err := writeTogether(t.Context(), b.pool, 1, 0, true)
		require.NoError(t, err)
		b.rest(t, "shop")
		for range ids {
			require.Len(t, strings.Fields(<-signatures), secrets+1)
		}
	}
}

// A process that was replaced cannot move the position, whatever it has delivered.
func TestStaleHolderCannotMovePosition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.add(t, "shop", "http://127.0.0.1:1/")
	b.write(t, 5)
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	old, err := target.Claim(t.Context(), conn.Conn(), "shop", "old")
	require.NoError(t, err)
	require.NoError(t, old.Move(t.Context(), conn.Conn(), 2, true))
	fresh, err := target.Claim(t.Context(), conn.Conn(), "shop", "new")
	require.NoError(t, err)
	require.EqualValues(t, 2, fresh.Position)
	require.ErrorIs(t, old.Move(t.Context(), conn.Conn(), 9, true), target.ErrStale)
	require.ErrorIs(t, old.NoteFailure(t.Context(), conn.Conn(), 9, http.ErrAbortHandler, time.Hour, true),
		target.ErrStale)
	s := b.standing(t, "shop")
	require.EqualValues(t, 2, s.Position)
	require.Equal(t, "new", s.Holder)
	require.Equal(t, target.Active, s.State)
	_, err = b.targets.SetPosition(t.Context(), "shop", 0)
	require.NoError(t, err)
	require.ErrorIs(t, fresh.Move(t.Context(), conn.Conn(), 3, true), target.ErrStale, "an operator replays")
}

// Two relays in one process, with random transactions that overtake each other.
func TestTwoRelaysShareTargets(t *testing.T) {
	t.Parallel()
	b := setup(t)
	receivers := map[string]*receiver{"one": newReceiver(t), "two": newReceiver(t), "three": newReceiver(t)}
	for name, r := range receivers {
		b.add(t, name, r.url)
	}
	stop := b.run(t, func(c *relay.Config) { c.Name = "first" })
	b.run(t, func(c *relay.Config) { c.Name = "second" })
	var mu sync.Mutex
	var events []string
	var writers errgroup.Group
	for range 4 {
		writers.Go(func() error {
			for range 20 {
				ids, err := writeTogether(context.Background(), b.pool, 1+rand.IntN(4),
					time.Duration(rand.IntN(30))*time.Millisecond, rand.IntN(4) > 0)
				if err != nil {
					return err
				}
				mu.Lock()
				events = append(events, ids...)
				mu.Unlock()
			}
			return nil
		})
	}
	testkit.Eventually(t, within, "some events", func() bool { return len(receivers["one"].got()) > 10 })
	stop()
	require.NoError(t, writers.Wait())
	for name, r := range receivers {
		r.await(t, events)
		b.rest(t, name)
		require.Equal(t, "second", b.standing(t, name).Holder)
	}
}
