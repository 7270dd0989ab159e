// Package batch turns the messages of one partition into transactions.
//
// Batcher.Handle (queue.go) takes a message; the batcher waits for more of them where many come
// (linger.go), locks their users, has the ledger record them (record.go), releases the units of
// refused orders, and answers each message (batcher.go). Two batches may be in flight at a time
// (inflight.go). Orders of a sale that is blocked in Postgres wait apart (blocked.go).
package batch
