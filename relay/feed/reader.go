package feed

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"stampede/sql"
)

// Reader reads events over one session. It serves one goroutine, and ends with its session: what it knows about the
// server is void after an error.
type Reader struct {
	conn    *pgx.Conn
	source  string
	horizon horizon
}

// NewReader returns a Reader whose events have that source.
func NewReader(conn *pgx.Conn, source string) *Reader { return &Reader{conn: conn, source: source} }

// Read returns about limit events after a position, in the order of their positions, and the position up to which
// there are no others. It reads nothing that is not settled.
func (r *Reader) Read(ctx context.Context, after int64, limit int) (events []Event, through int64, err error) {
	through = r.horizon.settled
	if through <= after {
		return nil, after, nil
	}
	batch := &pgx.Batch{}
	batch.Queue(sql.RelayReadOrders, after, through, limit)
	batch.Queue(sql.RelayReadSales, after, through, limit)
	answers := r.conn.SendBatch(ctx, batch)
	defer func() { _ = answers.Close() }() // its error is the one of the last answer
	orders, err := collect[orderRow](answers)
	if err != nil {
		return nil, 0, fmt.Errorf("read the events of orders: %w", err)
	}
	sales, err := collect[saleRow](answers)
	if err != nil {
		return nil, 0, fmt.Errorf("read the events of sales: %w", err)
	}
	if n := len(orders); n >= limit {
		through = orders[n-1].Position
	}
	if n := len(sales); n >= limit {
		through = min(through, sales[n-1].Position)
	}
	events = make([]Event, 0, len(orders)+len(sales))
	for len(orders)+len(sales) > 0 {
		var e Event
		if len(sales) == 0 || len(orders) > 0 && orders[0].Position < sales[0].Position {
			e, err = r.orderEvent(&orders[0])
			orders = orders[1:]
		} else {
			e, err = r.saleEvent(&sales[0])
			sales = sales[1:]
		}
		if err != nil {
			return nil, 0, err
		}
		if e.Position > through {
			break // it is read again when those between are known
		}
		events = append(events, e)
	}
	return events, through, nil
}

func collect[Row any](answers pgx.BatchResults) ([]Row, error) {
	rows, err := answers.Query()
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[Row])
}
