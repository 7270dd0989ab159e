// Package relay delivers the events of orders and sales to others: webhooks, streams in Redis, topics of Kafka,
// standard output. Each target gets every event at least once, the events of an order in the order of its
// versions, and none before its transaction is committed.
//
// Several processes share the targets. The one that has the lock of a target claims it by a new fence in its row of
// relay_targets, and moves its position only under that fence. So the lock saves double work, and the row decides: a
// process that was replaced can send an event again, but not move the position.
//
// # Reading order
//
// relay (which targets this process serves), session (one target: look, read, send, move), lanes (several events at the
// same time, those of one subject in line), backoff, sender, metrics. Package feed reads the log, target holds the
// table, webhook and broker send.
package relay
