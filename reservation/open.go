package reservation

import (
	"context"
	"fmt"
	"time"

	"stampede/lua"
)

// OpenShard adds a new shard of a sale with that stock to Redis. A shard that exists in the same epoch stays unchanged.
// The error wraps ErrLostSale if Redis has lost the shard.
func (s *Store) OpenShard(ctx context.Context, sale Sale, shard int, revision, stock int64) error {
	layout := sale.Layout()
	p := layout.Partition(shard)
	keys := []string{s.Keys.Sale(p, sale.ID), s.Keys.Buyers(p, sale.ID), s.Keys.Sales(p)}
	answer, err := lua.Open.Run(ctx, s.Redis, keys,
		sale.ID.String(), sale.Epoch, revision, stock, sale.PerOrderLimit, unixMilli(sale.OpensAt), unixMilli(sale.ClosesAt),
		int64(sale.PaymentWindow/time.Second), layout.FirstSequence(0, shard), layout.Field(shard)).Text()
	switch {
	case err != nil:
		return err
	case answer == "opened" || answer == "unchanged":
		return nil
	case answer == "buyers-remain":
		return fmt.Errorf("%w (%s)", ErrLostSale, answer)
	}
	return fmt.Errorf("sale=%s: it was not opened in Redis: %s", sale.ID, answer)
}
