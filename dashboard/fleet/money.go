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
	rows, _ := f.config.Pool.Query(limited, sql.FleetUnpaid, ids, unpaidMost, paidMost) // its error comes with the rows
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
