package testwork

import (
	"context"
	"log/slog"

	"github.com/google/uuid"

	"stampede/fulfillment/ledger"
	"stampede/internal/testshop"
)

// Expire expires overdue orders like a sweep of a worker.
func Expire(s *testshop.Shop, ctx context.Context) (int, error) {
	return ledger.SweepSales(ctx, ledger.NewExpirer(ledger.New(s.Pool), slog.Default()).ExpireSome)
}

// GiveBack releases units like a sweep of a worker.
func GiveBack(s *testshop.Shop, ctx context.Context) (int, error) {
	return ledger.SweepSales(ctx, func(ctx context.Context, except []uuid.UUID) (uuid.UUID, int, error) {
		return ledger.New(s.Pool).ReleaseSome(ctx, s.Store, except)
	})
}
