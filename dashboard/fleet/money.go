package fleet

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
	dto "github.com/prometheus/client_model/go"

	"stampede/internal/clocks"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/sql"
)

const (
	metricReports = "stampede_payment_reports_total"
	metricMoney   = "stampede_payments_total"
)

// money counts reports of payments, by what became of them, and payments: those that were settled, those that people
// have to look at, and those whose refund is due, by the reason.
type money map[moneyKey]float64

type moneyKey struct{ kind, of string }

const (
	moneyReported = "reported"
	moneySettled  = "settled"
	moneyUnclear  = "unclear"
	moneyDue      = "due"

	// reportKept and reportUnauthorized are values of the label outcome.
	reportKept, reportUnauthorized = "kept", "unauthorized"
)

// readMoney leaves out reports without a token, which are those of strangers, buyers' words, and the refunds of paid
// orders that operators cancel.
func readMoney(reports, payments *dto.MetricFamily) money {
	m := money{}
	each(reports, func(l labels, v float64) {
		if outcome := l.value("outcome"); outcome != "anonymous" {
			m[moneyKey{moneyReported, outcome}] += v
		}
	})
	each(payments, func(l labels, v float64) {
		reason := l.value("reason")
		switch order.PaymentState(l.value("state")) {
		case order.PaymentSettled:
			m[moneyKey{kind: moneySettled}] += v
		case order.PaymentUnclear:
			m[moneyKey{kind: moneyUnclear}] += v
		case order.PaymentRefundDue:
			if reason != string(order.RefundOrderCancelled) {
				m[moneyKey{moneyDue, reason}] += v
			}
		case order.PaymentWaiting, order.PaymentRefunded, order.PaymentDismissed, order.PaymentDisputed, order.PaymentClaimed:
		}
	})
	return m
}

func (m money) since(before money) money {
	fresh := money{}
	for key, now := range m {
		if more := gained(before[key], now); more > 0 {
			fresh[key] = more
		}
	}
	return fresh
}

// sum adds up what is of these kinds.
func (m money) sum(kinds ...string) (sum float64) {
	for key, n := range m {
		if slices.Contains(kinds, key.kind) {
			sum += n
		}
	}
	return sum
}

// MoneyRates are payments per second.
type MoneyRates struct {
	// Reported = kept and Refused reports; a repeat is a report, and no payment.
	Reported float64 `json:"reported"`
	Refused  float64 `json:"refused"`
	Settled  float64 `json:"settled"`
	// Due are payments whose refund is due from now on.
	Due float64 `json:"due"`
	// Known is false if no ingress has answered two scrapes in a row.
	Known bool `json:"known"`
}

func (m money) rates(known bool) MoneyRates {
	reported := m.sum(moneyReported)
	return MoneyRates{
		Reported: reported, Refused: reported - m[moneyKey{moneyReported, reportKept}],
		Settled: m.sum(moneySettled), Due: m.sum(moneyDue), Known: known,
	}
}

const (
	// moneyWindow is over which time payments are compared, and moneyLeast how many must be wrong in it: a shop may have
	// a few payments a minute.
	moneyWindow, moneyLeast = 2 * time.Minute, 5
	// moneyShare is the share of the reports that may be refused, and of the payments that may be due for refund.
	moneyShare = 0.05
	// unauthorizedShare is that of reports with a wrong token, which strangers can send, too.
	unauthorizedShare = 0.3
)

// moneyAt is what one round has counted.
type moneyAt struct {
	at    time.Time
	fresh money
}

// refusedBecause says what is wrong with reports of money, by their outcome.
var refusedBecause = map[string]string{
	reportUnauthorized: "have a token or a signature that is not valid",
	"forbidden":        "have a token whose role is not cashier",
	"invalid":          "cannot be read",
	"unavailable":      "are not kept: Postgres does not answer, or too many come at once",
}

func (t *troubles) checkPayments(fresh money) {
	t.money = append(slices.DeleteFunc(t.money, func(m moneyAt) bool {
		return t.now.Sub(m.at) >= moneyWindow
	}), moneyAt{t.now, fresh})
	all := money{}
	for _, one := range t.money {
		for key, n := range one.fresh {
			all[key] += n
		}
	}
	reported, decided := all.sum(moneyReported), all.sum(moneySettled, moneyUnclear, moneyDue)
	for key, n := range all {
		share := moneyShare
		if key.of == reportUnauthorized {
			share = unauthorizedShare
		}
		switch {
		case n < moneyLeast:
		case key.kind == moneyReported && key.of != reportKept && n > share*reported:
			t.raise(paymentsRefused, key.of, "%.0f of %.0f reports in two minutes %s", n, reported, refusedBecause[key.of])
		case key.kind == moneyDue && n > share*decided:
			t.raise(paymentsRefused, key.of, "%.0f of %.0f payments in two minutes are due for refund: %s", n, decided, key.of)
		}
	}
}

// Unpaid are the orders of a sale that wait for money, by when their time to pay is over. It is without the grace.
type Unpaid struct {
	// InMinute and InFive end within a minute and within five, each counted up to 1,000.
	InMinute int64 `json:"in_minute"`
	InFive   int64 `json:"in_five"`
	// LastTurn is the last turn to pay, zero without a pace, or if it has come.
	LastTurn time.Time `json:"last_turn,omitzero"`
	// Settled and Due are payments per second over the last minute, or over less if there are many.
	Settled float64 `json:"settled"`
	Due     float64 `json:"due"`
}

// unpaidMost is how many orders of a sale fleet/unpaid.sql counts, and paidMost how many payments.
const unpaidMost, paidMost = 1000, 200

// add adds up sales.
func (u *Unpaid) add(more Unpaid) {
	u.InMinute, u.InFive = u.InMinute+more.InMinute, u.InFive+more.InFive
	u.Settled, u.Due = u.Settled+more.Settled, u.Due+more.Due
	if more.LastTurn.After(u.LastTurn) {
		u.LastTurn = more.LastTurn
	}
}

// lookAtUnpaid counts the orders of the followed sales whose time to pay ends soon.
func (f *Fleet) lookAtUnpaid(ctx context.Context) {
	f.mu.Lock()
	var ids []uuid.UUID
	for i := range f.sales.listed {
		if sale := &f.sales.listed[i]; sale.PaymentWindow > 0 && !sale.Archived && !sale.Retired {
			ids = append(ids, sale.ID)
		}
	}
	f.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	type row struct {
		SaleID           uuid.UUID
		InMinute, InFive int64
		LastTurn         zeronull.Timestamptz
		Settled, Due     float64
	}
	// Its error comes with the rows.
	rows, _ := f.config.Catalog.Pool.Query(limited, sql.FleetUnpaid, ids, unpaidMost, paidMost)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			f.config.Logger.Warn("counting the unpaid orders takes too long", "sales", len(ids))
		}
		f.unpaid = nil
		return
	}
	f.unpaid = make(map[uuid.UUID]Unpaid, len(found))
	for _, r := range found {
		f.unpaid[r.SaleID] = Unpaid{r.InMinute, r.InFive, time.Time(r.LastTurn), r.Settled, r.Due}
	}
}

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
		// Its error comes with the row.
		rows, _ := f.config.Catalog.Pool.Query(limited, sql.FleetDesk, rebuildSilence.Seconds())
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
	rows, _ := f.config.Catalog.Pool.Query(limited, sql.FleetFunnel, ids) // its error comes with the rows
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
