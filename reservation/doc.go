// Package reservation owns a sale: its definition in Postgres, its stock in Redis, and the one
// atomic step in which a buyer's request becomes a reservation and an event.
//
// It stands between the ingress, which asks it for units, and the fulfillment workers, which read
// the events from the stream and make orders of them. Follow a request in this order: Store.Reserve
// (store.go), the queue of its sale (queue.go), lua/reserve.lua, and OrderReserved (event.go).
package reservation
