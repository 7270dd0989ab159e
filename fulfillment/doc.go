// Package fulfillment brings reservations to their end: it reads the events that lua/reserve.lua
// appended to the streams, makes orders of them in Postgres, takes those through payment, cancellation
// or expiry, and gives back what came to nothing.
//
// It stands at the end of the way of an order. Follow an entry of the stream in this order:
//
//   - Subscriber (subscriber.go) reads entries in batches, keeps and claims them, and acknowledges
//     what was settled; entry.go is the wire format.
//   - Worker (worker.go) has a Watermill Router hand each message to the batcher of its partition.
//   - batcher (batcher.go) groups messages (batcher_queue.go, batcher_inflight.go, batcher_linger.go), locks their
//     users, has them recorded and resolves them; batcher_record.go is what it does when Postgres is away or an
//     event of the batch is at fault.
//   - Ledger (ledger.go, sql/queries/ledger/record_fresh.sql and ledger/record_orders.sql) is the transaction.
//   - DeadLetters (deadletter.go) keeps what nobody can apply until an operator decides.
//
// What follows a confirmed order in a sale with a payment window begins in Postgres:
//
//   - Ledger.Pay and Ledger.Cancel (transition_write.go) are what its buyer does; reservation/transition.go decides.
//   - expiry.go ends what was not paid in time, and releases.go gives the units of ended orders back to
//     Redis: every worker sweeps for both.
//   - Heartbeat (heartbeat.go) records that an ingress runs; deadlines are measured by it.
//
// And when Redis has lost what it was given, that begins in Postgres as well:
//
//   - guard (worker_guard.go), in every worker, finds out, and rebuild_needs.go says what there is to find.
//   - Rebuilder (rebuild.go) makes the stock anew, step by step (rebuild_steps.go): it holds a lock
//     (rebuild_session.go), records what the stream still has (rebuild_drain.go), and copies the live
//     orders (rebuild_buyers.go).
//
// Trimmer and BacklogCollector look after the streams, and Audit (audit.go) holds Redis and Postgres
// against what is promised.
//
// Everything here may happen twice, in any process, at once: an event has one effect because of
// the unique keys in Postgres and because a reservation is released once, and never because of a
// lock or of timing.
package fulfillment
