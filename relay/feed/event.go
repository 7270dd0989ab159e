// Package feed reads the logs of orders, sales and payments for the relay: the events whose transactions are over, in
// the order of their positions, as CloudEvents.
//
// A position is given out when its row is inserted, so a row may become visible after rows with higher positions. A
// reader that remembers the highest position it has seen would skip it. A Reader reads only up to a position that is
// settled: each transaction that could hold a position up to it has ended (horizon).
package feed

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype/zeronull"

	"stampede/reservation"
	"stampede/reservation/order"
)

// ContentType is the media type of the body of an event.
const ContentType = "application/cloudevents+json"

const (
	// schemaVersion changes with the meaning of a member of the data. New members do not change it.
	schemaVersion = 1
	specVersion   = "1.0"
	dataType      = "application/json"
	schemas       = "/openapi.yaml#/components/schemas/"
)

// Event is a change of an order, of a sale or of a payment, for others.
type Event struct {
	Position int64
	// ID is the same whenever the event is sent. Subject is the order, the sale, or the payment's reference.
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
	SpecVersion     string        `json:"specversion"`
	ID              string        `json:"id"`
	Source          string        `json:"source"`
	Type            string        `json:"type"`
	Subject         string        `json:"subject"`
	Time            order.Instant `json:"time"`
	DataContentType string        `json:"datacontenttype"`
	DataSchema      string        `json:"dataschema"`
	PartitionKey    string        `json:"partitionkey"`
	Sequence        string        `json:"sequence"`
	TraceParent     string        `json:"traceparent,omitempty"`
	Data            any           `json:"data"`
}

// row is a row of a log.
type row interface {
	at() int64
	event(r *Reader) (Event, error)
}

// logged is what the rows of all logs have.
type logged struct {
	Position   int64
	Type       string
	OccurredAt time.Time
}

func (l *logged) at() int64 { return l.Position }

// orderRow is a row of read_orders.sql.
type orderRow struct {
	logged

	OrderID, SaleID  uuid.UUID
	UserID           string
	Quantity         int64
	Items            zeronull.Text
	Version          int
	ReservedAt       order.Instant
	PayFrom          order.Instant
	ExpiresAt        order.Instant
	Amount           int64
	Currency         string
	PaymentReference string
	Reason, Operator string
	EntryFor         zeronull.UUID
	OffersOnly       bool // of the sale
	KeyFingerprint   string
	TraceParent      string
}

type orderData struct {
	SchemaVersion    int           `json:"schema_version"`
	Position         int64         `json:"position"`
	OrderID          uuid.UUID     `json:"order_id"`
	SaleID           uuid.UUID     `json:"sale_id"`
	UserID           string        `json:"user_id"`
	Kind             order.Kind    `json:"kind"`
	EntryFor         uuid.UUID     `json:"entry_for,omitzero"`
	Quantity         int64         `json:"quantity"`
	Items            order.Items   `json:"items,omitzero"`
	Status           string        `json:"status"`
	Version          int           `json:"version"`
	ReservedAt       order.Instant `json:"reserved_at,omitzero"`
	OccurredAt       order.Instant `json:"occurred_at"`
	PayFrom          order.Instant `json:"pay_from,omitzero"`
	ExpiresAt        order.Instant `json:"expires_at,omitzero"`
	Amount           int64         `json:"amount,omitempty"`
	Currency         string        `json:"currency,omitempty"`
	PaymentReference string        `json:"payment_reference,omitempty"`
	Reason           string        `json:"reason,omitempty"`
	Operator         string        `json:"operator,omitempty"`
}

