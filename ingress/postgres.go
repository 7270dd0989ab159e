package ingress

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"stampede/internal/pg"
	"stampede/reservation/order"
)

var errBreakerOpen = errors.New("postgres did not answer a moment ago")

// queryPostgres runs a query, unless Postgres is known not to answer.
func (s *Server) queryPostgres(ctx context.Context, timeout time.Duration, query func(context.Context) error) error {
	if s.postgres.isOpen.Load() {
		return errBreakerOpen
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	err := query(limited)
	switch {
	case err == nil, errors.Is(err, order.ErrNotFound), errors.Is(err, order.ErrArchived),
		errors.Is(err, order.ErrTooWide):
		s.postgres.succeeded()
	case ctx.Err() == nil:
		s.postgres.failed(began)
	}
	return err
}

const (
	// probeTimeout bounds one probe; probeInterval is the pause between two.
	probeTimeout  = time.Second
	probeInterval = 250 * time.Millisecond
)

// breaker is a circuit breaker: it keeps a crowd from waiting for a Postgres that does not answer. A failed
// query alone does not open it, because the query may be slow or have waited for its connection. The breaker
// then probes Postgres on a connection of its own, opens if the probe fails, and probes again until one
// succeeds. It is safe for concurrent use.
type breaker struct {
	probe      func(context.Context) error
	background *background
	log        *slog.Logger

	isOpen, probing atomic.Bool
	// succeededNanos is when Postgres answered last.
	succeededNanos atomic.Int64
}

// succeeded records an answer of Postgres.
func (b *breaker) succeeded() { b.succeededNanos.Store(time.Now().UnixNano()) }

// failed starts probing because of a failed query, unless Postgres has answered another one since it began.
func (b *breaker) failed(began time.Time) {
	if b.succeededNanos.Load() < began.UnixNano() && b.probing.CompareAndSwap(false, true) {
		b.background.start(b.probeUntilAnswered)
	}
}

// probeUntilAnswered opens the breaker if the first probe fails, and closes it when one succeeds.
func (b *breaker) probeUntilAnswered(ctx context.Context) {
	defer b.probing.Store(false)
	for {
		limited, cancel := context.WithTimeout(ctx, probeTimeout)
		err := b.probe(limited)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case err == nil, errors.Is(err, pg.ErrReadOnly): // it can be read
			b.succeeded()
			if b.isOpen.Swap(false) {
				b.log.Info("Postgres answers again")
			}
			return
		case !b.isOpen.Swap(true):
			b.log.Warn("Postgres does not answer: orders are shown as Redis and this server know them", "error", err)
		}
		select {
		case <-time.After(probeInterval):
		case <-ctx.Done():
			return
		}
	}
}
