// Package projection makes the orders and the counters of sales again from the log of events in
// Postgres, beside those in use, and swaps them in while sales go on.
package projection
