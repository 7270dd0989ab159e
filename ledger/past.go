package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/sql"
)

// PastAnswer returns the answer to a purchase in a sale that is over and of which Redis has no buyers any more. It is
// the one that lua/reserve.lua gave as long as Redis had them: a repeated request gets its order, and every other one
// Ended. Every order of such a sale is in Postgres, unless it is archived. Every error is one of Postgres.
func (l *Ledger) PastAnswer(ctx context.Context, r reservation.Request) (reservation.Answer, error) {
	key := r.KeyFingerprint()
	rows, _ := l.pool.Query(ctx, sql.LedgerPastOrders, r.Sale, r.User, zeronull.Text(key)) // rows carry the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[pastOrder])
	if err != nil {
		return reservation.Answer{}, fmt.Errorf("find the orders of user=%s in sale=%s: %w", r.User, r.Sale, err)
	}
	answer := reservation.Answer{Verdict: reservation.Ended}
	for i := range found {
		o := &found[i]
		switch isSame := key != "" && o.KeyFingerprint == key; {
		case isSame && o.Quantity != r.Quantity:
			return reservation.Answer{Verdict: reservation.KeyReused}, nil
		case isSame && o.Status.Live():
			return reservation.Answer{Verdict: reservation.Replayed, Reservation: o.reservation()}, nil
		case isSame:
			return reservation.Answer{
				Verdict: reservation.OrderEnded, Status: o.Status,
				Reservation: order.Reservation{OrderID: o.ID, Quantity: o.Quantity},
			}, nil
		default: // a live order of another request
			answer = reservation.Answer{Verdict: reservation.AlreadyPurchased, Reservation: o.reservation()}
		}
	}
	return answer, nil
}

// pastOrder is an order as ledger/past_orders.sql returns it.
type pastOrder struct {
	ID                        uuid.UUID
	Quantity, Sequence, Epoch int64
	ReservedAt                time.Time
	Status                    order.Status
	KeyFingerprint            string
}

func (o *pastOrder) reservation() order.Reservation {
	return order.Reservation{
		OrderID: o.ID, Quantity: o.Quantity, Sequence: o.Sequence, Epoch: o.Epoch, ReservedAt: o.ReservedAt.UTC(),
	}
}
