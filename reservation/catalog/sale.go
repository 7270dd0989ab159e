package catalog

import (
	"stampede/reservation"
)

// CountedSale is a sale with the count of its units. Invariant: Available + Held + Sold = Stock.
type CountedSale struct {
	reservation.Sale
	// State is Sale.StateAt at the time of the query.
	State reservation.State
	// Available is how many units are unreserved.
	Available int64
	// Held is how many units belong to orders that are accepted and not yet final.
	Held int64
	// Sold is how many units belong to orders that are final.
	Sold int64
}
