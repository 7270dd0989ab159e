package feed

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

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

// horizon finds out which positions are settled.
//
// An INSERT locks its table before it takes its first position and until its transaction is visible or void. So the
// transactions that can hold a position up to newest are among those that have the lock at any time after newest was
// read. When none of these has it any more, no row up to newest becomes visible later.
//
// What a horizon knows is true for the server that it was read from. After a crash Postgres gives out again the
// positions that were not flushed, so a horizon ends with its session.
type horizon struct {
	settled int64
	// candidate is settled when the writers that were seen after it are gone.
	candidate int64
	writers   map[string]int32 // by the names of their transactions
	since     time.Time        // when writers were seen
}

// writer is a row of writers.sql.
type writer struct {
	Name string
	PID  int32
}

// advance takes the newest position and the writers that were seen after it was read.
func (h *horizon) advance(newest int64, writers []writer, now time.Time) {
	if newest == h.settled {
		h.writers = nil
		return
	}
	if h.writers != nil && !h.over(writers) {
		return
	}
	if h.writers != nil {
		h.settled = h.candidate
	}
	if len(writers) == 0 {
		h.settled, h.writers = newest, nil
		return
	}
	h.candidate, h.since, h.writers = newest, now, make(map[string]int32, len(writers))
	for _, w := range writers {
		h.writers[w.Name] = w.PID
	}
}

// over reports whether all writers of the candidate are gone. A transaction that is prepared for a two-phase commit
// keeps its name.
func (h *horizon) over(now []writer) bool {
	for _, w := range now {
		if _, found := h.writers[w.Name]; found {
			return false
		}
	}
	return true
}

// pid returns the process of a writer that is waited for, or 0 for a prepared transaction.
func (h *horizon) pid() int32 {
	for _, pid := range h.writers {
		return pid
	}
	return 0
}

// State is what a look at the log found.
type State struct {
	// Newest is the newest position, and Settled the one up to which events can be read.
	Newest, Settled int64
	// Fence is the target's, or -1 if the target is not active.
	Fence int64
	// HeldFor is how long a transaction with the process HeldBy has kept positions from being settled.
	HeldFor time.Duration
	HeldBy  int32
}

// Look finds out how far events can be read, and the fence of a target, in one round trip.
func (r *Reader) Look(ctx context.Context, target string) (s State, err error) {
	batch := &pgx.Batch{}
	batch.Queue(sql.RelayNewest, target)
	batch.Queue(sql.RelayWriters)
	answers := r.conn.SendBatch(ctx, batch)
	defer func() { _ = answers.Close() }() // its error is the one of the last answer
	var fence *int64
	if err := answers.QueryRow().Scan(&s.Newest, &fence); err != nil {
		return s, fmt.Errorf("read the newest position: %w", err)
	}
	rows, err := answers.Query()
	if err != nil {
		return s, fmt.Errorf("read the writers of events: %w", err)
	}
	writers, err := pgx.CollectRows(rows, pgx.RowToStructByName[writer])
	if err != nil {
		return s, fmt.Errorf("read the writers of events: %w", err)
	}
	now := time.Now()
	r.horizon.advance(s.Newest, writers, now)
	s.Settled, s.Fence = r.horizon.settled, -1
	if fence != nil {
		s.Fence = *fence
	}
	if r.horizon.writers != nil {
		s.HeldFor, s.HeldBy = now.Sub(r.horizon.since), r.horizon.pid()
	}
	return s, nil
}

// Settle waits until all positions that are given out by now are settled, and returns the newest of them.
func Settle(ctx context.Context, conn *pgx.Conn) (position int64, err error) {
	const pause = 20 * time.Millisecond
	r := NewReader(conn, "")
	first, err := r.Look(ctx, "")
	for s := first; ; s, err = r.Look(ctx, "") {
		switch {
		case err != nil:
			return 0, err
		case s.Settled >= first.Newest:
			return s.Settled, nil
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for the transaction of the process %d, which writes events: %w", s.HeldBy, ctx.Err())
		case <-time.After(pause):
		}
	}
}
