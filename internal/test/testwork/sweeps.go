package testwork

import (
	"context"
	"log/slog"

	"stampede/internal/test/testshop"
	"stampede/ledger"
)

// Expire expires overdue orders, as a sweep of a worker does.
func Expire(s *testshop.Shop, ctx context.Context) (int, error) {
	return ledger.SweepSales(ctx, ledger.NewExpirer(ledger.New(s.Pool), slog.Default()).ExpireSome)
}

// ReleaseUnits releases the units of ended orders, as a sweep of a worker does.
func ReleaseUnits(s *testshop.Shop, ctx context.Context) (int, error) {
	return ledger.New(s.Pool).SweepReleases(ctx, s.Store)
}
