package deadletter

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/stream"
	"stampede/reservation/order"
)

// errNoOrder is returned for an entry that names no order for which anybody could be waiting.
var errNoOrder = errors.New("the entry names no order")

// errUnreadable is returned for an entry that reserves units, or names an order, and from which
// nobody can read who bought what.
var errUnreadable = errors.New("the entry does not tell who bought what")

// OrderOf reads the reservation of an entry, and does not mind what a worker minds: a version that it
// does not know, or a damaged envelope. The error is errNoOrder if the entry is something else, and
// errUnreadable if it is not and says too little.
func OrderOf(entry stream.Entry) (order.OrderReserved, error) {
	event, err := reservedOf(entry)
	if !errors.Is(err, order.ErrUndecodable) {
		return event, err
	}
	payload := []byte(entry.Field(stream.FieldPayload))
	name := eventNameOf(entry)
	switch {
	case name == string(order.EventReserved):
	case name != "", !namesOrder(payload):
		return order.OrderReserved{}, errNoOrder
	}
	if event, err = readOrder(payload); err != nil {
		return order.OrderReserved{}, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	// When and where in the sale is worth knowing, and not worth refusing anything.
	event.ReservedAt = reservedAtOf(entry)
	if place, err := strconv.ParseInt(entry.Field(order.MetaSequence), 10, 64); err == nil && place > 0 {
		event.Sequence = place
	}
	return event, nil
}

// reservedOf reads the event of an entry as a subscriber would have. Its error wraps
// reservation.ErrUndecodable if the entry has none.
func reservedOf(entry stream.Entry) (order.OrderReserved, error) {
	values := make(map[string]any, len(entry.Fields))
	for _, f := range entry.Fields {
		values[f.Name] = f.Value
	}
	msg, err := stream.DecodeEntry(entry.ID, values, entry.Deliveries)
	if err != nil {
		return order.OrderReserved{}, fmt.Errorf("%w: %w", order.ErrUndecodable, err)
	}
	return order.DecodeReserved(msg)
}

// eventNameOf is the event that the metadata of an entry names, "" if there is none to be read.
func eventNameOf(entry stream.Entry) string {
	msg, err := stream.DecodeEntry(entry.ID, map[string]any{
		stream.FieldUUID:     "",
		stream.FieldMetadata: entry.Field(stream.FieldMetadata),
	}, entry.Deliveries)
	if err != nil {
		return ""
	}
	return msg.Metadata.Get(order.MetaEvent)
}

func namesOrder(payload []byte) bool {
	var p struct {
		OrderID json.RawMessage `json:"order_id"`
	}
	return json.Unmarshal(payload, &p) == nil && p.OrderID != nil
}

// readOrder reads from the payload of a reservation, of whatever version, who bought what.
func readOrder(payload []byte) (order.OrderReserved, error) {
	var p struct {
		OrderID  uuid.UUID `json:"order_id"`
		SaleID   uuid.UUID `json:"sale_id"`
		UserID   string    `json:"user_id"`
		Quantity int64     `json:"quantity"`
		Epoch    int64     `json:"epoch"`
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		return order.OrderReserved{}, fmt.Errorf("payload: %w", err)
	}
	if p.OrderID == uuid.Nil || p.SaleID == uuid.Nil || p.Quantity < 1 || p.Quantity > order.MaxPerOrder || p.Epoch < 1 {
		return order.OrderReserved{}, errors.New("payload lacks an id, or its numbers are out of range")
	}
	if err := order.ValidateUser(p.UserID); err != nil {
		return order.OrderReserved{}, fmt.Errorf("payload: %w", err)
	}
	return order.OrderReserved{
		OrderID: p.OrderID, SaleID: p.SaleID, UserID: p.UserID, Quantity: p.Quantity,
		Epoch: p.Epoch,
	}, nil
}

// reservedAtOf is the time that the script added to the entry, or else the one in the entry's id.
func reservedAtOf(entry stream.Entry) time.Time {
	if ms, err := strconv.ParseInt(entry.Field(order.MetaReservedAt), 10, 64); err == nil && ms > 0 {
		return time.UnixMilli(ms).UTC()
	}
	at, _ := stream.EntryTime(entry.ID)
	return at.UTC()
}
