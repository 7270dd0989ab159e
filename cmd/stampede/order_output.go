package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"

	"stampede/reservation/order"
)

// orderLine is an order in JSON, with the members of GET /v1/admin/orders.
type orderLine struct {
	OrderID          uuid.UUID    `json:"order_id"`
	SaleID           uuid.UUID    `json:"sale_id"`
	UserID           string       `json:"user_id"`
	Quantity         int64        `json:"quantity"`
	Status           order.Status `json:"status"`
	Version          int          `json:"version"`
	ReservedAt       string       `json:"reserved_at"`
	UpdatedAt        string       `json:"updated_at,omitempty"`
	PaidAt           string       `json:"paid_at,omitempty"`
	ExpiresAt        string       `json:"expires_at,omitempty"`
	PaymentReference string       `json:"payment_reference,omitempty"`
	Reason           string       `json:"reason,omitempty"`
	Sequence         int64        `json:"sequence,omitempty"`
	Epoch            int64        `json:"epoch,omitempty"`
}

func lineOf(o order.Placed) orderLine {
	line := orderLine{
		OrderID: o.ID, SaleID: o.SaleID, UserID: o.UserID, Quantity: o.Quantity, Status: o.Status, Version: o.Version,
		ReservedAt: timeText(o.ReservedAt), UpdatedAt: timeText(o.UpdatedAt), ExpiresAt: timeText(o.ExpiresAt),
		PaymentReference: o.PaymentReference, Reason: o.Reason, Sequence: o.Sequence, Epoch: o.Epoch,
	}
	if o.Status == order.StatusPaid {
		line.PaidAt = line.UpdatedAt
	}
	return line
}

// timeText returns a time as the API writes it, "" for none.
func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return string(order.AppendTime(nil, t))
}

func writeOrdersJSON(w io.Writer, orders []order.Placed) error {
	for _, o := range orders {
		if err := writeJSON(w, lineOf(o)); err != nil {
			return err
		}
	}
	return nil
}

func writeOrdersText(w io.Writer, orders []order.Placed) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ORDER\tSTATUS\tUNITS\tUSER\tSALE\tRESERVED\tCHANGED\tPAYMENT") // Flush returns the error
	for _, o := range orders {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\n", o.ID, o.Status, o.Quantity, printable(o.UserID), o.SaleID,
			orDash(o.ReservedAt), orDash(o.UpdatedAt), orNobody(o.PaymentReference))
	}
	return t.Flush()
}

func writeHistoryJSON(w io.Writer, o order.Placed, log []order.Logged) error {
	type event struct {
		Version    int             `json:"version"`
		Type       order.EventType `json:"type"`
		OccurredAt string          `json:"occurred_at"`
		Data       json.RawMessage `json:"data"`
	}
	shown := struct {
		orderLine
		Events []event `json:"events"`
	}{lineOf(o), []event{}}
	for _, e := range log {
		shown.Events = append(shown.Events, event{e.Version, e.Type, timeText(e.OccurredAt), e.Data})
	}
	return writeJSON(w, shown)
}

func writeHistoryText(w io.Writer, o order.Placed, log []order.Logged) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"order", o.ID.String()},
		{"sale", o.SaleID.String()},
		{"user", printable(o.UserID)},
		{"units", fmt.Sprint(o.Quantity)},
		{"status", string(o.Status)},
		{"reason", printable(o.Reason)},
		{"payment", printable(o.PaymentReference)},
		{"pay until", timeText(o.ExpiresAt)},
	} {
		if row[1] != "" {
			_, _ = fmt.Fprintf(t, "%s\t%s\n", row[0], row[1]) // Flush returns the error
		}
	}
	_, _ = fmt.Fprintln(t, "\nTIME\tVERSION\tEVENT\tDETAILS")
	for _, e := range log {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\n", timeText(e.OccurredAt), e.Version, e.Type, details(e.Data))
	}
	return t.Flush()
}
