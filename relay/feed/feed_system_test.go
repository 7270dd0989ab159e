//go:build system

package feed_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testkit"
	"stampede/relay/feed"
	"stampede/sql/migrate"
)

// Random writers with several orders each, of which some roll back, some use savepoints and some take long, while
// readers read all the time: each reader sees each committed event once, in the order of positions.
func TestReaderSkipsNothingUnderRandomWriters(t *testing.T) {
	t.Parallel()
	pool := testkit.Pool(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const writers, transactions, readers = 6, 60, 3
	committed := make(chan string, writers*transactions*8)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var writing, reading errgroup.Group
	for w := range writers {
		random := rand.New(rand.NewPCG(seed, uint64(w)))
		writing.Go(func() error {
			for range transactions {
				if err := writeRandomly(ctx, pool, random, committed); err != nil {
					return err
				}
			}
			return nil
		})
	}
	done := make(chan struct{})
	seen, naive := make([][]string, readers), 0
	for i := range readers {
		r := feed.NewReader(session(t, pool), "/test")
		reading.Go(func() (err error) { seen[i], err = readAll(ctx, r, done); return err })
	}
	reading.Go(func() (err error) { naive, err = readNaively(ctx, pool, done); return err })
	require.NoError(t, writing.Wait())
	close(done)
	require.NoError(t, reading.Wait())
	close(committed)
	var want []string
	for id := range committed {
		want = append(want, id)
	}
	t.Logf("%d events; the naive cursor saw %d", len(want), naive)
	require.Less(t, naive, len(want), "the test does not provoke what it is about")
	for i := range readers {
		require.ElementsMatch(t, want, seen[i])
		require.Equal(t, seen[0], seen[i], "all readers see the same order")
	}
}

func writeRandomly(ctx context.Context, pool *pgxpool.Pool, random *rand.Rand, committed chan<- string) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	var ids []string
	for range 1 + random.IntN(4) {
		order := uuid.Must(uuid.NewV7())
		inner, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		for version := 2; version <= 2+random.IntN(2); version++ {
			if _, err := insert(ctx, inner, order, version); err != nil {
				return err
			}
			if random.IntN(3) == 0 {
				<-time.After(time.Duration(random.IntN(20)) * time.Millisecond)
			}
			ids = append(ids, order.String()+"."+strconv.Itoa(version))
		}
		if random.IntN(5) == 0 {
			ids = slices.DeleteFunc(ids, func(id string) bool { return id[:36] == order.String() })
			err = inner.Rollback(ctx)
		} else {
			err = inner.Commit(ctx)
		}
		if err != nil {
			return err
		}
	}
	if random.IntN(4) == 0 {
		return nil // the rollback
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	for _, id := range ids {
		committed <- id
	}
	return nil
}

func readAll(ctx context.Context, r *feed.Reader, done <-chan struct{}) (ids []string, err error) {
	var after int64
	for last := false; ; {
		select {
		case <-done:
			last = true
		default:
		}
		s, err := r.Look(ctx, "")
		if err != nil {
			return nil, err
		}
		for after < s.Settled {
			events, through, err := r.Read(ctx, after, 7)
			if err != nil {
				return nil, err
			}
			for _, e := range events {
				ids = append(ids, e.ID)
			}
			after = through
		}
		if last && s.Settled == s.Newest {
			return ids, nil
		}
	}
}

func readNaively(ctx context.Context, pool *pgxpool.Pool, done <-chan struct{}) (seen int, err error) {
	var after int64
	for last := false; ; {
		select {
		case <-done:
			last = true
		default:
		}
		var n int
		var highest *int64
		if err := pool.QueryRow(ctx, "SELECT count(*), max(position) FROM order_events WHERE position > $1", after).
			Scan(&n, &highest); err != nil {
			return 0, err
		}
		seen += n
		if highest != nil {
			after = *highest
		}
		if last {
			return seen, nil
		}
	}
}

// A prepared transaction keeps its name in pg_locks, and has no process.
func TestPreparedTransactionHoldsReader(t *testing.T) {
	t.Parallel()
	server := testkit.OwnPostgres(t)
	admin, err := pgxpool.New(t.Context(), server.URL)
	require.NoError(t, err)
	t.Cleanup(admin.Close)
	_, err = admin.Exec(t.Context(), "ALTER SYSTEM SET max_prepared_transactions = 4")
	require.NoError(t, err)
	require.NoError(t, server.Restart(t.Context()))
	admin.Reset()
	require.NoError(t, migrate.Up(t.Context(), server.URL))

	r := feed.NewReader(session(t, admin), "/test")
	conn := session(t, admin)
	exec := func(statement string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	exec("BEGIN")
	exec(`INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
		SELECT id, 2, 'OrderConfirmed', id, 'ann', 1, now() FROM first_sale(date_trunc('month', now() AT TIME ZONE 'UTC')) AS id`)
	require.Zero(t, look(t, r).Settled)
	exec("PREPARE TRANSACTION 'two'")
	tx := begin(t, admin)
	position, err := insert(t.Context(), tx, uuid.Must(uuid.NewV7()), 2)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	s := look(t, r)
	require.Zero(t, s.Settled)
	require.Zero(t, look(t, feed.NewReader(session(t, admin), "/test")).Settled, "one that begins now")
	exec("COMMIT PREPARED 'two'")
	require.Equal(t, position, look(t, r).Settled)
	ids, _ := idsFrom(t, r, 0)
	require.Len(t, ids, 2)
}
