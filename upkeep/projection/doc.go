// Package projection rebuilds the orders and the counters of sales from the log of events in
// Postgres, beside those in use, and swaps them in while sales continue.
package projection
