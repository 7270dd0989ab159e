// Package feed reads the log of orders and sales for the relay: the events whose transactions are over, in the order of
// their positions, as CloudEvents.
//
// A position is given out when its row is inserted, so a row may become visible after rows with higher positions. A
// reader that remembers the highest position it has seen would skip it. A Reader reads only up to a position that is
// settled: each transaction that could hold a position up to it has ended (horizon.go).
package feed

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// ContentType is the media type of the body of an event.
const ContentType = "application/cloudevents+json"

const (
	// schemaVersion changes with the meaning of a member of the data. New members do not change it.
	schemaVersion = 1
	specVersion   = "1.0"
	dataType      = "application/json"
	orderSchema   = "/openapi.yaml#/components/schemas/OrderEvent"
	saleSchema    = "/openapi.yaml#/components/schemas/SaleEvent"
)

// Event is a change of an order or of a sale, for others.
type Event struct {
	Position int64
	// ID is the same whenever the event is sent. Subject is the order or the sale.
	ID, Subject string
	// OccurredAt is the time of the change.
	OccurredAt time.Time
	// Body is a CloudEvent in structured JSON.
	Body []byte
	// TraceParent is the span below which the event is sent, as W3C Trace Context has it; empty unless it is traced.
	TraceParent string
}

// cloudEvent has the attributes of CloudEvents 1.0, and its extensions partitionkey, sequence and traceparent, which is
// the traceparent of the change: it stays the same when the event is sent again.
type cloudEvent struct {
	SpecVersion     string  `json:"specversion"`
	ID              string  `json:"id"`
	Source          string  `json:"source"`
	Type            string  `json:"type"`
	Subject         string  `json:"subject"`
	Time            instant `json:"time"`
	DataContentType string  `json:"datacontenttype"`
	DataSchema      string  `json:"dataschema"`
	PartitionKey    string  `json:"partitionkey"`
	Sequence        string  `json:"sequence"`
	TraceParent     string  `json:"traceparent,omitempty"`
	Data            any     `json:"data"`
}

// instant is a time as in the HTTP API.
type instant time.Time

func (t instant) MarshalJSON() ([]byte, error) {
	return append(order.AppendTime([]byte{'"'}, time.Time(t)), '"'), nil
}

// IsZero leaves out what has no time.
func (t instant) IsZero() bool { return time.Time(t).IsZero() }

// orderRow is a row of read_orders.sql.
type orderRow struct {
	Position         int64
	OrderID, SaleID  uuid.UUID
	UserID           string
	Quantity         int64
	Version          int
	Type             string
	OccurredAt       time.Time
	ReservedAt       *time.Time
	ExpiresAt        *time.Time
	PaymentReference string
	Reason, Operator string
	TraceParent      string
}

type orderData struct {
	SchemaVersion    int       `json:"schema_version"`
	Position         int64     `json:"position"`
	OrderID          uuid.UUID `json:"order_id"`
	SaleID           uuid.UUID `json:"sale_id"`
	UserID           string    `json:"user_id"`
	Quantity         int64     `json:"quantity"`
	Status           string    `json:"status"`
	Version          int       `json:"version"`
	ReservedAt       instant   `json:"reserved_at,omitzero"`
	OccurredAt       instant   `json:"occurred_at"`
	ExpiresAt        instant   `json:"expires_at,omitzero"`
	PaymentReference string    `json:"payment_reference,omitempty"`
	Reason           string    `json:"reason,omitempty"`
	Operator         string    `json:"operator,omitempty"`
}

func (r *Reader) orderEvent(row *orderRow) (Event, error) {
	status := strings.ToLower(strings.TrimPrefix(row.Type, "Order"))
	return r.event("stampede.order."+status, fmt.Sprintf("%s.%d", row.OrderID, row.Version), row.OrderID, row.Position,
		row.OccurredAt, row.TraceParent, orderSchema, orderData{
			SchemaVersion: schemaVersion, Position: row.Position, OrderID: row.OrderID, SaleID: row.SaleID,
			UserID: row.UserID, Quantity: row.Quantity, Status: status, Version: row.Version,
			ReservedAt: toInstant(row.ReservedAt), OccurredAt: instant(row.OccurredAt), ExpiresAt: toInstant(row.ExpiresAt),
			PaymentReference: row.PaymentReference, Reason: row.Reason, Operator: row.Operator,
		})
}

// saleRow is a row of read_sales.sql.
type saleRow struct {
	Position             int64
	SaleID               uuid.UUID
	Revision             int64
	Type                 string
	OccurredAt           time.Time
	Operator             string
	Name                 string
	PerOrderLimit        int64
	OpensAt, ClosesAt    *time.Time
	PaymentWindowSeconds int64
	Stock                int64
	Shards               int
	State                string
}

type saleData struct {
	SchemaVersion        int       `json:"schema_version"`
	Position             int64     `json:"position"`
	SaleID               uuid.UUID `json:"sale_id"`
	Revision             int64     `json:"revision"`
	Change               string    `json:"change"`
	OccurredAt           instant   `json:"occurred_at"`
	Operator             string    `json:"operator,omitempty"`
	Name                 string    `json:"name"`
	State                string    `json:"state"`
	Stock                int64     `json:"stock"`
	PerOrderLimit        int64     `json:"per_order_limit"`
	OpensAt              instant   `json:"opens_at,omitzero"`
	ClosesAt             instant   `json:"closes_at,omitzero"`
	PaymentWindowSeconds int64     `json:"payment_window_seconds"`
	Shards               int       `json:"shards"`
}

func (r *Reader) saleEvent(row *saleRow) (Event, error) {
	change := strings.ToLower(strings.TrimPrefix(row.Type, "Sale"))
	return r.event("stampede.sale."+change, fmt.Sprintf("%s.r%d", row.SaleID, row.Revision), row.SaleID, row.Position,
		row.OccurredAt, "", saleSchema, saleData{
			SchemaVersion: schemaVersion, Position: row.Position, SaleID: row.SaleID, Revision: row.Revision, Change: change,
			OccurredAt: instant(row.OccurredAt), Operator: row.Operator, Name: row.Name, State: row.State, Stock: row.Stock,
			PerOrderLimit: row.PerOrderLimit, OpensAt: toInstant(row.OpensAt), ClosesAt: toInstant(row.ClosesAt),
			PaymentWindowSeconds: row.PaymentWindowSeconds, Shards: row.Shards,
		})
}

func (r *Reader) event(
	kind, id string, subject uuid.UUID, position int64, at time.Time, traceParent, schema string, data any,
) (Event, error) {
	key := subject.String()
	body, err := json.Marshal(cloudEvent{
		SpecVersion: specVersion, ID: id, Source: r.source, Type: kind, Subject: key, Time: instant(at),
		DataContentType: dataType, DataSchema: schema, PartitionKey: key, Sequence: strconv.FormatInt(position, 10),
		TraceParent: traceParent, Data: data,
	})
	if err != nil {
		return Event{}, fmt.Errorf("encode the event %s: %w", id, err)
	}
	return Event{
		Position: position, ID: id, Subject: key, OccurredAt: at, Body: body, TraceParent: traceParent,
	}, nil
}

func toInstant(t *time.Time) instant {
	if t == nil {
		return instant{}
	}
	return instant(*t)
}
