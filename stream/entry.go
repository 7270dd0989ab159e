package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
)

// IsWrongType reports whether Redis answered that a key holds another type.
func IsWrongType(err error) bool {
	var answered redis.Error
	return errors.As(err, &answered) && strings.HasPrefix(answered.Error(), "WRONGTYPE")
}

// The fields of a stream entry that watermill-redisstream's DefaultMarshallerUnmarshaller writes and reads.
const (
	FieldUUID     = redisstream.UUIDHeaderKey
	FieldMetadata = "metadata"
	FieldPayload  = "payload"
)

// errEntryGone is returned for an entry that is no longer in its stream.
var errEntryGone = errors.New("stream entry is gone")

// Entry is a stream entry as Redis holds it, decodable or not.
type Entry struct {
	Stream string
	ID     string
	// Fields are in the order of the entry. A name may occur twice, and neither names nor values
	// need be UTF-8.
	Fields []Field
	// Deliveries is how often the entry was given to a consumer, as Redis counts it.
	Deliveries int64
}

// Field is one name and value of an Entry.
type Field struct{ Name, Value string }

// Field is the value of the first field of that name, "" if there is none.
func (e Entry) Field(name string) string {
	for _, f := range e.Fields {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// entryTime is when an entry was appended, by Redis's clock, which its id holds.
func entryTime(id string) (at time.Time, ok bool) {
	ms, _, _ := strings.Cut(id, "-")
	appended, err := strconv.ParseInt(ms, 10, 64)
	return time.UnixMilli(appended), err == nil
}

// ReadEntry reads an entry from its stream. It uses the plain reply because go-redis makes a map of
// an entry, which loses the order of fields and repeated ones. The error is errEntryGone if the
// stream does not hold the entry.
func ReadEntry(ctx context.Context, rdb redis.UniversalClient, stream, id string) (Entry, error) {
	reply, err := rdb.Do(ctx, "XRANGE", stream, id, id).Slice()
	if err != nil {
		return Entry{}, fmt.Errorf("read entry %s of %s: %w", id, stream, err)
	}
	if len(reply) == 0 {
		return Entry{}, fmt.Errorf("read entry %s of %s: %w", id, stream, errEntryGone)
	}
	if pair, ok := reply[0].([]any); ok && len(pair) == 2 {
		if flat, ok := pair[1].([]any); ok {
			return Entry{Stream: stream, ID: id, Fields: pairs(flat)}, nil
		}
	}
	return Entry{}, fmt.Errorf("read entry %s of %s: unexpected reply %T", id, stream, reply[0])
}

func pairs(flat []any) []Field {
	fields := make([]Field, 0, len(flat)/2)
	for i := 0; i+1 < len(flat); i += 2 {
		name, _ := flat[i].(string)
		value, _ := flat[i+1].(string)
		fields = append(fields, Field{name, value})
	}
	return fields
}

// FieldsOf returns the fields sorted by name, for an entry that is gone.
func FieldsOf(values map[string]any) []Field {
	fields := make([]Field, 0, len(values))
	for name, value := range values {
		text, _ := value.(string)
		fields = append(fields, Field{name, text})
	}
	slices.SortFunc(fields, func(a, b Field) int { return strings.Compare(a.Name, b.Name) })
	return fields
}

// DecodeEntry decodes the message of an entry as watermill-redisstream does.
func DecodeEntry(id string, values map[string]any, deliveries int64) (*message.Message, error) {
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(values)
	if err != nil {
		return nil, err
	}
	if msg.Metadata == nil { // a msgpack nil in place of the map
		msg.Metadata = message.Metadata{}
	}
	// These two describe this delivery, and replace values of the entry with the same names.
	msg.Metadata[order.MetaEntryID] = id
	msg.Metadata[order.MetaDeliveries] = strconv.FormatInt(deliveries, 10)
	return msg, nil
}

// Values are the entry of a message with these orders of one sale, as the script appends it in the
// epoch of the first.
func Values(events ...order.OrderReserved) map[string]any {
	first := events[0]
	return map[string]any{
		FieldUUID: order.CompactID(first.OrderID),
		FieldMetadata: order.ReservedMetadata(first.SaleID, first.Epoch, len(events), first.Lines != "",
			order.TracesOf(events...)...),
		FieldPayload: string(order.ReservedPayload(first.Epoch, events...)),
	}
}

// ordersIn returns how many orders the entry holds, or 1 for any other message.
func ordersIn(values map[string]any) int {
	payload, _ := values[FieldPayload].(string)
	return order.CountReserved(payload)
}
