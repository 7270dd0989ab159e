// Package stream reads the events of sales from Redis Streams and acknowledges them.
//
// It stands between lua/reserve.lua, which appends the entries, and the batcher, which handles
// their messages:
//
//   - Subscriber (subscriber.go) reads entries in pages (subscriber_read.go), every 10 ms where
//     many come (pace.go), keeps those in flight in a table (subscriber_table.go), claims the
//     entries of consumers that have gone silent (claim.go), and acknowledges handled entries or
//     stores them as dead letters (subscriber_settle.go).
//   - handler.go is what a handler and the subscriber exchange about a message.
//   - entry.go is the wire format: Watermill's, as watermill-redisstream writes it.
//   - Trimmer (trim.go) removes entries that all consumers have acknowledged; BacklogCollector
//     (backlog.go) measures the rest.
//
// An entry is delivered at least once. It stays pending until its message is settled: acked, or
// nacked.
package stream
