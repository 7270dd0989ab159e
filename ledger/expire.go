package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/crashpoint"
	"stampede/internal/retry"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	// SweepMax bounds the orders that one transaction expires or releases.
	SweepMax = BatchMax
	// sweepTurn bounds the time that a sweeper spends on one task while another one waits.
	sweepTurn = 10 * time.Second
)

// expireSome ends at most limit overdue orders of one sale in one transaction, except those in quarantined, and
// returns them. After an error it returns the orders that it tried to end.
func (l *Ledger) expireSome(
	ctx context.Context, except, quarantined []uuid.UUID, limit int,
) (orders []order.Order, err error) {
	var next order.Order
	err = l.inTransaction(ctx, func(tx pgx.Tx) (err error) {
		if orders, err = LockOverdue(ctx, tx, except, quarantined, limit); err != nil || len(orders) == 0 {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeExpire)
		for _, o := range orders {
			if next, err = o.Expired(); err != nil {
				return err
			}
		}
		if _, err := writeChange(ctx, tx, change{event: order.EventExpired}, orders, next); err != nil {
			return err
		}
		crashpoint.Hit(crashpoint.BeforeExpireCommit)
		return nil
	})
	if err != nil {
		return orders, fmt.Errorf("expire orders: %w", err)
	}
	if len(orders) > 0 {
		crashpoint.Hit(crashpoint.AfterExpire)
		l.publishChanged(orders, next)
	}
	return orders, nil
}

// LockOverdue locks and returns at most limit overdue orders of one sale that is not in except, without what their
// expiry does not need.
func LockOverdue(ctx context.Context, tx pgx.Tx, except, quarantined []uuid.UUID, limit int) ([]order.Order, error) {
	var sale uuid.UUID
	err := tx.QueryRow(ctx, sql.LedgerOverdueSale, except, quarantined).Scan(&sale)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	rows, _ := tx.Query(ctx, sql.LedgerLockOverdue, sale, limit, quarantined) // rows carry the error
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (order.Order, error) {
		r, err := pgx.RowToStructByNameLax[orderRow](row)
		return r.order(), err
	})
}

const (
	// quarantineMax bounds the orders in quarantine. Beyond it the whole sale waits for the next
	// turn.
	quarantineMax = 1000
	// quarantineFor is the time after which an order in quarantine is retried.
	quarantineFor = time.Minute
)

// QuarantinedMessage is logged for an order that cannot be ended. The audit reports what is wrong with it.
const QuarantinedMessage = "an overdue order contradicts other records of it and is set aside"

// Expirer ends overdue orders. It finds an order that cannot be ended by halving the batch, and puts it
// in quarantine, so that it does not block the others of its sale.
type Expirer struct {
	ledger *Ledger
	log    *slog.Logger
	// Quarantined holds, for each order in quarantine, the time until which it is skipped.
	Quarantined map[uuid.UUID]time.Time
	// limit bounds the orders of one transaction. It is halved when an order is at fault or the
	// transaction takes too long, and returns to SweepMax when the order at fault is found.
	limit int
}

// NewExpirer returns an Expirer that has no order in quarantine.
func NewExpirer(ledger *Ledger, log *slog.Logger) *Expirer {
	return &Expirer{ledger: ledger, log: log, Quarantined: make(map[uuid.UUID]time.Time), limit: SweepMax}
}

// ExpireSome is a SweepStep that ends overdue orders.
func (e *Expirer) ExpireSome(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, expired int, err error) {
	for {
		orders, err := e.ledger.expireSome(ctx, except, e.skipped(), e.limit)
		if len(orders) > 0 {
			sale = orders[0].SaleID
		}
		switch {
		case err == nil:
			e.limit = min(2*e.limit, SweepMax)
			for _, o := range orders {
				delete(e.Quarantined, o.ID)
			}
			return sale, len(orders), nil
		case len(orders) > 1 && (IsTooSlow(err) || causedByOrder(err)):
			e.limit = len(orders) / 2
		case len(orders) == 1 && causedByOrder(err) && e.quarantine(orders[0], err):
			e.limit = SweepMax
		default:
			return sale, 0, err
		}
		if ctx.Err() != nil {
			return sale, 0, err
		}
	}
}

// causedByOrder reports whether one of the orders causes the error, and not their sale or Postgres.
func causedByOrder(err error) bool {
	var ofSale *saleError
	return !errors.As(err, &ofSale) &&
		(FaultOf(err) == BadData || errors.Is(err, errNotLocked) || errors.Is(err, order.ErrIllegalTransition))
}

// quarantine returns false if too many orders are in quarantine already.
func (e *Expirer) quarantine(o order.Order, why error) bool {
	_, known := e.Quarantined[o.ID]
	if len(e.Quarantined) >= quarantineMax && !known {
		return false
	}
	e.Quarantined[o.ID] = time.Now().Add(quarantineFor)
	if !known {
		e.log.Error(QuarantinedMessage, "order", o.ID, "sale", o.SaleID, "error", why)
	}
	return true
}

