package catalog

import (
	"stampede/reservation"
)

// CountedSale is a sale with the count of its units. Invariant: Available + Held + Sold = Stock.
type CountedSale struct {
	reservation.Sale
	// State is Sale.StateAt at the time of the query.
	State reservation.State
	// Available is the number of unreserved units.
	Available int64
	// Held is the number of units of orders that are accepted and not final.
	Held int64
	// Sold is the number of units of final orders.
	Sold int64
	// Retired is true if Redis has no buyers of the sale any more: Postgres has all of it.
	Retired bool
	// Archived is true if the orders of the sale are no longer in Postgres.
	Archived bool
}
