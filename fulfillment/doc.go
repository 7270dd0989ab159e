// Package fulfillment is the worker. It makes orders in Postgres of the events that lua/reserve.lua
// appended to the streams, expires orders that are not paid in time, releases their units in Redis,
// and rebuilds Redis when it has lost data.
//
// Worker (worker.go) wires the packages that an order passes, in this order:
//
//   - stream: Subscriber reads entries in batches and acknowledges what was settled.
//   - batch: a Watermill Router passes each message to the Batcher of its partition, which locks the
//     users of a batch.
//   - ledger: records a batch in one transaction. Its package deadletter keeps entries that no worker
//     can apply.
//
// The loops of a worker are files of this package: share.go decides which partitions it reads,
// sweeps.go publishes changed sales, expires overdue orders, releases units, removes ended sales from
// Redis and creates the tables of the next month, worker_guard.go has package rebuild find and restore
// what Redis lost, and blockers.go ends silent database sessions. Package survey collects the figures
// that all workers share.
//
// Everything here may happen twice, in any process. An event has one effect because of the unique
// keys in Postgres and because a reservation is released once, not because of a lock or of timing.
package fulfillment
