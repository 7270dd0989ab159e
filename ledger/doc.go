// Package ledger writes orders to Postgres: everything that happens to an order after Redis has
// admitted it.
//
//   - Ledger.Record (ledger.go) records a batch of reservations in one transaction; RecordWith
//     (record_batch.go) returns the outcome of every event even if some events are invalid;
//     errors.go classifies errors.
//   - Ledger.Pay and Ledger.Cancel (transition_write.go) are a buyer's actions; package order
//     decides whether they are legal.
//   - Expirer (expire.go) ends orders that were not paid in time, and release.go releases
//     the units of ended orders in Redis. Heartbeat (heartbeat.go) is the payment clock: time
//     without an ingress or without Postgres does not count.
//   - Outcomes (outcomes.go) publishes what was written to the ingresses.
//
// Everything here may run twice, in any process: the unique keys in Postgres give an event one effect.
package ledger
