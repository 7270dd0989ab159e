package fleet

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"stampede/internal/clocks"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/sql"
)

const (
	// rebuildSilence is after which silence a rebuild counts as dead. It writes each second.
	rebuildSilence = 10 * time.Second
	// recordsTrusted is how old the verified servers may be that Redis is compared with.
	recordsTrusted = 5 * time.Second
)

// records is what Postgres says beside the sales. It is guarded by Fleet.mu.
type records struct {
	at time.Time // zero before the first look

	letters      int64
	oldestLetter time.Time
	audit        *Audit
	auditedSince time.Time // of the newest audit; without one, since there is a sale to audit
	rebuilds     []Rebuild
	servers      map[int]string // the run ids of the verified servers by partition
	readOnly     bool           // Postgres takes no writes
	clock        clocks.Reading // of Postgres
	err          string
}

// lookAtRecords reads the records in Postgres.
func (f *Fleet) lookAtRecords(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	type record struct {
		Clock     time.Time
		ReadOnly  bool
		Letters   int64
		Oldest    *time.Time
		AuditedAt *time.Time
		Since     *time.Time
		Operator  *string
		Broken    []string
		Unchecked []string
		Servers   map[int]string
		Rebuilds  []Rebuild
	}
	var row record
	clock, err := clocks.Read(func() (_ time.Time, err error) {
		rows, _ := f.config.Pool.Query(limited, sql.FleetDesk, rebuildSilence.Seconds()) // its error comes with the row
		row, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[record])
		return row.Clock, err
	})
	if ctx.Err() != nil {
		return
	}
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		if f.postgres.up && !isTimeout(err) && f.records.err == "" {
			f.config.Logger.Warn("cannot read the dead letters, audits and rebuilds in Postgres", "error", err)
			f.records.err = err.Error()
		}
		return
	}
	f.records = records{
		at: now, letters: row.Letters, servers: row.Servers, rebuilds: row.Rebuilds, readOnly: row.ReadOnly,
		clock: clock,
	}
	for i := range f.records.rebuilds {
		f.records.rebuilds[i].Step = shortened(f.records.rebuilds[i].Step, errorMax)
	}
	if row.Oldest != nil {
		f.records.oldestLetter = *row.Oldest
	}
	if row.Since != nil {
		f.records.auditedSince = *row.Since
	}
	if row.AuditedAt != nil {
		f.records.audit = &Audit{
			At: *row.AuditedAt, Operator: printable(*row.Operator), Broken: row.Broken, Unchecked: row.Unchecked,
		}
	}
}

const (
	// funnelOrdersMax bounds the orders that one look counts, if it counts more than one sale.
	funnelOrdersMax = 20_000
	// funnelShare is the share of the time in which Postgres counts orders: a look of 100 ms is followed by a pause of
	// five seconds.
	funnelShare = 50
	// funnelPauseMax bounds the pause.
	funnelPauseMax = 30 * time.Second
	// funnelIdle is how often the orders of sales are counted that do not sell.
	funnelIdle = time.Minute
	// funnelTimeout bounds a look.
	funnelTimeout = 10 * time.Second
)

// funnels are the counted orders of sales. They are guarded by Fleet.mu.
type funnels struct {
	counted map[uuid.UUID]countedFunnel
	after   time.Time // the time of the next look
	// turn is true if the last look was at the records.
	turn bool
}

type countedFunnel struct {
	counted   Funnel
	paidUnits int64
	at        time.Time
}

// paid returns the paid units of the sales whose orders are counted.
func (k *funnels) paid() map[uuid.UUID]int64 {
	units := make(map[uuid.UUID]int64, len(k.counted))
	for id := range k.counted {
		units[id] = k.counted[id].paidUnits
	}
	return units
}

// lookAtFunnels counts the orders of these sales.
func (f *Fleet) lookAtFunnels(ctx context.Context, ids []uuid.UUID) {
	limited, cancel := context.WithTimeout(ctx, funnelTimeout)
	defer cancel()
	began := time.Now()
	rows, _ := f.config.Pool.Query(limited, sql.FleetFunnel, ids) // its error comes with the rows
	type row struct {
		ID        uuid.UUID
		PaidUnits int64
		Funnel
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	now := time.Now()
	if ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.funnels.after = now.Add(min(funnelShare*now.Sub(began), funnelPauseMax))
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			f.config.Logger.Warn("counting the orders of a sale takes too long", "sales", ids)
		}
		return
	}
	if f.funnels.counted == nil {
		f.funnels.counted = map[uuid.UUID]countedFunnel{}
	}
	for _, r := range found {
		f.funnels.counted[r.ID] = countedFunnel{r.Funnel, r.PaidUnits, now}
	}
}

// due returns the sales whose orders are to be counted now, if any: those that were counted longest ago. Every other
// turn is that of the records. Sales that are no longer listed are forgotten.
func (k *funnels) due(listed []catalog.CountedSale, now time.Time) []uuid.UUID {
	k.turn = !k.turn
	if k.turn || now.Before(k.after) {
		return nil
	}
	type candidate struct {
		id     uuid.UUID
		at     time.Time
		orders int64
	}
	var candidates []candidate
	kept := make(map[uuid.UUID]countedFunnel, len(listed))
	for i := range listed {
		sale := &listed[i]
		was, isCounted := k.counted[sale.ID]
		if isCounted {
			kept[sale.ID] = was
		}
		interval := roundInterval
		if sale.State == reservation.StateEnded && was.counted.Confirmed == 0 || sale.State == reservation.StateScheduled {
			interval = funnelIdle
		}
		switch {
		case sale.Archived, sale.Retired && isCounted: // its orders do not change any more
		case now.Sub(was.at) >= interval:
			// Before the first count, the units of live orders say about how many there are.
			candidates = append(candidates, candidate{sale.ID, was.at, max(was.counted.Accepted, sale.Sale.Sold)})
		}
	}
	k.counted = kept
	slices.SortStableFunc(candidates, func(a, b candidate) int { return a.at.Compare(b.at) })
	var ids []uuid.UUID
	var orders int64
	for _, c := range candidates {
		if orders += c.orders; orders > funnelOrdersMax && len(ids) > 0 {
			break
		}
		ids = append(ids, c.id)
	}
	return ids
}
