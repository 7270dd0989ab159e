package designs

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"stampede/bench/front"
	"stampede/internal/connect"
)

// none means no verdict yet: the order was not refused, and its units are taken.
const none front.Verdict = 0

// redisStock is common to all designs that keep the stock and the buyers of a sale in Redis and the
// orders in Postgres.
type redisStock struct {
	idle
	rdb    *redis.Client
	pool   *pgxpool.Pool
	prefix string
}

// stockConnections: Redis syncs all commands that it has read at a time together, so more concurrent
// buyers make it faster, up to about this many.
const stockConnections = 64

// openRedisStock opens both, with as many connections to Postgres as the design can use.
func openRedisStock(ctx context.Context, b front.Backend, writers int) (*redisStock, error) {
	rdb, err := openRedis(b.RedisURL, stockConnections)
	if err != nil {
		return nil, err
	}
	pool, err := connect.Postgres(ctx, b.DatabaseURL, int32(writers))
	if err != nil {
		return nil, err
	}
	return &redisStock{rdb: rdb, pool: pool, prefix: b.Prefix}, nil
}

// openRedis returns a client without features that would cost a rival time or units: go-redis would
// look for push messages before every answer, and would resend commands without an answer. None of
// these designs recognizes its own retry, so a resend would take a second unit.
func openRedis(url string, connections int) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("open Redis: %w", err)
	}
	const off = -1
	o.PoolSize, o.PipelinePoolSize, o.MaxRetries = connections, off, off
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(o), nil
}

func (s *redisStock) stockKey(sale uuid.UUID) string { return s.prefix + ":stock:" + sale.String() }

func (s *redisStock) buyersKey(sale uuid.UUID) string { return s.prefix + ":buyers:" + sale.String() }

// Prepare implements front.Design: the stock is written to Redis once, and stays there when the front
// restarts.
func (s *redisStock) Prepare(ctx context.Context, sale uuid.UUID, stock int64) error {
	return s.rdb.SetNX(ctx, s.stockKey(sale), stock, 0).Err()
}

// sell takes the units of an order, and then writes it. If Postgres refuses it, the units are lost.
func (s *redisStock) sell(
	ctx context.Context, o front.Order, take func(context.Context, front.Order) (front.Verdict, error),
) (front.Verdict, error) {
	if refusal, err := take(ctx, o); refusal != none || err != nil {
		return refusal, err
	}
	if err := recordOrder(ctx, s.pool, o, unnumbered); err != nil {
		return none, err
	}
	return front.Confirmed, nil
}

// scriptVerdict converts the answer of the tutorials' scripts.
func scriptVerdict(answer int) (front.Verdict, error) {
	switch answer {
	case 0:
		return none, nil
	case 1:
		return front.SoldOut, nil
	case 2:
		return front.AlreadyPurchased, nil
	}
	return none, fmt.Errorf("the script answered %d", answer)
}