func (row *orderRow) event(r *Reader) (Event, error) {
	status := strings.ToLower(strings.TrimPrefix(row.Type, "Order"))
	id, entryFor := row.OrderID.String(), uuid.UUID(row.EntryFor)
	return r.event(&row.logged, "stampede.order."+status, fmt.Sprintf("%s.%d", id, row.Version), id, row.TraceParent,
		"OrderEvent", orderData{
			SchemaVersion: schemaVersion, Position: row.Position, OrderID: row.OrderID, SaleID: row.SaleID,
			UserID: row.UserID, Quantity: row.Quantity, Items: order.Items(row.Items), Status: status, Version: row.Version,
			ReservedAt: row.ReservedAt, OccurredAt: order.Instant(row.OccurredAt), PayFrom: row.PayFrom,
			ExpiresAt: row.ExpiresAt, Amount: row.Amount, Currency: row.Currency,
			PaymentReference: row.PaymentReference, Reason: row.Reason, Operator: row.Operator,
			Kind: order.KindOf(entryFor, row.OffersOnly, row.KeyFingerprint), EntryFor: entryFor,
		})
}

// saleRow is a row of read_sales.sql.
type saleRow struct {
	logged

	SaleID   uuid.UUID
	Revision int64
	Operator string
	reservation.TermsView
	Items json.RawMessage
	State string
	// Draw is what an event of the draw or the waiting list of the sale says.
	Draw json.RawMessage
}

type saleData struct {
	SchemaVersion int           `json:"schema_version"`
	Position      int64         `json:"position"`
	SaleID        uuid.UUID     `json:"sale_id"`
	Revision      int64         `json:"revision"`
	Change        string        `json:"change"`
	OccurredAt    order.Instant `json:"occurred_at"`
	Operator      string        `json:"operator,omitempty"`
	State         string        `json:"state"`
	reservation.TermsView
	Items json.RawMessage `json:"items,omitempty"`
}

// drawData is what an event of a draw or a waiting list says. Which members it has follows from the change.
type drawData struct {
	SchemaVersion int           `json:"schema_version"`
	Position      int64         `json:"position"`
	SaleID        uuid.UUID     `json:"sale_id"`
	Revision      int64         `json:"revision"`
	Change        string        `json:"change"`
	OccurredAt    order.Instant `json:"occurred_at"`
	Operator      string        `json:"operator,omitempty"`
	Version       int           `json:"version,omitempty"`
	EntriesSaleID uuid.UUID     `json:"entries_sale_id,omitzero"`
	FreezeSeconds int64         `json:"freeze_seconds,omitempty"`
	ClosesAt      string        `json:"closes_at,omitempty"`
	FrozenAt      string        `json:"frozen_at,omitempty"`
	Entries       *int64        `json:"entries,omitempty"`
	Root          string        `json:"root,omitempty"`
	Rounds        []int64       `json:"rounds,omitempty"`
	Seed          string        `json:"seed,omitempty"`
	Round         int64         `json:"round,omitempty"`
	Signature     string        `json:"signature,omitempty"`
	Parties       []struct {
		Name       string `json:"name"`
		Commitment string `json:"commitment"`
		Secret     string `json:"secret,omitempty"`
	} `json:"parties,omitempty"`
	Goods  json.RawMessage `json:"goods,omitempty"`
	Reason string          `json:"reason,omitempty"`
}

func (row *saleRow) drawEvent(r *Reader) (Event, error) {
	var data drawData
	id := row.SaleID.String()
	if err := json.Unmarshal(row.Draw, &data); err != nil {
		return Event{}, fmt.Errorf("read revision %d of sale %s: %w", row.Revision, id, err)
	}
	data.SchemaVersion, data.Position, data.Revision = schemaVersion, row.Position, row.Revision
	if data.SaleID == uuid.Nil { // else both sales of a waiting list name that with the units
		data.SaleID = row.SaleID
	}
	of := "draw"
	change, isList := strings.CutPrefix(row.Type, "Waitlist")
	if isList {
		of = "waitlist"
	}
	data.Change = strings.ToLower(strings.TrimPrefix(change, "Draw"))
	data.OccurredAt, data.Operator = order.Instant(row.OccurredAt), row.Operator
	kind, event := "stampede."+of+"."+data.Change, fmt.Sprintf("%s.r%d", id, row.Revision)
	return r.event(&row.logged, kind, event, id, "", "DrawEvent", data)
}

