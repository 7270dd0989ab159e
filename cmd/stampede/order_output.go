package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"stampede/reservation/order"
)

func writeOrdersJSON(w io.Writer, orders []order.Placed) error {
	for _, o := range orders {
		if err := writeJSON(w, o.View()); err != nil {
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
	return writeJSON(w, o.ViewWith(log))
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
		{"pay until", order.TimeText(o.ExpiresAt)},
	} {
		if row[1] != "" {
			_, _ = fmt.Fprintf(t, "%s\t%s\n", row[0], row[1]) // Flush returns the error
		}
	}
	_, _ = fmt.Fprintln(t, "\nTIME\tVERSION\tEVENT\tDETAILS")
	for _, e := range log {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\n", order.TimeText(e.OccurredAt), e.Version, e.Type, details(e.Data))
	}
	return t.Flush()
}
