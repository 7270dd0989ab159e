package testwork

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation"
)

// PublishingLedger returns a ledger and its outcomes, which are published after a call of run, until stop.
func PublishingLedger(
	t testing.TB, pool *pgxpool.Pool, rdb redis.UniversalClient, keys reservation.Keys,
) (l *ledger.Ledger, o *ledger.Outcomes, run func() (stop func())) {
	t.Helper()
	o, err := ledger.NewOutcomes(ledger.OutcomesConfig{
		Client: rdb, Keys: keys, Logger: testkit.Logger(t),
		Registerer: prometheus.NewRegistry(),
	})
	require.NoError(t, err)
	return ledger.New(pool).WithOutcomes(o), o, func() func() {
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { o.Run(ctx) })
		stop := sync.OnceFunc(func() { cancel(); running.Wait() })
		t.Cleanup(stop)
		return stop
	}
}
