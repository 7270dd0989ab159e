package ledger

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"stampede/internal/pg"
	"stampede/reservation/order"
	"stampede/sql"
)

// This file looks for payments whose events are in the files of archived sales. Postgres keeps what became of each
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
