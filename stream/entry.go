package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/lua"
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

// delivery is an entry that is held here. It belongs to the reader until it is delivered, then to
// the goroutine that follows it; shared state is in the entryTable.
type delivery struct {
	id     string
	values map[string]any
	// orders is how many the entry holds.
	orders int
	// deliveries is how often the entry was given to a consumer, including this time.
	deliveries int64
	// refusals is how often the message was nacked here.
	refusals int
	notes    notes

	msg    *message.Message
	cancel context.CancelFunc // of the message's context
}

// parkedMax bounds the entries that wait to become dead letters; beyond it reading stops. They wait
// while the store of dead letters is away, and a faulty producer may fill the stream meanwhile.
const parkedMax = 1000

// entryTable holds every entry of one stream that is in this process: read, and not yet
// acknowledged in Redis. It recognises entries that are read a second time.
//
// Invariant: the orders of held entries that are not parked are at most max and those of one page,
// because only the reader adds and it asks for room before it reads.
type entryTable struct {
	max   int
	gauge prometheus.Gauge
	// freed has a value after entries were released or parked.
	freed chan struct{}

	mu      sync.Mutex
	entries map[string]*heldEntry
	// orders are those of entries that are not parked; parked is the number of the others.
	orders, parked int
}

// heldEntry is the table's record of an entry.
type heldEntry struct {
	orders int
	// renewed is when the lease was last renewed.
	renewed time.Time
	// parked entries wait to become dead letters.
	parked bool
	// leaseEnded entries are pending for another consumer, or for none: there is no lease to renew.
	leaseEnded bool
}

func newEntryTable(limit int, gauge prometheus.Gauge) *entryTable {
	return &entryTable{max: limit, gauge: gauge, freed: make(chan struct{}, 1), entries: make(map[string]*heldEntry)}
}

// hold adds the entries of a page and returns them in order, without those already held.
func (t *entryTable) hold(page []redis.XMessage) []*delivery {
	now := time.Now()
	held := make([]*delivery, 0, len(page))
	entries := make([]heldEntry, len(page))
	t.mu.Lock()
	for i, entry := range page {
		if _, known := t.entries[entry.ID]; known {
			continue
		}
		orders := ordersIn(entry.Values)
		entries[i] = heldEntry{orders: orders, renewed: now}
		t.entries[entry.ID] = &entries[i]
		t.orders += orders
		held = append(held, &delivery{id: entry.ID, values: entry.Values, orders: orders, deliveries: 1})
	}
	t.mu.Unlock()
	t.gauge.Add(float64(len(held)))
	return held
}

// release removes entries that are acknowledged or left to other consumers.
func (t *entryTable) release(ids ...string) {
	n := 0
	t.mu.Lock()
	for _, id := range ids {
		if held, known := t.entries[id]; known {
			delete(t.entries, id)
			n++
			if held.parked {
				t.parked--
			} else {
				t.orders -= held.orders
			}
		}
	}
	t.mu.Unlock()
	t.gauge.Sub(float64(n))
	t.signal()
}

// park takes an entry that waits to become a dead letter out of the count of held ones.
func (t *entryTable) park(id string) {
	t.mu.Lock()
	if held, known := t.entries[id]; known && !held.parked {
		held.parked = true
		t.parked++
		t.orders -= held.orders
	}
	t.mu.Unlock()
	t.signal()
}

// awaitRoom returns how many orders may be added, or 0 if stop was closed first.
func (t *entryTable) awaitRoom(stop <-chan struct{}) int {
	for {
		if room := t.room(); room > 0 {
			return room
		}
		select {
		case <-t.freed:
		case <-stop:
			return 0
		}
	}
}

func (t *entryTable) room() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.parked >= parkedMax {
		return 0
	}
	return t.max - t.orders
}

func (t *entryTable) signal() {
	select {
	case t.freed <- struct{}{}:
	default:
	}
}

// ids returns a copy of the ids that are held now.
func (t *entryTable) ids() map[string]struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := make(map[string]struct{}, len(t.entries))
	for id := range t.entries {
		ids[id] = struct{}{}
	}
	return ids
}

// due returns the entries whose leases were not renewed since then.
func (t *entryTable) due(since time.Time) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ids []string
	for id, held := range t.entries {
		if !held.leaseEnded && held.renewed.Before(since) {
			ids = append(ids, id)
		}
	}
	return ids
}

// renew records when the entry's lease was renewed.
func (t *entryTable) renew(id string, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if held, known := t.entries[id]; known {
		held.renewed = at
	}
}

// endLease records that the entry has no lease to renew. It returns false if that was known, or if
// the entry is not held any more.
func (t *entryTable) endLease(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	held, known := t.entries[id]
	if !known || held.leaseEnded {
		return false
	}
	held.leaseEnded = true
	return true
}

// clear releases all entries, and returns their number.
func (t *entryTable) clear() int {
	t.mu.Lock()
	n := len(t.entries)
	clear(t.entries)
	t.orders, t.parked = 0, 0
	t.mu.Unlock()
	t.gauge.Sub(float64(n))
	return n
}

// Announcer is a client whose XAdd has Redis write the message neither to its append-only file nor to its replicas. It
// is for the publisher of messages that nothing depends on: they cost Redis no wait for its disk.
type Announcer struct{ redis.UniversalClient }

// XAdd overrides the client's. It heeds Stream, MaxLen and the map of Values: what redisstream.Publisher gives.
func (a Announcer) XAdd(ctx context.Context, message *redis.XAddArgs) *redis.StringCmd {
	args := []any{message.MaxLen}
	values, _ := message.Values.(map[string]any)
	for field, value := range values {
		args = append(args, field, value)
	}
	id, err := lua.Announce.Run(ctx, a.UniversalClient, []string{message.Stream}, args...).Text()
	return redis.NewStringResult(id, err)
}
