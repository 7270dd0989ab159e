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
	"stampede/internal/test/testsale"
	"stampede/reservation"
)

// guarded runs a guard of the shop's store until the test ends.
func guarded(s *testsale.Shop) *testsale.Shop {
	s.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	guard := reservation.Guard{Store: s.Store, Pool: s.Pool, Logger: testkit.Logger(s.T)}
	go func() { ended <- guard.Run(ctx) }()
	s.T.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.T.Errorf("guard: %v", err)
		}
	})
	return s
}

// awaitRefusal waits until the store refuses the sale.
func awaitRefusal(s *testsale.Shop, sale uuid.UUID) {
	s.T.Helper()
	testkit.Eventually(s.T, 30*time.Second, "the guard refuses", func() bool {
		_, err := s.Reserve(s.T.Context(), reservation.Request{Sale: sale, User: uuid.NewString(), Quantity: 1})
		if err != nil {
			require.ErrorIs(s.T, err, reservation.ErrUnavailable)
		}
		return err != nil
	})
}

// The ingress has sold in the new epoch, and then reaches the old primary.
func TestIngressRefusesOlderEpoch(t *testing.T) {
	t.Parallel()
	h := newReplicaPair(t)
	s := testsale.NewShopOn(t, h.client(), testkit.Keys(t), reservation.StoreOptions{})
	sale := s.Sale(100)
	s.Buy(sale.ID, "ann")
	h.catchUp(h.atSecond, h.atFirst)
	h.promote(h.atSecond)
	h.move(h.atFirst, h.atSecond)
	rebuild(s, sale.Sale, 2)
	testkit.VerifyServer(t, s.Pool, s.Store, 0)
	require.EqualValues(t, 2, s.Buy(sale.ID, "bob").Reservation.Epoch)

	resetStats(t, h.atFirst)
	h.move(h.atSecond, h.atFirst)
	refuses(s, sale.ID, "eve")
	refuses(s, sale.ID, "bob")
	require.Equal(t, "nothing", appended(t, h.atFirst))
	h.move(h.atFirst, h.atSecond)
	require.Equal(t, reservation.AlreadyPurchased, s.Buy(sale.ID, "bob").Verdict)
}

func TestGuardResumesServerNamedByPostgres(t *testing.T) {
	t.Parallel()
	s := guarded(testsale.NewShop(t))
	sale := s.Sale(100).ID
	s.Buy(sale, "ann")
	state, err := s.Inspect(t.Context(), 0)
	require.NoError(t, err)
	name := func(runID string) {
		_, err := s.Pool.Exec(t.Context(), "UPDATE redis_servers SET run_id = $1", runID)
		require.NoError(t, err)
	}
	name("another")
	awaitRefusal(s, sale)
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
	s, sale := testsale.SoldOutShop(t)
	guarded(s)
	_, err := s.Pool.Exec(t.Context(), "UPDATE redis_servers SET run_id = 'another'")
	require.NoError(t, err)
	awaitRefusal(s, sale)
	refuses(s, sale, "loser")
}

// Without Postgres the guard cannot compare the servers, and refuses nothing.
func TestGuardKeepsSellingWithoutPostgres(t *testing.T) {
	t.Parallel()
	s := testsale.NewShop(t)
	sale := s.Sale(1000).ID
	s.Buy(sale, "ann")
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
	require.Equal(t, reservation.Reserved, s.Buy(sale, "bob").Verdict)
	_, err = s.Pool.Exec(t.Context(), "ALTER TABLE away RENAME TO redis_servers")
	require.NoError(t, err)
	awaitRefusal(s, sale)
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
