package limits

import (
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// job is an order in asynq and River: the same data as the event in Stampede's stream.
type job struct {
	OrderID    uuid.UUID `json:"order_id"`
	SaleID     uuid.UUID `json:"sale_id"`
	UserID     string    `json:"user_id"`
	Quantity   int64     `json:"quantity"`
	Epoch      int64     `json:"epoch"`
	Sequence   int64     `json:"sequence"`
	ReservedAt int64     `json:"reserved_at_ms"`
}

// Kind implements river.JobArgs.
func (job) Kind() string { return "order" }

func (j job) event() order.OrderReserved {
	at := time.UnixMilli(j.ReservedAt).UTC()
	return order.OrderReserved{
		OrderID: j.OrderID, SaleID: j.SaleID, UserID: j.UserID, Quantity: j.Quantity,
		Epoch: j.Epoch, Sequence: j.Sequence, ReservedAt: at,
	}
}

// jobs returns orders of distinct buyers for one unit each.
func jobs(sale uuid.UUID, number int) []job {
	all := make([]job, number)
	for i := range all {
		all[i] = job{
			OrderID: order.NewOrderID(sale), SaleID: sale, UserID: "buyer-" + uuid.NewString(), Quantity: 1,
			Epoch: 1, Sequence: int64(i + 1), ReservedAt: time.Now().UnixMilli(),
		}
	}
	return all
}
