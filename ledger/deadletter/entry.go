package deadletter

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"stampede/reservation/order"
	"stampede/stream"
)

// The fields of a dead letter are stored as JSON, [[name, value], …] in the order of the entry: readable in psql, and
// lossless. A name is a plain string, a value is {"text": …}. Either is {"base64": …} if it is not UTF-8 or has a zero
// byte, which JSON or Postgres cannot hold.

type storedValue struct {
	Text   *string `json:"text,omitempty"`
	Base64 []byte  `json:"base64,omitempty"`
}

func toStored(s string) storedValue {
	if isText(s) {
		return storedValue{Text: &s}
	}
	return storedValue{Base64: []byte(s)}
}

func (v storedValue) string() string {
	if v.Text != nil {
		return *v.Text
	}
	return string(v.Base64)
}

func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func encodeFields(fields []stream.Field) ([]byte, error) {
	stored := make([][2]any, len(fields))
	for i, f := range fields {
		stored[i] = [2]any{f.Name, toStored(f.Value)}
		if !isText(f.Name) {
			stored[i][0] = toStored(f.Name)
		}
	}
	return json.Marshal(stored)
}

func decodeFields(data []byte) ([]stream.Field, error) {
	var stored [][2]json.RawMessage
	if err := json.Unmarshal(data, &stored); err != nil {
		return nil, fmt.Errorf("fields: %w", err)
	}
	fields := make([]stream.Field, len(stored))
	for i, pair := range stored {
		var value storedValue
		if err := json.Unmarshal(pair[1], &value); err != nil {
			return nil, fmt.Errorf("value of field %d: %w", i, err)
		}
		fields[i].Value = value.string()
		if err := json.Unmarshal(pair[0], &fields[i].Name); err == nil {
			continue
		}
		var name storedValue
		if err := json.Unmarshal(pair[0], &name); err != nil {
			return nil, fmt.Errorf("name of field %d: %w", i, err)
		}
		fields[i].Name = name.string()
	}
	return fields, nil
}

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
