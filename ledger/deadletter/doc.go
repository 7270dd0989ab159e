// Package deadletter keeps the stream entries that no worker could apply, until an operator replays
// or discards them.
//
// Store.Park (deadletter.go) stores an entry with every byte of its fields (fields.go). OrderOf
// (event.go) reads the reservation of an entry.
package deadletter
