package reservation_test

import (
	"context"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// afterLoss runs what happens to Redis between the try whose answer is lost and the next one.
type afterLoss struct {
	once sync.Once
	do   func()
}

func (a *afterLoss) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	err := next(ctx, cmd)
	if err != nil && cmd.Name() == "evalsha" {
		a.once.Do(a.do)
	}
	return err
}

// An answer about a rebuilt stock does not show what an earlier try did.
func TestLostReplyStaysUnknownAfterRebuild(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
		sale uuid.UUID) error{
		"in another epoch, without the order": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
			sale uuid.UUID,
		) error {
			if err := rdb.Del(ctx, keys.Buyers(0, sale)).Err(); err != nil {
				return err
			}
			return rdb.HSet(ctx, keys.Sale(0, sale), "epoch", 2, "state", "paused").Err()
		},
		"closed for a rebuild": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys,
			sale uuid.UUID,
		) error {
			return rdb.HSet(ctx, keys.Sale(0, sale), "epoch", 0).Err()
		},
		"lost": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys, sale uuid.UUID) error {
			return rdb.Del(ctx, keys.Sale(0, sale)).Err()
		},
		"set back": func(ctx context.Context, rdb redis.UniversalClient, keys reservation.Keys, sale uuid.UUID) error {
			return rdb.HSet(ctx, keys.Sale(0, sale), "sequence", 0).Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, rdb := testkit.RedisThroughProxy(t)
			s := testshop.NewShopOn(t, testshop.Options{Redis: rdb})
			sale := s.Sale(t, 10)
			s.Buy(t, sale.ID, "warm-up")
			direct := testkit.Redis(t)
			lost := &afterLoss{do: func() { require.NoError(t, change(t.Context(), direct, s.Keys, sale.ID)) }}
			rdb.AddHook(testkit.Hook(lost.process))

			proxy.Lose(1)
			answer, err := s.Reserve(t.Context(), reservation.Request{
				Sale: sale.ID, User: "ann", Quantity: 1,
				IdempotencyKey: "k",
			})
			proxy.RequireLost(t)
			require.Len(t, s.Events(t, 0), 2, "the order of the first try is in the stream")
			require.ErrorIs(t, err, reservation.ErrOutcomeUnknown, "%+v", answer)
		})
	}
}
