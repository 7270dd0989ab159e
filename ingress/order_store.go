package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"stampede/internal/pg"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

const (
	// orderTimeout bounds one query of Postgres, including the wait for a connection.
	orderTimeout = time.Second
	// operatorTimeout bounds an operator's query: a page with a status may look at many orders.
	operatorTimeout = 3 * time.Second
	// reservedTimeout bounds one query of Redis.
	reservedTimeout = time.Second
)

// changeTimeout bounds one attempt to change an order. It is longer than orderTimeout, because a change waits
// for other changes of the same order and of the same sale.
const changeTimeout = 3 * time.Second

var errVersionForgotten = errors.New("the order may have been shown in a later version, which is forgotten")

var (
	problemNotChanged = fixed(problem{
		Kind: problems.Unavailable, retryAfter: retrySoon,
		detail: "Nothing was done: a server that the request needs does not answer. Retry after a moment.",
	})
	problemChangeUnknown = fixed(problem{
		Kind: problems.OutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"Repeat the request to find out: it changes nothing twice.",
	})
)

// orderStore finds and changes orders in Postgres, and finds those in Redis that are not in Postgres yet. While
// Postgres does not answer, no request waits for it. It is safe for concurrent use.
type orderStore struct {
	config   Config
	postgres breaker
	versions *orderVersions
	prices   *prices
}

func newOrderStore(config Config, prices *prices, b *background) *orderStore {
	return &orderStore{
		config: config, versions: newOrderVersions(), prices: prices,
		postgres: breaker{probe: config.Postgres.Ping, background: b, log: config.Logger},
	}
}

// foundOrder is an order as it is shown.
type foundOrder struct {
	order.Order
	// mayBeBehind: Postgres did not answer, and may have a later version.
	mayBeBehind bool
}

// find looks in Postgres first, where the order is in its latest version, and then among the
// reservations in Redis. If both miss it, it may have been rejected and released between the two lookups, and
// is in Postgres now.
//
// With its receipt, an order that Redis has lost is voided once Postgres knows that, and undecided until then.
func (s *orderStore) find(
	ctx context.Context, id uuid.UUID, user string, receipt *order.Receipt,
) (found foundOrder, err error) {
	o, err := s.findRecorded(ctx, id, receipt)
	if errors.Is(err, order.ErrNotFound) {
		if o, err = s.findReserved(ctx, id, user); errors.Is(err, order.ErrNotFound) {
			o, err = s.findRecorded(ctx, id, receipt)
		} else if err != nil {
			return foundOrder{}, err
		}
	}
	mayBeBehind := false
	if err != nil && !errors.Is(err, order.ErrNotFound) && !errors.Is(err, order.ErrArchived) {
		o, err = s.findWithoutPostgres(ctx, id, user, err)
		mayBeBehind = true
	}
	switch {
	case err == nil && o.UserID == user:
		return foundOrder{s.versions.latest(o), mayBeBehind}, nil
	case err == nil:
		return foundOrder{}, order.ErrNotFound
	case receipt != nil && errors.Is(err, order.ErrNotFound):
		return foundOrder{}, problemOrderUndecided
	}
	return foundOrder{}, err
}

// findRecorded looks the order up in Postgres, or the one whose receipt is given.
func (s *orderStore) findRecorded(
	ctx context.Context, id uuid.UUID, receipt *order.Receipt,
) (o order.Order, err error) {
	err = s.query(ctx, orderTimeout, func(ctx context.Context) (err error) {
		if receipt != nil {
			o, err = s.config.Orders.FindByReceipt(ctx, *receipt)
		} else {
			o, err = s.config.Orders.Order(ctx, id)
		}
		return err
	})
	return o, err
}

// findReserved looks the order up in Redis, which does not have its price.
func (s *orderStore) findReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	limited, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	o, err := s.config.Reservations.FindReserved(limited, id, user)
	known, _ := s.prices.find(o.SaleID)
	o.Amount, o.Currency = known.amount(o.Quantity, o.Lines), known.currency
	return o, err
}

// findWithoutPostgres returns the order as it was shown last, or as Redis holds it, unless it may have been
// shown in a later version that is forgotten. An order that is in neither place may be in Postgres: the
// error says that it is unavailable, not that it does not exist.
func (s *orderStore) findWithoutPostgres(
	ctx context.Context, id uuid.UUID, user string, cause error,
) (order.Order, error) {
	if o, known := s.versions.recall(id); known {
		return o, nil
	}
	missing := errVersionForgotten
	if !s.versions.mayHaveForgotten(id) {
		var o order.Order
		if o, missing = s.findReserved(ctx, id, user); missing == nil {
			return o, nil
		}
	}
	//nolint:errorlint // "not found" in Redis alone does not mean that the order does not exist
	err := fmt.Errorf("%w: order %s: postgres: %w; else: %v", reservation.ErrUnavailable, id, cause, missing)
	return order.Order{}, err
}

// findAwaited finds the orders that requests wait for.
func (s *orderStore) findAwaited(ctx context.Context, ids []uuid.UUID) (orders []order.Order, err error) {
	err = s.query(ctx, lookupTimeout, func(ctx context.Context) (err error) {
		orders, err = s.config.AwaitedOrders.FindOrders(ctx, ids)
		return err
	})
	return orders, err
}

