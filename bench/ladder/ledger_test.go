package ladder

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// ledger is what the buyers of a sale were promised, as they keep it themselves.
type ledger struct {
	accepted atomic.Int64

	mu     sync.Mutex
	orders []string       // ids
	yes    map[uint64]int // how often a buyer was told that there is an order
}

func newLedger() *ledger { return &ledger{yes: make(map[uint64]int)} }

// hear returns what takes down the answers of a crowd in which each buyer sends so many requests. The
// buyers of several crowds are told apart by a number.
func (l *ledger) hear(crowd, clicks uint64) func(n uint64, status int, body []byte) {
	return func(n uint64, status int, body []byte) {
		if status < 200 || status > 299 {
			return
		}
		l.accepted.Add(1)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.yes[crowd<<32|(n-1)/clicks]++
		if id := orderID(body); id != "" {
			l.orders = append(l.orders, id)
		}
	}
}

// orderID is the id in an answer of acceptance, "" if there is none.
func orderID(body []byte) string {
	const idBytes = 36
	_, rest, found := bytes.Cut(body, []byte(`"order_id":"`))
	if !found || len(rest) < idBytes {
		return ""
	}
	return string(rest[:idBytes])
}

// doubleBuyers is how many buyers have been promised more than one order.
func (l *ledger) doubleBuyers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubles := 0
	for _, times := range l.yes {
		if times > 1 {
			doubles++
		}
	}
	return doubles
}

// missing is how many of the promised orders are not in Postgres.
func (l *ledger) missing(ctx context.Context, pool *pgxpool.Pool) (missing int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err = pool.QueryRow(ctx, `SELECT count(*) FROM unnest($1::uuid[]) AS promised (id)
		WHERE NOT EXISTS (SELECT FROM orders AS o WHERE o.id = promised.id AND o.status IN ('confirmed', 'paid'))`,
		l.orders).Scan(&missing)
	return missing, err
}
