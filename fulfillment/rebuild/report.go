package rebuild

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
)

// Report is the result of a rebuild.
type Report struct {
	Partition int    `json:"partition"`
	Reason    string `json:"reason"`
	// Tries counts the tries: each loss of Redis during a rebuild starts another one. The fields below are of the last.
	Tries   int     `json:"tries"`
	Seconds float64 `json:"seconds"`
	Drained Drained `json:"drained"`
	// Sales are the rebuilt sales in the order in which they were opened.
	Sales []SaleReport `json:"sales"`
}

// SaleReport is a rebuilt sale. Stock = Left + Held.
type SaleReport struct {
	ID       uuid.UUID `json:"id"`
	Epoch    int64     `json:"epoch"`
	Revision int64     `json:"revision"`
	// Ended is true if the sale is over.
	Ended bool  `json:"ended,omitempty"`
	Stock int64 `json:"stock"`
	Left  int64 `json:"left"`
	// Held counts the units of the live orders, and Orders the orders.
	Held   int64 `json:"held"`
	Orders int64 `json:"orders"`
	// Sequence is the highest place that Postgres or Redis knows of.
	Sequence int64   `json:"sequence"`
	Seconds  float64 `json:"seconds"`
}

// held sums the units and the orders of the sales.
func (r *Report) held() (units, orders int64) {
	for _, s := range r.Sales {
		units, orders = units+s.Held, orders+s.Orders
	}
	return units, orders
}

// WriteText writes the report for operators.
func (r *Report) WriteText(w io.Writer) error {
	took := time.Duration(r.Seconds * float64(time.Second)).Round(time.Millisecond)
	s := r.Drained
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "partition %d was rebuilt in %v (%s)\n", r.Partition, took, r.Reason)
	fmt.Fprintf(t,
		"stream: unfinished entries: %d; confirmed now: %d, rejected: %d, voided: %d, in Postgres before: %d, left to "+
			"the workers: %d\n",
		s.Entries, s.Confirmed, s.Rejected, s.Voided, s.Recorded, s.Left)
	if len(r.Sales) > 0 {
		fmt.Fprintln(t, "SALE\tEPOCH\tSTOCK\tLEFT\tHELD\tORDERS\tPLACE\tTIME")
	}
	for _, s := range r.Sales {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%v\n", s.ID, s.Epoch, s.Stock, s.Left, s.Held, s.Orders, s.Sequence,
			time.Duration(s.Seconds*float64(time.Second)).Round(time.Millisecond))
	}
	return t.Flush()
}
