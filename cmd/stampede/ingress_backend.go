package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/ingress"
	"stampede/internal/connect"
	"stampede/internal/telemetry"
	"stampede/internal/tracing"
	"stampede/ledger"
	"stampede/ledger/draws"
	"stampede/reservation"
	"stampede/reservation/order"
)

// The connections of an ingress to Postgres, by use. Each use has its own pool, so that waiting requests of one
// cannot take the connections of another.
const (
	// dutyPostgresConns are for heartbeats, the guard, the breaker's probe, /readyz and the clock. Each runs one
	// query at a time.
	dutyPostgresConns = 5
	// changePostgresConns are for payments and cancellations.
	changePostgresConns = 4
	// lookPostgresConns are for buyers who read their own orders, and for all who look at draws.
	lookPostgresConns = 4
	// operatorPostgresConns are for operators who look at orders and cancel them.
	operatorPostgresConns = 2
	// otherPostgresConns are for everything else: sales, operators, and the orders that purchases wait for.
	otherPostgresConns = 5
)

// ingressBackend holds the clients of an ingress. The pool and the Redis client of its backend are for purchases and
// anonymous requests.
type ingressBackend struct {
	*backend
	duty, changes, looks, operators *pgxpool.Pool
	guardRedis                      redis.UniversalClient
	guardAge                        *telemetry.GuardAge
	watchClock                      func(context.Context)
}

func openIngressBackend(
	ctx context.Context, stores storesFlags, storeOptions reservation.StoreOptions, registry *prometheus.Registry,
	tracer *tracing.Tracer,
) (f *ingressBackend, err error) {
	if storeOptions.Observer, err = ingress.ObserveScripts(registry); err != nil {
		return nil, err
	}
	options := []connect.PostgresOption{connect.Service("serve"), connect.Traced(tracer)}
	b, err := stores.openBackend(ctx, connect.Ingress, otherPostgresConns, storeOptions, options...)
	if err != nil {
		return nil, err
	}
	f = &ingressBackend{backend: b}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	var errs [7]error
	f.duty, errs[0] = connect.Postgres(ctx, stores.DatabaseURL, dutyPostgresConns, options...)
	f.changes, errs[1] = connect.Postgres(ctx, stores.DatabaseURL, changePostgresConns, options...)
	f.looks, errs[2] = connect.Postgres(ctx, stores.DatabaseURL, lookPostgresConns, options...)
	f.operators, errs[3] = connect.Postgres(ctx, stores.DatabaseURL, operatorPostgresConns, options...)
	f.guardRedis, errs[4] = connect.Ingress(stores.RedisURL)
	f.guardAge, errs[5] = telemetry.NewGuardAge(registry, "ingress")
	f.watchClock, errs[6] = watchClock(registry, f.duty)
	if err = errors.Join(errs[:]...); err != nil {
		return f, err
	}
	return f, f.pools().Register(registry)
}

func (f *ingressBackend) pools() *connect.Pools {
	pools := connect.NewPools("ingress")
	pools.Redis("purchases", f.redis)
	pools.Redis("guard", f.guardRedis)
	pools.Postgres("others", f.pool)
	pools.Postgres("duty", f.duty)
	pools.Postgres("changes", f.changes)
	pools.Postgres("looks", f.looks)
	pools.Postgres("desk", f.operators)
	return pools
}

func (f *ingressBackend) Close() {
	for _, pool := range []*pgxpool.Pool{f.duty, f.changes, f.looks, f.operators} {
		if pool != nil {
			pool.Close()
		}
	}
	if f.guardRedis != nil {
		_ = f.guardRedis.Close()
	}
	f.backend.Close()
}

// heartbeat runs beside every ingress's server. It ends when a stop begins, before the last request: counting a
// moment too much as an outage gives buyers time, counting too little takes it from them.
func (f *ingressBackend) heartbeat(logger *slog.Logger) ledger.Heartbeat {
	return ledger.Heartbeat{Pool: f.duty, Logger: logger}
}

// guard runs beside every ingress's server and stops it from selling from a replaced Redis.
func (f *ingressBackend) guard(logger *slog.Logger) reservation.Guard {
	return reservation.Guard{Store: f.store, Redis: f.guardRedis, Pool: f.duty, Logger: logger, Age: f.guardAge}
}

// serveOrders gives the ingress the orders in Postgres. Payments and cancellations are published to all ingresses.
func (f *ingressBackend) serveOrders(config *ingress.Config) (*ledger.Outcomes, error) {
	outcomes, err := ledger.NewOutcomes(ledger.OutcomesConfig{
		Client: f.redis, Keys: f.keys, Logger: config.Logger, Registerer: config.Metrics,
	})
	if err != nil {
		return nil, err
	}
	counted, err := telemetry.OrdersByOutcome(config.Metrics, string(order.StatusPaid), string(order.StatusCancelled))
	if err != nil {
		return nil, err
	}
	paid, err := ledger.CountPayments(config.Metrics)
	if err != nil {
		return nil, err
	}
	changing := func(pool *pgxpool.Pool) *ledger.Ledger {
		return ledger.New(pool).WithOutcomes(outcomes).WithPayments(paid).
			WithChanges(func(status order.Status) { counted.WithLabelValues(string(status)).Inc() })
	}
	config.Orders = buyersOrders{ledger.New(f.looks), changing(f.changes)}
	config.AwaitedOrders = ledger.New(f.pool)
	config.OperatorsOrders = changing(f.operators)
	config.Postgres = ledger.New(f.duty)
	config.Draws = draws.New(f.looks)
	return outcomes, nil
}

// buyersOrders reads orders on other connections than it changes them.
type buyersOrders struct {
	*ledger.Ledger
	changes *ledger.Ledger
}

func (o buyersOrders) Pay(ctx context.Context, id uuid.UUID, user, reference string) (order.Order, error) {
	return o.changes.Pay(ctx, id, user, reference)
}

func (o buyersOrders) Withdraw(ctx context.Context, id uuid.UUID, reason, operator string) (order.Placed, error) {
	return o.changes.Withdraw(ctx, id, reason, operator)
}

func (o buyersOrders) Report(ctx context.Context, m order.Money) (order.Payment, error) {
	return o.changes.Report(ctx, m)
}

func (o buyersOrders) RefundedAtProvider(ctx context.Context, r order.ProviderRefund) (order.Payment, error) {
	return o.changes.RefundedAtProvider(ctx, r)
}

func (o buyersOrders) Disputed(ctx context.Context, d order.Dispute) (order.Payment, error) {
	return o.changes.Disputed(ctx, d)
}

func (o buyersOrders) Cancel(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	return o.changes.Cancel(ctx, id, user)
}
