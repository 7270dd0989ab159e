// Package feed reads the log of orders and sales for the relay: the events whose transactions are over, in the order of
// their positions, as CloudEvents.
//
// A position is given out when its row is inserted, so a row may become visible after rows with higher positions. A
// reader that remembers the highest position it has seen would skip it. A Reader reads only up to a position that is
// settled: each transaction that could hold a position up to it has ended (horizon.go).
package feed
