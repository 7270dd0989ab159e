package deadletter

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"stampede/reservation/order"
	"stampede/stream"
)

// errNoOrder is returned for an entry that names no order.
var errNoOrder = errors.New("the entry names no order")

// errIncompleteOrder is returned for an entry that names orders of which some cannot be read.
var errIncompleteOrder = errors.New("the entry names orders that cannot be read")

// OrdersOf reads the reservations of an entry. Unlike a worker, it accepts unknown versions. The error is errNoOrder
// for an entry that is no reservation; with errIncompleteOrder it returns the orders that can be read.
func OrdersOf(entry stream.Entry) ([]order.OrderReserved, error) {
	msg, err := decode(entry)
	var events []order.OrderReserved
	name := ""
	if err == nil {
		name = msg.Metadata.Get(order.MetaEvent)
		events, err = order.ReadReserved(msg)
	}
	switch {
	case err == nil:
		return events, nil
	case name == "" && !namesOrder(entry.Field(stream.FieldPayload)), name != "" && name != string(order.EventReserved):
		return nil, errNoOrder
	}
	return events, fmt.Errorf("%w: %w", errIncompleteOrder, err)
}

// decode decodes an entry as a worker does.
func decode(entry stream.Entry) (*message.Message, error) {
	values := make(map[string]any, len(entry.Fields))
	for _, f := range entry.Fields {
		values[f.Name] = f.Value
	}
	return stream.DecodeEntry(entry.ID, values, entry.Deliveries)
}

// namesOrder reports whether a line of the payload is a reservation.
func namesOrder(payload string) bool {
	for line := range strings.SplitSeq(payload, "\n") {
		if _, _, err := order.ParseReservation(line); err == nil {
			return true
		}
	}
	return false
}

// onlyOrder returns the entry with a single one of its orders, as Replay may append it. It returns false if the order
// cannot be read.
func onlyOrder(entry stream.Entry, id uuid.UUID) (stream.Entry, bool) {
	events, _ := OrdersOf(entry)
	at := slices.IndexFunc(events, func(e order.OrderReserved) bool { return e.OrderID == id })
	if at < 0 {
		return stream.Entry{}, false
	}
	only := stream.Values(events[at])
	entry.Fields = slices.Clone(entry.Fields)
	for i, f := range entry.Fields {
		if value, changed := only[f.Name].(string); changed {
			entry.Fields[i].Value = value
		}
	}
	return entry, true
}
