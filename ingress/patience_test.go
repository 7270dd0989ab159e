package ingress

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
	"stampede/reservation"
)

func TestPatience(t *testing.T) {
	t.Parallel()
	request, leave := context.WithCancel(t.Context())
	defer leave()

	short := &patience{request: request, length: time.Millisecond}
	derived, cancel := context.WithCancel(short)
	defer cancel()
	<-derived.Done()
	require.ErrorIs(t, derived.Err(), context.DeadlineExceeded)
	require.ErrorIs(t, short.Err(), context.DeadlineExceeded)
	short.end()
	require.ErrorIs(t, short.Err(), context.DeadlineExceeded)

	long := &patience{request: request, length: time.Hour}
	until, limited := long.Deadline()
	require.True(t, limited)
	require.WithinDuration(t, time.Now().Add(time.Hour), until, time.Minute)
	require.NoError(t, long.Err())
	leave()
	<-long.Done()
	require.ErrorIs(t, long.Err(), context.Canceled)
	long.end()

	unused := &patience{request: t.Context(), length: time.Hour}
	unused.end()
	<-unused.Done()
	require.ErrorIs(t, unused.Err(), context.Canceled)
}

// lastPatience remembers the context of the last purchase.
type lastPatience struct {
	Reservations
	last atomic.Pointer[patience]
}

func (l *lastPatience) Reserve(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	l.last.Store(ctx.(*patience))
	return l.Reservations.Reserve(ctx, r)
}

// TestSoldOutWaitsForNobody: once a process remembers that a sale is sold out, it says so without a timer.
func TestSoldOutWaitsForNobody(t *testing.T) {
	t.Parallel()
	seen := new(lastPatience)
	s := openShop(t, func(c *Config) {
		seen.Reservations = c.Reservations
		c.Reservations = seen
	})
	sale := s.sale(reservation.Terms{Stock: 1})
	s.buy(sale, "", as("ada")).is(http.StatusAccepted)
	require.False(t, seen.last.Load().waiting() == ended, "a purchase that Redis decides has a time-out")
	testkit.Eventually(t, 10*time.Second, "an answer without a timer", func() bool {
		s.buy(sale, "", as("bob")).isProblem(http.StatusConflict, "sold-out")
		return seen.last.Load().waiting() == ended
	})
}
