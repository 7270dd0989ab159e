// Package order holds what an order is: its identity, its states and the transitions between them,
// the events that record them, the outcomes that ingresses receive, and the receipt that a
// buyer keeps.
//
// transition.go decides which transition is legal; package ledger writes it. OrderReserved
// (event.go) is the event that lua/reserve.lua appends. The package uses neither Redis nor
// Postgres.
package order
