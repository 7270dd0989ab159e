package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"stampede/reservation/catalog"
)

// writeSalesJSON writes one object per line.
func writeSalesJSON(w io.Writer, sales []catalog.CountedSale) error {
	for _, s := range sales {
		if err := writeJSON(w, s); err != nil {
			return err
		}
	}
	return nil
}

func writeSalesText(w io.Writer, sales []catalog.CountedSale) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ID\tSTATE\tSTOCK\tAVAILABLE\tHELD\tSOLD\tOPENS\tCLOSES\tNAME") // Flush returns the error
	for _, s := range sales {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\t%s\n",
			s.ID, s.State, s.Stock, s.Available, s.Held, s.Sold, orDash(s.OpensAt), orDash(s.ClosesAt), printable(s.Name))
	}
	return t.Flush()
}

// orNobody returns the name of an operator, or a dash where Stampede acted by itself.
func orNobody(operator string) string {
	if operator == "" {
		return "-"
	}
	return printable(operator)
}

func orDash(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}
