package ladder

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// ledger records what the buyers of a sale were promised.
type ledger struct {
	accepted atomic.Int64

	mu         sync.Mutex
	orders     []string       // ids
	acceptedBy map[uint64]int // by buyer
}

func newLedger() *ledger { return &ledger{acceptedBy: make(map[uint64]int)} }

// onAnswer returns a callback that records the answers of a crowd in which each buyer sends so many
// requests. The number of the crowd separates the buyers of several crowds.
func (l *ledger) onAnswer(crowd, clicks uint64) func(n uint64, status int, body []byte) {
	return func(n uint64, status int, body []byte) {
		if status < 200 || status > 299 {
			return
		}
		l.accepted.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.acceptedBy[crowd<<32|(n-1)/clicks]++
		if id := orderID(body); id != "" {
			l.orders = append(l.orders, id)
		}
	}
}

// orderID is the order's id in an accepting answer, or "".
func orderID(body []byte) string {
	const idBytes = 36
	_, rest, found := bytes.Cut(body, []byte(`"order_id":"`))
	if !found || len(rest) < idBytes {
		return ""
	}
	return string(rest[:idBytes])
}

// doubleBuyers counts buyers who were promised more than one order.
func (l *ledger) doubleBuyers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubles := 0
	for _, times := range l.acceptedBy {
		if times > 1 {
			doubles++
		}
	}
	return doubles
}

// missing counts promised orders that are not in Postgres.
func (l *ledger) missing(ctx context.Context, pool *pgxpool.Pool) (missing int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err = pool.QueryRow(ctx, `SELECT count(*) FROM unnest($1::uuid[]) AS promised (id)
		WHERE NOT EXISTS (SELECT FROM orders AS o WHERE o.id = promised.id AND o.status IN ('confirmed', 'paid'))`,
		l.orders).Scan(&missing)
	return missing, err
}
