package reservation_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// guarded runs a guard of the shop's store until the test ends.
func guarded(t testing.TB, s *testshop.Shop) *testshop.Shop {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: testkit.Logger(t)}
	go func() { ended <- guard.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("guard: %v", err)
		}
	})
	return s
}

// awaitRefusal waits until the store refuses the sale.
func awaitRefusal(t testing.TB, s *testshop.Shop, sale uuid.UUID) {
	t.Helper()
	testkit.Eventually(t, 30*time.Second, "the guard refuses", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: uuid.NewString(), Quantity: 1})
		if err != nil {
			require.ErrorIs(t, err, reservation.ErrUnavailable)
		}
		return err != nil
	})
}

// The ingress has sold in the new epoch, and then reaches the old primary.
func TestIngressRefusesOlderEpoch(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: h.client()})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "ann")
	h.catchUp(h.atSecond, h.atFirst)
	h.promote(h.atSecond)
	h.move(h.atFirst, h.atSecond)
	rebuild(t, s, sale.Sale, 2)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	require.EqualValues(t, 2, s.Ask(t, sale.ID, "bob").Reservation.Epoch)

	resetStats(t, h.atFirst)
	h.move(h.atSecond, h.atFirst)
	refuses(t, s, sale.ID, "eve")
	refuses(t, s, sale.ID, "bob")
	require.Equal(t, "nothing", appended(t, h.atFirst))
	h.move(h.atFirst, h.atSecond)
	require.Equal(t, reservation.AlreadyPurchased, s.Ask(t, sale.ID, "bob").Verdict)
}

func TestGuardResumesServerNamedByPostgres(t *testing.T) {
	t.Parallel()
	s := guarded(t, testshop.NewShop(t))
	sale := s.Sale(t, 100).ID
	s.Buy(t, sale, "ann")
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	name := func(runID string) {
		_, err := s.Pool.Exec(t.Context(), "UPDATE redis_servers SET run_id = $1", runID)
		require.NoError(t, err)
	}
	name("another")
	awaitRefusal(t, s, sale)
	name(state.RunID)
	testkit.Eventually(t, 30*time.Second, "the sale resumes", func() bool {
		_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale, User: "bob", Quantity: 1})
		return err == nil
	})
}

// records is a slog.Handler that passes on all records of level Info and above.
type records chan slog.Record

func (r records) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (r records) WithAttrs([]slog.Attr) slog.Handler { return r }

func (r records) WithGroup(string) slog.Handler { return r }

func (r records) Handle(_ context.Context, record slog.Record) error {
	r <- record
	return nil
}

func (r records) next(t *testing.T) slog.Record {
	t.Helper()
	select {
	case record := <-r:
		return record
	case <-time.After(30 * time.Second):
		t.Fatal("nothing was logged")
		return slog.Record{}
	}
}

// The server recorded in Postgres may have units left.
func TestGuardRefusalIsNotSoldOut(t *testing.T) {
	t.Parallel()
	s, sale := testshop.SoldOutShop(t)
	guarded(t, s)
	_, err := s.Pool.Exec(t.Context(), "UPDATE redis_servers SET run_id = 'another'")
	require.NoError(t, err)
	awaitRefusal(t, s, sale)
	refuses(t, s, sale, "loser")
}

// Without Postgres the guard cannot compare the servers, and refuses nothing.
func TestGuardKeepsSellingWithoutPostgres(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	sale := s.Sale(t, 1000).ID
	s.Buy(t, sale, "ann")
	_, err := s.Pool.Exec(t.Context(), "ALTER TABLE redis_servers RENAME TO away")
	require.NoError(t, err)
	_, err = s.Pool.Exec(t.Context(), "UPDATE away SET run_id = 'another'")
	require.NoError(t, err)

	var warned sync.WaitGroup
	warned.Add(1)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: onFirstWarning(warned.Done)}
	go func() { ended <- guard.Run(ctx) }()
	warned.Wait()
	s.Buy(t, sale, "bob")
	_, err = s.Pool.Exec(t.Context(), "ALTER TABLE away RENAME TO redis_servers")
	require.NoError(t, err)
	awaitRefusal(t, s, sale)
	cancel()
	require.NoError(t, <-ended)
}

// onFirstWarning makes a logger that calls f at its first warning.
func onFirstWarning(f func()) *slog.Logger {
	once := sync.OnceFunc(f)
	return slog.New(slog.NewTextHandler(warningWriter(func(line string) {
		if strings.Contains(line, "level=WARN") {
			once()
		}
	}), nil))
}

type warningWriter func(line string)

func (w warningWriter) Write(line []byte) (int, error) {
	w(string(line))
	return len(line), nil
}
