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
	// Unfinished are sales with several shards of which the rebuild has closed the one in this partition, and which are
	// not rebuilt yet: another of their partitions has to be rebuilt first, or another process rebuilds them.
	Unfinished []uuid.UUID `json:"unfinished,omitempty"`
}

// SaleReport is a rebuilt sale, with the sums over its shards. Stock = Left + Held, unless it is retired.
type SaleReport struct {
	ID       uuid.UUID `json:"id"`
	Epoch    int64     `json:"epoch"`
	Revision int64     `json:"revision"`
	// Ended is true if the sale is over.
	Ended bool `json:"ended,omitempty"`
	// Retired is true if Redis has no buyers of it any more; Left and Held are 0 then.
	Retired bool  `json:"retired,omitempty"`
	Shards  int   `json:"shards"`
	Stock   int64 `json:"stock"`
	Left    int64 `json:"left"`
	// Held counts the units of the live orders, and Orders the orders.
	Held   int64 `json:"held"`
	Orders int64 `json:"orders"`
	// Sequence is the highest place that Postgres or Redis knows of. If there are several shards, the next few places
	// may count as given out.
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

// add adds the rebuild of a sale with several shards, which followed that of the partition.
func (r *Report) add(other Report) {
	r.Seconds += other.Seconds
	r.Sales = append(r.Sales, other.Sales...)
	d, more := &r.Drained, other.Drained
	d.Entries, d.Confirmed, d.Rejected = d.Entries+more.Entries, d.Confirmed+more.Confirmed, d.Rejected+more.Rejected
	d.Voided, d.Recorded, d.Left = d.Voided+more.Voided, d.Recorded+more.Recorded, d.Left+more.Left
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
		fmt.Fprintln(t, "SALE\tEPOCH\tSHARDS\tSTOCK\tLEFT\tHELD\tORDERS\tPLACE\tTIME")
	}
	for _, s := range r.Sales {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%v\n", s.ID, s.Epoch, s.Shards, s.Stock, s.Left, s.Held,
			s.Orders, s.Sequence, time.Duration(s.Seconds*float64(time.Second)).Round(time.Millisecond))
	}
	for _, id := range r.Unfinished {
		fmt.Fprintf(t, "sale %s is closed until its other partitions are rebuilt as well\n", id)
	}
	return t.Flush()
}
