package feed

import (
	"cmp"
	"context"
	"fmt"
	"slices"

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
	for _, log := range logs {
		batch.Queue(log.query, after, through, limit)
	}
	answers := r.conn.SendBatch(ctx, batch)
	defer func() { _ = answers.Close() }() // its error is the one of the last answer
	var rows []row
	for _, log := range logs {
		more, err := log.collect(answers)
		if err != nil {
			return nil, 0, fmt.Errorf("read the events of %s: %w", log.name, err)
		}
		if n := len(more); n >= limit {
			through = min(through, more[n-1].at())
		}
		rows = append(rows, more...)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(a.at(), b.at()) })
	events = make([]Event, 0, len(rows))
	for _, row := range rows {
		if row.at() > through {
			break // it is read again when those between are known
		}
		e, err := row.event(r)
		if err != nil {
			return nil, 0, err
		}
		events = append(events, e)
	}
	return events, through, nil
}

// logs are what a Reader reads: their positions are one series.
var logs = []struct {
	name, query string
	collect     func(pgx.BatchResults) ([]row, error)
}{
	{"orders", sql.RelayReadOrders, collect[orderRow]},
	{"sales", sql.RelayReadSales, collect[saleRow]},
	{"payments", sql.RelayReadPayments, collect[paymentRow]},
}

func collect[Row any, P interface {
	*Row
	row
}](answers pgx.BatchResults) ([]row, error) {
	rows, err := answers.Query()
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(r pgx.CollectableRow) (row, error) {
		scanned, err := pgx.RowToAddrOfStructByName[Row](r)
		return P(scanned), err
	})
}
