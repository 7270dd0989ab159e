package limits

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"
)

// riverConnections are River's own: to fetch, complete, listen and elect a leader.
const riverConnections = 4

// riverWorker writes one order per job.
type riverWorker struct {
	river.WorkerDefaults[job]
	consumer
}

// Work implements river.Worker.
func (w *riverWorker) Work(ctx context.Context, j *river.Job[job]) error {
	return w.record(ctx, j.Args.event())
}

// consumeRiver lets River fetch as fast as its settings allow. River marks jobs as completed in
// batches.
func consumeRiver(ctx context.Context, c consumer, ready func()) error {
	config, err := pgxpool.ParseConfig(c.DatabaseURL)
	if err != nil {
		return err
	}
	config.MaxConns = riverConnections
	own, err := pgxpool.NewWithConfig(ctx, config) // in a shared pool River would wait for the orders' transactions
	if err != nil {
		return err
	}
	defer own.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{consumer: c})
	client, err := river.NewClient(riverpgxv5.New(own), &river.Config{
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: c.Handlers}},
		FetchCooldown: time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
		Workers: workers, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	ready()
	<-ctx.Done()
	return ignoreCanceled(client.Stop(context.WithoutCancel(ctx)))
}

func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// migrateRiver makes River's tables in the database of the orders.
func migrateRiver(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	require.NoError(b, err)
	_, err = migrator.Migrate(b.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(b, err)
}

// fillRiver inserts one job per order.
func fillRiver(b *testing.B, pool *pgxpool.Pool, orders []job) {
	b.Helper()
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	require.NoError(b, err)
	const insertMax = 1000
	for len(orders) > 0 {
		n := min(len(orders), insertMax)
		params := make([]river.InsertManyParams, n)
		for i := range params {
			params[i].Args = orders[i]
		}
		_, err := client.InsertManyFast(b.Context(), params)
		require.NoError(b, err)
		orders = orders[n:]
	}
	// Autovacuum does this to a queue in use: without it the planner knows nothing of the backlog.
	_, err = pool.Exec(b.Context(), "ANALYZE river_job", pgx.QueryExecModeSimpleProtocol)
	require.NoError(b, err)
}