func (row *saleRow) event(r *Reader) (Event, error) {
	if row.Draw != nil {
		return row.drawEvent(r)
	}
	change := strings.ToLower(strings.TrimPrefix(row.Type, "Sale"))
	id := row.SaleID.String()
	return r.event(&row.logged, "stampede.sale."+change, fmt.Sprintf("%s.r%d", id, row.Revision), id, "", "SaleEvent",
		saleData{
			SchemaVersion: schemaVersion, Position: row.Position, SaleID: row.SaleID, Revision: row.Revision, Change: change,
			OccurredAt: order.Instant(row.OccurredAt), Operator: row.Operator, State: row.State, TermsView: row.TermsView,
			Items: row.Items,
		})
}

// paymentRow is a row of read_payments.sql.
type paymentRow struct {
	logged

	Reference       string
	Version         int
	OrderID, SaleID zeronull.UUID
	Amount          int64
	Currency        string
	Reason          string
	Unreadable      string
	RefundReference string
	Operator        string
	Note            string
	Dispute         string
}

type paymentData struct {
	SchemaVersion   int                `json:"schema_version"`
	Position        int64              `json:"position"`
	Reference       string             `json:"reference"`
	State           order.PaymentState `json:"state"`
	Reason          string             `json:"reason,omitempty"`
	Version         int                `json:"version"`
	OrderID         uuid.UUID          `json:"order_id,omitzero"`
	SaleID          uuid.UUID          `json:"sale_id,omitzero"`
	Amount          int64              `json:"amount,omitempty"`
	Currency        string             `json:"currency,omitempty"`
	Unreadable      string             `json:"unreadable,omitempty"`
	OccurredAt      order.Instant      `json:"occurred_at"`
	RefundReference string             `json:"refund_reference,omitempty"`
	Operator        string             `json:"operator,omitempty"`
	Note            string             `json:"note,omitempty"`
	Dispute         string             `json:"dispute,omitempty"`
}

func (row *paymentRow) event(r *Reader) (Event, error) {
	state := order.PaymentEvent(row.Type).State()
	// It differs from the id of an order that a shop uses as the reference. Escaped: a header loses blanks at its ends.
	id := fmt.Sprintf("%s.p%d", url.PathEscape(row.Reference), row.Version)
	return r.event(&row.logged, "stampede.payment."+string(state), id, row.Reference, "", "PaymentEvent", paymentData{
		SchemaVersion: schemaVersion, Position: row.Position, Reference: row.Reference, State: state, Reason: row.Reason,
		Version: row.Version, OrderID: uuid.UUID(row.OrderID), SaleID: uuid.UUID(row.SaleID), Amount: row.Amount,
		Currency: row.Currency, Unreadable: row.Unreadable, OccurredAt: order.Instant(row.OccurredAt),
		RefundReference: row.RefundReference, Operator: row.Operator, Note: row.Note, Dispute: row.Dispute,
	})
}

func (r *Reader) event(l *logged, kind, id, subject, traceParent, schema string, data any) (Event, error) {
	body, err := json.Marshal(cloudEvent{
		SpecVersion: specVersion, ID: id, Source: r.source, Type: kind, Subject: subject, Time: order.Instant(l.OccurredAt),
		DataContentType: dataType, DataSchema: schemas + schema, PartitionKey: subject,
		Sequence: strconv.FormatInt(l.Position, 10), TraceParent: traceParent, Data: data,
	})
	if err != nil {
		return Event{}, fmt.Errorf("encode the event %s: %w", id, err)
	}
	return Event{
		Position: l.Position, ID: id, Subject: subject, OccurredAt: l.OccurredAt, Body: body, TraceParent: traceParent,
	}, nil
}
