package ledger

import (
	"context"
	"fmt"
	"math"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file lists payments.

// ListPayments returns at most limit payments that match, in the order of their latest events, after that position, or
// from the beginning if that is 0: positions of an archive of another database are negative. next is where the next
// page begins, or 0 at the end.
func (l *Reader) ListPayments(
	ctx context.Context, f order.PaymentFilter, after int64, limit int,
) (payments []order.Payment, next int64, err error) {
	if after == 0 {
		after = math.MinInt64
	}
	query, args := sql.PaymentListOfOrder, []any{after, limit + 1, f.Order, zeronull.Text(f.State), zeronull.UUID(f.Sale)}
	if f.Order == uuid.Nil {
		var open []order.PaymentState
		var ended []order.PaymentEvent
		for _, state := range order.PaymentStates() {
			switch {
			case f.State != "" && state != f.State:
			case state.IsOpen():
				open = append(open, state)
			default:
				ended = append(ended, state.EventOf())
			}
		}
		query, args = sql.PaymentList, []any{after, limit + 1, zeronull.UUID(f.Sale), open, ended}
	}
	rows, _ := l.pool.Query(ctx, query, args...) // rows carry the error
	payments, err = pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return nil, 0, fmt.Errorf("list payments: %w", err)
	}
	if len(payments) > limit {
		payments = payments[:limit]
		next = payments[limit-1].Position
	}
	return payments, next, nil
}

// OpenFilter selects payments that are in one of the open states (order.PaymentState.IsOpen). The other members select
// all if they are zero.
type OpenFilter struct {
	State    order.PaymentState
	Sale     uuid.UUID
	Reason   order.PaymentReason
	Currency string
	// Until: they are in their state since then, or longer.
	Until time.Time
}

// OpenPayment is a payment that somebody has to do something about.
type OpenPayment struct {
	order.Payment
	// SaleName is empty without a sale.
	SaleName string
	// Late is how long after the payment deadline of its order the money was reported, if that is why it is due for
	// refund.
	Late time.Duration
}

// OpenPayments returns at most limit payments that match, in the order of their latest events, after that position, or
// from the beginning if that is 0. next is where the next page begins, or 0 at the end. It looks at scanMax payments at
// most, so that a page may be short, or empty, and not be the last.
func (l *Reader) OpenPayments(
	ctx context.Context, f OpenFilter, after int64, limit int,
) (found []OpenPayment, next int64, err error) {
	if after == 0 {
		after = math.MinInt64
	}
	scan := limit + 1 // as in scanned
	if f.Reason != "" || f.Currency != "" || !f.Until.IsZero() {
		scan = max(scanMax, scan)
	}
	rows, _ := l.pool.Query(ctx, sql.PaymentOpen, f.State, after, scan, limit+1, zeronull.UUID(f.Sale),
		zeronull.Text(f.Currency), zeronull.Text(f.Reason), zeronull.Timestamptz(f.Until)) // rows carry the error
	type scannedRow struct {
		paymentRow
		SaleName    string
		LateSeconds int64
		Matches     bool
		N           int
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[scannedRow])
	if err != nil {
		return nil, 0, fmt.Errorf("list open payments: %w", err)
	}
	page, last := pg.ScannedPage(all, limit, scan, func(row *scannedRow) (int, bool) { return row.N, row.Matches })
	for i := range page {
		row := &page[i]
		found = append(found, OpenPayment{row.payment(), row.SaleName, time.Duration(row.LateSeconds) * time.Second})
	}
	if last == nil {
		return found, 0, nil
	}
	end := last.payment()
	if len(found) < limit && !f.Until.IsZero() && end.UpdatedAt.After(f.Until) { // later ones are younger
		return found, 0, nil
	}
	return found, end.Position, nil
}

// SearchPayments returns at most limit payments whose references begin with the text, in the order of the references,
// and the one in an archive that has it as its reference.
func (l *Reader) SearchPayments(ctx context.Context, text string, limit int) ([]order.Payment, error) {
	rows, _ := l.pool.Query(ctx, sql.PaymentSearch, text, text+string(utf8.MaxRune), limit) // rows carry the error
	found, err := pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return nil, fmt.Errorf("search payments: %w", err)
	}
	archived, err := findArchived(ctx, l.pool, text)
	return append(found, archived...), err
}

// RefundsDue are the refunds that are due in a currency.
type RefundsDue struct {
	// Currency is empty for payments without an amount.
	Currency string
	// Payments is at most refundsCounted.
	Payments int64
	// Amount is their sum, in minor units.
	Amount int64
	// Since is when the oldest of them became due.
	Since time.Time
}

// refundsCounted is how many refunds of a currency payment/due.sql counts.
const refundsCounted = 10_000

// AtLeast is true if more refunds may be due than were counted.
func (r RefundsDue) AtLeast() bool { return r.Payments >= refundsCounted }

// RefundsDue returns the refunds that are due, by currency.
func (l *Reader) RefundsDue(ctx context.Context) ([]RefundsDue, error) {
	rows, _ := l.pool.Query(ctx, sql.PaymentDue) // rows carry the error
	due, err := pgx.CollectRows(rows, pgx.RowToStructByName[RefundsDue])
	if err != nil {
		return nil, fmt.Errorf("sum refunds: %w", err)
	}
	return due, nil
}

// Below are payments whose events are in the files of archived sales. Postgres keeps what became of each
// (archived_payments), so that a late repeat of its report is known as one.

// findArchived returns what became of those of the payments that are in archives.
func findArchived(ctx context.Context, on pg.Querier, references ...string) ([]order.Payment, error) {
	rows, _ := on.Query(ctx, sql.PaymentFindArchived, references) // rows carry the error
	return readArchived(rows)
}

func readArchived(rows pgx.Rows) ([]order.Payment, error) {
	found, err := pgx.CollectRows(rows, scanPayment)
	if err != nil {
		return nil, fmt.Errorf("look for payments in archives: %w", err)
	}
	for i := range found {
		found[i].State = order.PaymentEvent(found[i].State).State() // the row has the type of the last event
	}
	return found, nil
}

// queueArchived queues the look for the payments whose first events were inserted, or which their buyers have claimed.
// It follows the insertion: whoever archives one of them now has deleted its events before that, and has remembered it
// before. A look before the insertion could miss it.
func queueArchived(batch *pgx.Batch, inserted []*order.Payment) {
	references := []string{}
	for _, p := range inserted {
		if p.Version == 1 {
			references = append(references, p.Reference, p.KeyOfClaim())
		}
	}
	batch.Queue(sql.PaymentFindArchived, references)
}

// readArchived reads the answer to queueArchived. If there are such payments, the reports of them are repeats: the
// error is errReadAgain, and the batch knows them from then on.
func (b *paymentBatch) readArchived(rows pgx.Rows) error {
	found, err := readArchived(rows)
	if err != nil || len(found) == 0 {
		return err
	}
	for _, p := range b.events {
		for i := range found {
			if found[i].Reference == p.Reference || found[i].Reference == p.KeyOfClaim() {
				b.archived[p.Reference] = &found[i]
			}
		}
	}
	return errReadAgain
}
