// Package reservation owns the stock of a sale in Redis, and the one atomic step in which a buyer's
// request becomes a reservation and an event.
//
// It stands between the ingress, which requests units, and the workers, which read the events from
// the stream. Follow a request in this order: Store.Reserve (store.go), the queue of its sale
// (queue.go), lua/reserve.lua (script.go), and order.OrderReserved.
//
// Package order defines orders, and package catalog holds the definitions of sales in Postgres.
package reservation
