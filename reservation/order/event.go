package order

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
)

// Metadata of a message of the stream. The ingress writes all of it except the last value, which the script adds.
const (
	MetaEvent   = "event"
	metaVersion = "event_version"
	metaSale    = "sale_id"
	metaEpoch   = "epoch"
	// metaCount is how many orders the message holds.
	metaCount = "count"
	// metaTraceParent and metaTraces are only in a message of which a purchase is traced.
	metaTraceParent = "traceparent"
	metaTraces      = "traces"
	// MetaEntryID and MetaDeliveries are set by the subscriber: the position of the entry in its
	// stream, and how often it has been delivered, this time included.
	MetaEntryID    = "stampede_entry_id"
	MetaDeliveries = "stampede_deliveries"
)

// The versions of the message that this code writes and reads. Messages of a sale with items have one of their own, so
// that a worker which does not know items makes dead letters of them.
const (
	reservedVersion      = "2"
	reservedItemsVersion = "3"
)

// shortText and a length of up to 31 are the first byte of a string in msgpack.
const shortText = 0xa0

// ErrUndecodable is returned for a message that is not one of Stampede, or of an unsupported
// version. Retrying does not help: such an entry is a dead letter.
var ErrUndecodable = errors.New("undecodable event")

// OrderReserved records that units of a sale were reserved for a user. It is version 1 of its
// order.
type OrderReserved struct {
	OrderID  uuid.UUID
	SaleID   uuid.UUID
	UserID   string
	Quantity int64
	// Lines are the units by item, whose sum is the quantity; empty in a sale without items.
	Lines Lines
	// Epoch is the epoch of the sale's stock in which the order was accepted.
	Epoch int64
	// ReservedAt is Redis's clock at the decision, and Sequence the place of the order in its sale.
	ReservedAt time.Time
	Sequence   int64
	// KeyFingerprint stands for the idempotency key of the purchase; it is empty if there was none.
	KeyFingerprint string
	// TraceParent is the span below which the order is recorded; it is empty unless the purchase is traced.
	TraceParent string
}

// ReservedMetadata is the metadata of a message with so many orders of a sale in that epoch, a
// msgpack map of strings. Traces are those of orders that are traced.
func ReservedMetadata(sale uuid.UUID, epoch int64, count int, hasItems bool, traces ...Trace) string {
	text := strconv.Itoa(count)
	return ReservedMetadataPrefix(sale, epoch, hasItems, traces...) + string([]byte{shortText + byte(len(text))}) + text
}

// ReservedMetadataPrefix is ReservedMetadata without the last value, the number of orders, which the
// script appends.
func ReservedMetadataPrefix(sale uuid.UUID, epoch int64, hasItems bool, traces ...Trace) string {
	version := reservedVersion
	if hasItems {
		version = reservedItemsVersion
	}
	const shortMap, shortTextMax, text8Max, text8, text16 = 0x80, 31, 255, 0xd9, 0xda
	texts := []string{
		MetaEvent, string(EventReserved), metaVersion, version, metaSale, sale.String(),
		metaEpoch, strconv.FormatInt(epoch, 10),
	}
	if len(traces) > 0 {
		texts = append(texts, metaTraceParent, traces[0].Parent, metaTraces, joinTraces(traces))
	}
	texts = append(texts, metaCount)
	packed := []byte{shortMap + byte((len(texts)+1)/2)}
	for _, text := range texts {
		switch n := len(text); {
		case n <= shortTextMax:
			packed = append(packed, shortText+byte(n))
		case n <= text8Max:
			packed = append(packed, text8, byte(n))
		default:
			packed = append(packed, text16, byte(n>>8), byte(n))
		}
		packed = append(packed, text...)
	}
	return string(packed)
}

