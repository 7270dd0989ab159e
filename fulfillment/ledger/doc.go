// Package ledger writes orders to Postgres: everything that happens to an order after Redis has
// admitted it.
//
//   - Ledger.Record (ledger.go) records a batch of reservations in one transaction; RecordWith
//     (record_batch.go) finds the outcome of every event of a batch, whatever is wrong with some of
//     them; errors.go says what an error means for them.
//   - Ledger.Pay and Ledger.Cancel (transition_write.go) are what a buyer does; reservation decides
//     whether they are legal.
//   - Expirer (expire.go, aside.go) ends orders that were not paid in time, and release.go gives
//     the units of ended orders back to Redis. Heartbeat (heartbeat.go) is the payment clock: time
//     without an ingress or without Postgres does not count.
//   - Outcomes (outcomes.go) tells ingresses of what was written.
//
// Everything here may run twice, in any process: an event has one effect because of the unique keys
// in Postgres.
package ledger
