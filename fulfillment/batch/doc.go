// Package batch turns the messages of one partition into transactions.
//
// Batcher.Handle (delivery.go) queues the orders of a message (queue.go) and waits for their
// results. The batcher locks their users, has the ledger record the orders (record.go), releases
// the units of rejected orders, and resolves each message (batcher.go). Two batches may be in
// flight at a time (inflight.go). Orders of a sale that is blocked in Postgres are retried apart
// from the others (blocked.go).
package batch
