package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"stampede/reservation/order"
)

func writeOrdersJSON(w io.Writer, orders []order.PlacedView) error {
	for _, o := range orders {
		if err := writeJSON(w, o); err != nil {
			return err
		}
	}
	return nil
}

func writeOrdersText(w io.Writer, orders []order.PlacedView) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ORDER\tSTATUS\tUNITS\tUSER\tSALE\tRESERVED\tCHANGED\tPAYMENT") // Flush returns the error
	for _, o := range orders {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\n", o.OrderID, o.Status, o.Quantity, printable(o.UserID),
			o.SaleID, secondOf(o.ReservedAt), secondOf(o.UpdatedAt), orNobody(o.PaymentReference))
	}
	return t.Flush()
}

// secondOf shortens a time of an order to seconds; "-" is none.
func secondOf(text string) string {
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return "-"
	}
	return orDash(at)
}

func writeHistoryText(w io.Writer, o order.HistoryView) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"order", o.OrderID.String()},
		{"sale", o.SaleID.String()},
		{"user", printable(o.UserID)},
		{"units", fmt.Sprint(o.Quantity)},
		{"status", string(o.Status)},
		{"reason", printable(o.Reason)},
		{"payment", printable(o.PaymentReference)},
		{"pay until", o.ExpiresAt},
	} {
		if row[1] != "" {
			_, _ = fmt.Fprintf(t, "%s\t%s\n", row[0], row[1]) // Flush returns the error
		}
	}
	_, _ = fmt.Fprintln(t, "\nTIME\tVERSION\tEVENT\tDETAILS")
	for _, e := range o.Events {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\n", e.OccurredAt, e.Version, e.Type, details(e.Data))
	}
	return t.Flush()
}