// skipped returns the orders in quarantine that are not yet due for a retry.
func (e *Expirer) skipped() []uuid.UUID {
	orders := []uuid.UUID{} // not nil, which would be NULL
	now := time.Now()
	for id, until := range e.Quarantined {
		switch {
		case now.Before(until):
			orders = append(orders, id)
		case now.Sub(until) > quarantineFor: // not overdue any more
			delete(e.Quarantined, id)
		}
	}
	return orders
}

// SweepStep works on some orders of one sale that is not in except. It returns the sale, or uuid.Nil if
// there is none, and how many orders it finished. Orders that it cannot finish are postponed.
type SweepStep func(ctx context.Context, except []uuid.UUID) (sale uuid.UUID, done int, err error)

// SweepSales repeats step until nothing is left or sweepTurn is over. A sale in which step fails waits
// for the next turn, so that it does not block others.
func SweepSales(ctx context.Context, step SweepStep) (done int, err error) {
	except := []uuid.UUID{} // not nil, which would be NULL
	var failed []error
	for began := time.Now(); time.Since(began) < sweepTurn; {
		limited, cancel := context.WithTimeout(ctx, RecordTimeout)
		sale, n, err := step(limited, except)
		cancel()
		switch {
		case err != nil && sale == uuid.Nil:
			return done, errors.Join(append(failed, err)...)
		case err != nil:
			except = append(except, sale)
			failed = append(failed, fmt.Errorf("sale=%s: %w", sale, err))
		case sale == uuid.Nil:
			return done, errors.Join(failed...)
		}
		done += n
	}
	return done, errors.Join(failed...)
}

const (
	// heartbeatInterval is how often an ingress records that it runs. An order is overdue at the first
	// heartbeat after its deadline, so payments are accepted for at most this much longer.
	heartbeatInterval = time.Second
	// heartbeatTimeout bounds a heartbeat, which may wait for the row lock of another one.
	heartbeatTimeout = 5 * time.Second
)

// Heartbeat records in Postgres that an ingress runs, so that buyers can pay. Every ingress runs one.
// After an outage of all ingresses or of Postgres, the first heartbeat postpones the deadlines by the
// length of the outage. Deadlines move with the clock of Postgres if that is set.
type Heartbeat struct {
	Pool   *pgxpool.Pool
	Logger *slog.Logger
}

// Run sends a heartbeat once a second until ctx is done, and then returns nil. It retries while Postgres is
// down.
func (h Heartbeat) Run(ctx context.Context) error {
	sending := retry.Outage{Log: h.Logger, Doing: "record a heartbeat in Postgres"}
	turns := movedTurns{pool: h.Pool}
	for {
		lasted, err := h.Send(ctx)
		if err == nil {
			err = turns.move(ctx, lasted)
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // a stop is no failure
		}
		sending.Note(err)
		switch {
		case lasted > 0: // a clock that was set forward looks the same
			h.Logger.Warn("buyers could not pay for a while: deadlines are postponed", "outage", lasted)
		case lasted < 0:
			h.Logger.Warn("the clock of Postgres was set back: deadlines move with it", "outage", lasted)
		}
		if !retry.Pause(heartbeatInterval, ctx.Done()) {
			return nil
		}
	}
}

// Send records a heartbeat. It returns the length of the outage that it ended, or 0; below 0 if the clock of Postgres
// was set back.
func (h Heartbeat) Send(ctx context.Context) (lasted time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	var seconds float64
	if err := h.Pool.QueryRow(ctx, sql.LedgerHeartbeat).Scan(&seconds); err != nil {
		return 0, fmt.Errorf("heartbeat: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// turnsMax bounds the turns to pay that are moved at each heartbeat after an outage.
const turnsMax = 5000

// movedTurns moves the turns to pay that are written with the orders after an outage, a part at each heartbeat.
type movedTurns struct {
	pool *pgxpool.Pool
	// since is when the last outage was over, zero if nothing is left to move, and lasted how long it was.
	since  time.Time
	lasted time.Duration
}

func (m *movedTurns) move(ctx context.Context, lasted time.Duration) error {
	if lasted != 0 {
		m.since, m.lasted = time.Now(), max(lasted, -lasted)
	}
	if m.since.IsZero() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	var moved int
	err := m.pool.QueryRow(ctx, sql.LedgerMoveTurns, turnsMax, (m.lasted + time.Since(m.since)).Seconds()).Scan(&moved)
	if err != nil {
		return fmt.Errorf("move the turns to pay: %w", err)
	}
	if moved == 0 {
		m.since = time.Time{}
	}
	return nil
}
