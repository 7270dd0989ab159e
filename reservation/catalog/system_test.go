//go:build system

package catalog_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/test/testshop"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// Operators restock a sale with shards while it sells, its users return units, and workers publish: the final stock is
// the sum of the granted changes.
func TestRestockOfShardsDuringRunningSaleNeverOversells(t *testing.T) {
	t.Parallel()
	s := testshop.NewShardedShop(t)
	sale := s.ShardedSale(t, 100, 4)
	var all errgroup.Group
	changes := restockers{s: s, sale: sale.ID}
	changes.start(&all, 15, 40, -30)
	for range 2 {
		all.Go(func() error {
			for range 30 {
				if _, err := s.PublishPending(context.Background()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for buyer := range 4 {
		all.Go(func() error {
			for i := range 40 {
				user := fmt.Sprintf("user-%d-%d", buyer, i)
				answer, err := s.Reserve(context.Background(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
				if err != nil {
					return err
				}
				if answer.Verdict == reservation.Reserved && i%3 == 0 {
					_, err = s.Release(context.Background(),
						[]reservation.Release{{SaleID: sale.ID, OrderID: answer.Reservation.OrderID, UserID: user, Quantity: 1}})
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
	_, err := s.PublishPending(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.HelpUnits(t.Context(), sale.ID, sale.Layout(), 1))
	var buyers int64
	for shard := range sale.Shards {
		buyers += s.Rdb.HLen(t.Context(), s.Keys.Buyers(sale.Layout().Partition(shard), sale.ID)).Val()
	}
	t.Logf("%d granted, %d refused, %d taken", changes.granted.Load(), changes.refused.Load(), buyers)
	require.Positive(t, changes.granted.Load())
	stock := 100 + changes.sum.Load()
	require.Equal(t, []int64{stock, stock, stock - buyers}, shardStocks(t, s, sale))
}

// restockers are three operators who change the stock of a sale at random. They count what was granted and refused.
type restockers struct {
	s                     *testshop.Shop
	sale                  uuid.UUID
	sum, granted, refused atomic.Int64
}

// start lets each of them make so many changes, of lowest units to fewer than lowest + span.
func (r *restockers) start(all *errgroup.Group, changes, span, lowest int) {
	for range 3 {
		all.Go(func() error {
			for range changes {
				units := int64(rand.IntN(span) + lowest)
				if units == 0 {
					continue
				}
				_, err := r.s.Restock(context.Background(), r.sale, units, uuid.NewString())
				var tooLow *catalog.TakenError
				var invalid *order.InvalidError
				switch {
				case err == nil:
					r.sum.Add(units)
					r.granted.Add(1)
				case errors.As(err, &tooLow), errors.As(err, &invalid):
					r.refused.Add(1)
				default:
					return err
				}
			}
			return nil
		})
	}
}

// Operators restock a sale while it sells: the taken units never exceed the stock, in Redis or in
// Postgres, and the final stock is the sum of the granted changes.
func TestRestockDuringRunningSaleNeverOversells(t *testing.T) {
	t.Parallel()
	s := testshop.NewShop(t)
	pool := s.Pool
	sale := s.Sale(t, 200).ID
	var all errgroup.Group
	changes := restockers{s: s, sale: sale}
	changes.start(&all, 25, 60, -40)
	all.Go(func() error {
		for range 50 {
			if _, err := s.PublishPending(context.Background()); err != nil {
				return err
			}
		}
		return nil
	})
	for buyer := range 4 {
		all.Go(func() error {
			for i := range 60 {
				if _, err := s.Reserve(context.Background(),
					reservation.Request{Sale: sale, User: fmt.Sprintf("user-%d-%d", buyer, i), Quantity: 1}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
	_, err := s.PublishPending(t.Context())
	require.NoError(t, err)
	counted := stocks(t, s, sale)
	buyers := s.Rdb.HLen(t.Context(), s.Keys.Buyers(0, sale)).Val()
	t.Logf("%d granted, %d refused, stock %d, %d taken",
		changes.granted.Load(), changes.refused.Load(), counted[0], buyers)
	require.Positive(t, changes.granted.Load())
	require.Equal(t, 200+changes.sum.Load(), counted[0])
	require.Equal(t, []int64{counted[0], counted[0], counted[0] - buyers}, counted)
	require.GreaterOrEqual(t, counted[2], int64(0))
	var gaps int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT max(revision) - count(*) FROM sale_events WHERE sale_id = $1",
		sale).Scan(&gaps))
	require.Zero(t, gaps)
}