// ReservedPayload is the payload of a message with these orders of a sale in that epoch, as the script writes it.
func ReservedPayload(epoch int64, events ...OrderReserved) []byte {
	var text []byte
	for i, e := range events {
		if i > 0 {
			text = append(text, '\n')
		}
		text = append(append(text, e.UserID...), '\n')
		text = AppendReservation(text, Reservation{
			OrderID: e.OrderID, Quantity: e.Quantity, Lines: e.Lines, ReservedAt: e.ReservedAt, Sequence: e.Sequence,
			Epoch: e.Epoch,
		}, e.KeyFingerprint, epoch)
	}
	return text
}

// CountReserved returns how many orders a payload holds, and 1 for one without any.
func CountReserved(payload string) int { return strings.Count(payload, "\n")/2 + 1 }

// DecodeReserved reads the orders of a message of the stream. Its errors wrap ErrUndecodable.
func DecodeReserved(msg *message.Message) ([]OrderReserved, error) {
	events, err := ReadReserved(msg)
	if err != nil {
		return nil, err
	}
	return events, nil
}

// ReadReserved is DecodeReserved for a message that may be damaged or of another version: with an
// error, it returns the orders that can be read nevertheless.
func ReadReserved(msg *message.Message) (events []OrderReserved, err error) {
	if name := msg.Metadata.Get(MetaEvent); name != string(EventReserved) {
		return nil, fmt.Errorf("%w: event %q, want %q", ErrUndecodable, name, EventReserved)
	}
	sale, saleErr := uuid.Parse(msg.Metadata.Get(metaSale))
	epoch, epochErr := strconv.ParseInt(msg.Metadata.Get(metaEpoch), 10, 64)
	if saleErr != nil || sale == uuid.Nil || epochErr != nil || epoch < 1 || epoch > maxEpoch {
		return nil, fmt.Errorf("%w: the metadata lacks %s or %s, or it is out of range", ErrUndecodable, metaSale, metaEpoch)
	}
	count, err := strconv.Atoi(msg.Metadata.Get(metaCount))
	version := msg.Metadata.Get(metaVersion)
	if version != reservedVersion && version != reservedItemsVersion {
		err = fmt.Errorf("version %q, this worker knows %q and %q", version, reservedVersion, reservedItemsVersion)
	}
	payload := string(msg.Payload)
	if n := CountReserved(payload); n > MaxPerMessage {
		return nil, fmt.Errorf("%w: %d orders are more than %d", ErrUndecodable, n, MaxPerMessage)
	}
	lines := strings.Split(payload, "\n")
	traces := tracesIn(msg.Metadata.Get(metaTraces))
	if err == nil && len(lines) != 2*count {
		err = fmt.Errorf("%d lines for %d orders", len(lines), count)
	}
	events = make([]OrderReserved, 0, len(lines)/2)
	for i := 1; i < len(lines); i += 2 {
		r, key, lineErr := ParseReservation(lines[i])
		if r.Epoch == 0 {
			r.Epoch = epoch
		}
		if lineErr == nil && !r.CanBeOf(lines[i-1]) {
			lineErr = errors.New("the user or a number is out of range")
		} else if lineErr == nil && !MayBelongTo(r.OrderID, sale) {
			lineErr = errors.New("the id of the order is that of another sale")
		} else if lineErr == nil && (r.Lines != "") != (version == reservedItemsVersion) {
			lineErr = errors.New("only orders of a sale with items have lines")
		}
		if lineErr != nil {
			err = cmp.Or(err, fmt.Errorf("line %d: %w", i+1, lineErr))
			continue
		}
		events = append(events, OrderReserved{
			OrderID: r.OrderID, SaleID: sale, UserID: lines[i-1], Quantity: r.Quantity, Lines: r.Lines,
			Epoch: r.Epoch, ReservedAt: r.ReservedAt, Sequence: r.Sequence, KeyFingerprint: key, TraceParent: traces[r.OrderID],
		})
	}
	if err != nil {
		return events, fmt.Errorf("%w: %w", ErrUndecodable, err)
	}
	return events, nil
}

// Limits of every event. A larger number is forged or damaged, and does not fit Postgres, the audit
// and JSON.
const (
	maxMillis   = 253_402_300_799_999 // the end of the year 9999
	maxEpoch    = 1 << 31
	maxSequence = 1 << 40
)

