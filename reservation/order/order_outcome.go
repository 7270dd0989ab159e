package order

import (
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
)

// OrderOutcome announces that Postgres has an order at this version. It is published once on the
// stream Keys.Outcomes and may be missed, so a reader looks the order up.
type OrderOutcome struct {
	OrderID uuid.UUID
	Status  Status
	Version int
}

// outcomesPayload is the outcomes of a transaction on the wire. Nearly all of them are equal, so
// each order takes only its id.
type outcomesPayload struct {
	Orders []ordersTogether `json:"orders"`
}

// ordersTogether are orders with the same outcome.
type ordersTogether struct {
	Status  Status `json:"status"`
	Version int    `json:"version"`
	// IDs are the concatenated 16-byte ids of the orders; in JSON they are base64 (RFC 4648).
	IDs []byte `json:"ids"`
}

// AppendOutcomes appends the payload of a message to dst. It groups equal outcomes and keeps their
// order.
func AppendOutcomes(dst []byte, outcomes []OrderOutcome) []byte {
	groups := []ordersTogether{} // not nil, which would be null
	for i, o := range outcomes {
		at := 0
		for at < len(groups) && (groups[at].Status != o.Status || groups[at].Version != o.Version) {
			at++
		}
		if at == len(groups) {
			groups = append(groups, ordersTogether{o.Status, o.Version, make([]byte, 0, len(uuid.UUID{})*(len(outcomes)-i))})
		}
		groups[at].IDs = append(groups[at].IDs, o.OrderID[:]...)
	}
	payload, err := json.Marshal(outcomesPayload{groups})
	if err != nil {
		panic(err) // cannot fail for words, numbers and bytes
	}
	return append(dst, payload...)
}

// DecodeOutcomes reads the payload of a message. The error wraps ErrUndecodable.
func DecodeOutcomes(payload []byte) ([]OrderOutcome, error) {
	var message outcomesPayload
	if err := json.Unmarshal(payload, &message); err != nil {
		return nil, fmt.Errorf("%w: outcomes: %w", ErrUndecodable, err)
	}
	const size = len(uuid.UUID{})
	n := 0
	for _, g := range message.Orders {
		if g.Status == "" || g.Version < 1 || len(g.IDs) == 0 || len(g.IDs)%size != 0 {
			return nil, fmt.Errorf("%w: outcomes: %d bytes of ids of orders that are %q at version %d", ErrUndecodable,
				len(g.IDs), g.Status, g.Version)
		}
		n += len(g.IDs) / size
	}
	outcomes := make([]OrderOutcome, 0, n)
	for _, g := range message.Orders {
		for ids := g.IDs; len(ids) > 0; ids = ids[size:] {
			outcomes = append(outcomes, OrderOutcome{OrderID: uuid.UUID(ids[:size]), Status: g.Status, Version: g.Version})
		}
	}
	return outcomes, nil
}
