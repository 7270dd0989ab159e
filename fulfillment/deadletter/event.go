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

// errNoOrder is returned for an entry that names no order.
var errNoOrder = errors.New("the entry names no order")

// errIncompleteOrder is returned for an entry that names an order whose sale, user, quantity or epoch cannot be read.
var errIncompleteOrder = errors.New("the entry lacks the buyer, the sale or the quantity")

// OrderOf reads the reservation of an entry. Unlike a worker, it accepts unknown versions and damaged metadata. The
// error is errNoOrder for an entry that is no reservation, and errIncompleteOrder if a required field is missing.
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
		return order.OrderReserved{}, fmt.Errorf("%w: %w", errIncompleteOrder, err)
	}
	// Time and sequence are optional: the order can be rejected without them.
	event.ReservedAt = reservedAtOf(entry)
	if seq, err := strconv.ParseInt(entry.Field(order.MetaSequence), 10, 64); err == nil && seq > 0 {
		event.Sequence = seq
	}
	return event, nil
}

// reservedOf decodes the event of an entry as a worker does. Its error wraps order.ErrUndecodable.
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

// eventNameOf returns the event name in the metadata of an entry, or "".
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

// readOrder reads the order from the payload of a reservation of any version.
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
		OrderID: p.OrderID, SaleID: p.SaleID, UserID: p.UserID, Quantity: p.Quantity, Epoch: p.Epoch,
	}, nil
}

// reservedAtOf returns the time that reserve.lua added to the entry, or else the one in the entry's id.
func reservedAtOf(entry stream.Entry) time.Time {
	if ms, err := strconv.ParseInt(entry.Field(order.MetaReservedAt), 10, 64); err == nil && ms > 0 {
		return time.UnixMilli(ms).UTC()
	}
	at, _ := stream.EntryTime(entry.ID)
	return at.UTC()
}