// CanBeOf reports whether the user can have got the reservation, which means that its event is
// readable. Otherwise it was written manually.
func (r Reservation) CanBeOf(user string) bool {
	return ValidateUser(user) == nil && r.OrderID != uuid.Nil && r.Quantity >= 1 && r.Quantity <= MaxPerOrder &&
		r.Sequence >= 0 && r.Sequence <= maxSequence && r.Epoch >= 0 && r.Epoch <= maxEpoch &&
		r.ReservedAt.UnixMilli() >= 0 && r.ReservedAt.UnixMilli() <= maxMillis
}

const (
	// NoKey is the fingerprint of a purchase without an idempotency key.
	NoKey = "-"
	// fingerprintBytes is how much is kept of an idempotency key's hash.
	fingerprintBytes = 16
	// FingerprintChars is the length of a fingerprint, which is base64url without padding.
	FingerprintChars = (fingerprintBytes*8 + 5) / 6
)

// Fingerprint shortens an idempotency key, as Redis and Postgres keep it with the order.
func Fingerprint(key string) string {
	sum := sha256.Sum256([]byte(key))
	return base64.RawURLEncoding.EncodeToString(sum[:fingerprintBytes])
}

// OfferFingerprint is Fingerprint for what is offered to an entry. It differs from that of each key of a buyer: of the
// last character four bits have no meaning, and one of them is set.
func OfferFingerprint(key string) string {
	text := []byte(Fingerprint(key))
	text[FingerprintChars-1]++ // one of AQgw, each of which has a letter after it
	return string(text)
}

// isOffer is true for what OfferFingerprint returns.
func isOffer(fingerprint string) bool {
	return len(fingerprint) == FingerprintChars && strings.IndexByte("BRhx", fingerprint[FingerprintChars-1]) >= 0
}

func isFingerprint(text string) bool {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	return err == nil && len(raw) == fingerprintBytes
}

// MaxTraces bounds the traces of one message.
const MaxTraces = 16

// parentChars is the length of a traceparent of W3C Trace Context, version 00.
const parentChars = 55

// Trace is a purchase that is traced. One call of the script decides many purchases, so a message holds orders of many
// traces: its metadata has one traceparent for stock subscribers, and a line for each traced purchase.
type Trace struct {
	// Order is the CompactID that the order gets if the purchase wins. Losers have a line too: the metadata is written
	// before the script decides.
	Order string
	// Parent is the traceparent below which the order is recorded.
	Parent string
}

// joinTraces returns the lines of at most MaxTraces traces: the order's id, a space, and the traceparent.
func joinTraces(traces []Trace) string {
	var text strings.Builder
	for i, t := range traces[:min(len(traces), MaxTraces)] {
		if i > 0 {
			_ = text.WriteByte('\n') // never fails
		}
		_, _ = text.WriteString(t.Order + " " + t.Parent)
	}
	return text.String()
}

// tracesIn reads the lines of joinTraces. It leaves out what is damaged: without its trace an order is as good.
func tracesIn(text string) map[uuid.UUID]string {
	if text == "" {
		return nil
	}
	traces := make(map[uuid.UUID]string)
	for line := range strings.SplitSeq(text, "\n") {
		id, parent, _ := strings.Cut(line, " ")
		if of, err := ParseCompactID(id); err == nil && isTraceParent(parent) && len(traces) < MaxTraces {
			traces[of] = parent
		}
	}
	return traces
}

// isTraceParent reports whether text may be a traceparent of version 00: it can be stored and sent as it is. Who
// uses it reads it.
func isTraceParent(text string) bool {
	return len(text) == parentChars && strings.HasPrefix(text, "00-") && strings.Trim(text, "0123456789abcdef-") == ""
}

// TracesOf returns the traces of events, at most MaxTraces.
func TracesOf(events ...OrderReserved) (traces []Trace) {
	for _, e := range events {
		if e.TraceParent != "" && len(traces) < MaxTraces {
			traces = append(traces, Trace{CompactID(e.OrderID), e.TraceParent})
		}
	}
	return traces
}

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
