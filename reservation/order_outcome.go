package reservation

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// OrderOutcome says that Postgres has an order at this version. It is told on the stream Keys.Outcomes, once and to
// whoever listens: so it may be missed, and whoever acts on it looks the order up.
type OrderOutcome struct {
	OrderID uuid.UUID `json:"order_id"`
	Status  Status    `json:"status"`
	Version int       `json:"version"`
}

// AppendOutcomes appends the payload of a message to dst: what a transaction has decided, in one.
func AppendOutcomes(dst []byte, outcomes []OrderOutcome) []byte {
	dst = append(dst, `{"orders":[`...)
	for i, o := range outcomes {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"order_id":"`...)
		dst = AppendID(dst, o.OrderID)
		dst = append(dst, `","status":"`...)
		dst = append(dst, o.Status...)
		dst = append(dst, `","version":`...)
		dst = append(strconv.AppendInt(dst, int64(o.Version), 10), '}')
	}
	return append(dst, "]}"...)
}

// DecodeOutcomes reads the payload of a message. The error wraps ErrUndecodable.
func DecodeOutcomes(payload []byte) ([]OrderOutcome, error) {
	var told struct {
		Orders []OrderOutcome `json:"orders"`
	}
	if err := json.Unmarshal(payload, &told); err != nil {
		return nil, fmt.Errorf("%w: outcomes: %w", ErrUndecodable, err)
	}
	return told.Orders, nil
}