// query runs a query, unless Postgres is known not to answer.
func (s *orderStore) query(ctx context.Context, timeout time.Duration, query func(context.Context) error) error {
	if s.postgres.isOpen.Load() {
		return errBreakerOpen
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	err := query(limited)
	switch {
	case err == nil, errors.Is(err, order.ErrNotFound), errors.Is(err, order.ErrArchived),
		errors.Is(err, order.ErrTooWide), errors.Is(err, order.ErrPaymentNotFound):
		s.postgres.succeeded()
	case ctx.Err() == nil:
		s.postgres.failed(began)
	}
	return err
}

// change changes an order in Postgres. An order that only Redis has cannot be changed yet. One that
// neither has may have been rejected and released between the two lookups, as in find.
func (s *orderStore) change(
	ctx context.Context, id uuid.UUID, user string, change func(context.Context) error,
) error {
	err := s.changeInPostgres(ctx, change)
	if !errors.Is(err, order.ErrNotFound) {
		return err
	}
	switch _, err := s.findReserved(ctx, id, user); {
	case err == nil:
		return fmt.Errorf("order %s: %w", id, order.ErrNotConfirmed)
	case errors.Is(err, order.ErrNotFound):
		return s.changeInPostgres(ctx, change)
	default:
		return err
	}
}

// changeInPostgres makes the change, unless Postgres is known not to answer.
func (s *orderStore) changeInPostgres(ctx context.Context, change func(context.Context) error) error {
	if s.postgres.isOpen.Load() {
		return fmt.Errorf("%w: %w", problemNotChanged, errBreakerOpen)
	}
	limited, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	began := time.Now()
	err := change(limited)
	if !isDecision(err) {
		if ctx.Err() == nil {
			s.postgres.failed(began)
		}
		if errors.Is(err, pg.ErrChangeUnknown) {
			return fmt.Errorf("%w: %w", problemChangeUnknown, err)
		}
		return fmt.Errorf("%w: %w", problemNotChanged, err)
	}
	s.postgres.succeeded()
	return err
}

// isDecision reports whether Postgres has decided about the change, as opposed to an error that kept it from
// deciding.
func isDecision(err error) bool {
	if err == nil {
		return true
	}
	for _, decision := range []error{
		order.ErrNotFound, order.ErrIllegalTransition, order.ErrExpired, order.ErrDamaged, order.ErrArchived,
		order.ErrPaymentNotFound, order.ErrRefundNotDue, order.ErrNotUnclear,
	} {
		if errors.Is(err, decision) {
			return true
		}
	}
	return false
}

var errBreakerOpen = errors.New("postgres did not answer a moment ago")

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

// versionsMin bounds a generation: between versionsMin and twice as many orders are remembered, some 20 MB.
const versionsMin = 1 << 15

// orderVersions gives buyers monotonic reads: once this server has shown an order in some version, it shows no
// lower one. A query that is slower than a later one could, and so could Redis, which is asked while
// Postgres does not answer. The first version is not remembered, because no version is lower.
//
// Its memory is bounded: a full young generation becomes the old one, and the old one is forgotten. An order
// that was made before the old generation began may have been forgotten; a later one is remembered if it
// was shown in a later version than the first. It is safe for concurrent use.
type orderVersions struct {
	mu                   sync.Mutex
	young, old           map[uuid.UUID]order.Order
	youngSince, oldSince time.Time // zero is the start of the server
}

func newOrderVersions() *orderVersions {
	return &orderVersions{young: make(map[uuid.UUID]order.Order), old: make(map[uuid.UUID]order.Order)}
}

// latest returns the version to show: the found one, or a later one that was shown before.
func (m *orderVersions) latest(found order.Order) order.Order {
	m.mu.Lock()
	defer m.mu.Unlock()
	if before, known := m.recallLocked(found.ID); known && before.Version > found.Version {
		found = before
	}
	if found.Version > 1 {
		m.remember(found)
	}
	return found
}

// recall returns the order as it was shown last, if it is remembered.
func (m *orderVersions) recall(id uuid.UUID) (o order.Order, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.recallLocked(id)
}

// mayHaveForgotten is false if the order is remembered, or was never shown in a later version than the first.
func (m *orderVersions) mayHaveForgotten(id uuid.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, known := m.recallLocked(id)
	return !known && !m.oldSince.IsZero() && reservation.MadeAt(id).Before(m.oldSince.Add(reservation.ClockMargin))
}

func (m *orderVersions) recallLocked(id uuid.UUID) (o order.Order, known bool) {
	if o, known = m.young[id]; !known {
		o, known = m.old[id]
	}
	return o, known
}

func (m *orderVersions) remember(o order.Order) {
	if _, known := m.young[o.ID]; !known && len(m.young) >= versionsMin {
		m.young, m.old = m.old, m.young
		clear(m.young)
		m.oldSince, m.youngSince = m.youngSince, time.Now()
	}
	m.young[o.ID] = o
}
