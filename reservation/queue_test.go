package reservation_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// heldCalls holds each call of the reserve script until a value is sent, and reports how many requests it has.
type heldCalls struct {
	requests chan int
	released chan struct{}
}

func (h heldCalls) process(next redis.ProcessHook, ctx context.Context, cmd redis.Cmder) error {
	const others, perRequest = 10, 4 // arguments: evalsha, sha, number of keys, four keys, three of the call
	if cmd.Name() == "evalsha" {
		h.requests <- (len(cmd.Args()) - others) / perRequest
		<-h.released
	}
	return next(ctx, cmd)
}

func TestFullBatchStartsSecondCall(t *testing.T) {
	t.Parallel()
	rdb := testkit.Redis(t)
	s := testshop.NewShopOn(t, testshop.Options{Redis: rdb, Store: reservation.StoreOptions{BatchMax: 2, QueueMax: 2}})
	sale := s.Sale(t, 100)
	s.Buy(t, sale.ID, "warm-up")
	held := heldCalls{requests: make(chan int, 100), released: make(chan struct{})}
	release := sync.OnceFunc(func() { close(held.released) })
	defer release()
	rdb.AddHook(testkit.Hook(held.process))

	answered, buyers := make(chan error, 8), 0
	buy := func() {
		buyers++
		user := fmt.Sprint("buyer-", buyers)
		go func() {
			_, err := s.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: user, Quantity: 1})
			answered <- err
		}()
	}
	buy()
	require.Equal(t, 1, testshop.Answer(t, held.requests), "a single request leaves immediately")
	buy()
	buy()
	require.Equal(t, 2, testshop.Answer(t, held.requests), "the next one waits until the batch is full")
	for range 3 {
		buy()
	}
	require.ErrorIs(t, testshop.Answer(t, answered), reservation.ErrOverloaded, "two wait, and the third is too many")
	require.Empty(t, held.requests, "a third call waits for one of the two")

	held.released <- struct{}{}
	require.Equal(t, 2, testshop.Answer(t, held.requests), "the full batch follows the call that ended")
	buy()
	held.released <- struct{}{}
	requireReserved := func(n int) {
		for range n {
			require.NoError(t, testshop.Answer(t, answered))
		}
	}
	requireReserved(3)
	buy()
	require.Equal(t, 2, testshop.Answer(t, held.requests), "no call followed that one for a single request")

	release()
	requireReserved(4)
	require.EqualValues(t, 92, s.Left(t, sale.ID))
}

// leaving is a client that is still there, or has left.
type leaving bool

func (l leaving) HasLeft() bool { return bool(l) }

// A request may have waited before Reserve is called, and its client may leave meanwhile.
func TestReserveDecidesNoLateRequest(t *testing.T) {
	t.Parallel()
	s := testshop.NewShopOn(t, testshop.Options{Store: reservation.StoreOptions{WaitMax: reservation.DefaultWaitMax}})
	sale := s.Sale(t, 10)
	for name, c := range map[string]struct {
		age  time.Duration
		gone leaving
		err  error
	}{
		"new":           {0, false, nil},
		"new, and gone": {0, true, nil}, // the caller knows it
		"has waited":    {reservation.DefaultWaitMax / 4, false, nil},
		"has gone":      {reservation.DefaultWaitMax / 4, true, reservation.ErrOverloaded},
		"is too old":    {reservation.DefaultWaitMax + time.Millisecond, false, reservation.ErrOverloaded},
	} {
		_, err := s.Reserve(t.Context(), reservation.Request{
			Sale: sale.ID, User: strings.ReplaceAll(name, " ", "-"), Quantity: 1,
			Arrived: time.Now().Add(-c.age), Client: c.gone,
		})
		require.ErrorIs(t, err, c.err, name)
	}
	require.EqualValues(t, 7, s.Left(t, sale.ID))
}
