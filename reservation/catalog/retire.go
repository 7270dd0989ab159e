package catalog

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"stampede/internal/crashpoint"
	"stampede/internal/pg"
	"stampede/lua"
	"stampede/sql"
)

// eventRetired: the buyers of a sale that is over leave Redis. Postgres answers for them from then on.
const eventRetired = "SaleRetired"

// ErrNotRetired is returned by Retire for a sale that has changed since the caller has looked, is not over, or has an
// order that is not final. Nothing was changed.
var ErrNotRetired = errors.New("the sale cannot be retired now")

// Retire makes the change of a sale that deletes its buyers in Redis (lua/retire.lua), and publishes it. Of a sale in
// that epoch and revision the caller knows that it is over, and that Redis has the same orders as Postgres. After
// ErrNotInForce a worker publishes the change.
func (c *Catalog) Retire(ctx context.Context, id uuid.UUID, epoch, revision int64) error {
	err := pg.InTransaction(ctx, c.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, sql.CatalogLockSale, id).Scan(new(uuid.UUID)); err != nil {
			return err
		}
		return tx.QueryRow(ctx, sql.CatalogRetireSale, id, epoch, revision).Scan(new(int64))
	})
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotRetired
	}
	if err != nil {
		return fmt.Errorf("retire sale=%s: %w", id, err)
	}
	crashpoint.Hit(crashpoint.SaleRetired)
	if err := c.publish(ctx, id); err != nil {
		return fmt.Errorf("retire sale=%s: %w: %w", id, ErrNotInForce, err)
	}
	return nil
}

// retireShard deletes the buyers of one shard.
func (c *Catalog) retireShard(
	ctx context.Context, sale uuid.UUID, partition int, epoch, revision string,
) *redis.Cmd {
	answer := lua.Retire.Run(ctx, c.store.Redis, c.store.Keys.OfShard(partition, sale), epoch, revision)
	crashpoint.Hit(crashpoint.ShardRetired)
	return answer
}
