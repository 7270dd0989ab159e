package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"

	"stampede/reservation"
)

// saleJSON is a sale with the names that the HTTP API gives to the same.
type saleJSON struct {
	ID                   uuid.UUID         `json:"id"`
	Name                 string            `json:"name"`
	State                reservation.State `json:"state"`
	Stock                int64             `json:"stock"`
	Available            int64             `json:"available"`
	Held                 int64             `json:"held"`
	Sold                 int64             `json:"sold"`
	PerOrderLimit        int64             `json:"per_order_limit"`
	OpensAt              time.Time         `json:"opens_at,omitzero"`
	ClosesAt             time.Time         `json:"closes_at,omitzero"`
	PaymentWindowSeconds int64             `json:"payment_window_seconds"`
	CreatedAt            time.Time         `json:"created_at"`
}

// writeSalesJSON writes one object a line, so that one sale is an object and many are easy to cut.
func writeSalesJSON(w io.Writer, sales []reservation.Standing) error {
	encoder := json.NewEncoder(w)
	for _, s := range sales {
		err := encoder.Encode(saleJSON{
			ID: s.ID, Name: s.Name, State: s.State, Stock: s.Stock, Available: s.Available, Held: s.Held, Sold: s.Sold,
			PerOrderLimit: s.PerOrderLimit, OpensAt: s.OpensAt.UTC(), ClosesAt: s.ClosesAt.UTC(),
			PaymentWindowSeconds: int64(s.PaymentWindow / time.Second), CreatedAt: s.CreatedAt.UTC(),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func writeSalesText(w io.Writer, sales []reservation.Standing) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ID\tSTATE\tSTOCK\tAVAILABLE\tHELD\tSOLD\tOPENS\tCLOSES\tNAME") // Flush tells the error
	for _, s := range sales {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n",
			s.ID, s.State, s.Stock, s.Available, s.Held, s.Sold, orDash(s.OpensAt), orDash(s.ClosesAt), s.Name)
	}
	return t.Flush()
}

func orDash(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}
