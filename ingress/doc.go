// Package ingress serves the HTTP API to buyers and operators.
//
// An order begins here. The ingress authenticates the buyer, reads the purchase, sheds the load that it
// cannot carry, and has reservation reserve the units. A purchase never waits for Postgres, unless it is
// repeated or its buyer prefers to wait. The files in running order:
//
//	config.go, server.go          what a server needs; how it starts, serves and stops (internal/accept)
//	routes.go                     all calls, with who may make them, their limits and their slots
//	route.go                      what is done for every request, and its admission
//	limit.go                      rate limits by user and by address; bounds on requests in flight and on streams
//	auth.go                       who sent the request; which answers scripts of other origins may read
//	request.go, request_body.go   reading headers, ids, pages and JSON
//	problem.go                    writing answers and event streams; each error becomes a problem of RFC 9457
//
// A purchase (purchaseService), which is written for speed because a crowd makes it:
//
//	purchase.go                   POST /v1/sales/{sale}/orders, also repeated and after the end of the sale;
//	                              Prefer: wait=N
//	receipts.go                   the signed receipt in each accepted answer; tickets with which browsers open streams
//
// What buyers do with their orders (orderService):
//
//	order.go                      show, list, pay and cancel, for buyers and operators; GET /v1/orders/{order}/events
//	order_store.go                orders in Postgres and in Redis; no request waits for a silent Postgres, and
//	                              no order is shown in a lower version than before
//	order_waiters.go              requests that wait for a change of an order, which workers announce
//
// Sales (saleService), and what operators do (operatorService):
//
//	sale.go                       GET /v1/sales and /v1/sales/{sale}, and its events
//	sale_feed.go                  one query for all requests for sales
//	operate_sale.go               create, change, restock and rename sales; their history
//
// Draws (drawService) and waiting lists (waitlistService):
//
//	draw.go                       create and look at a draw, its files and proofs; take beacons and secrets
//	waitlist.go                   join and leave a waiting list; how many are before
//
// openapi.yaml describes the API, and openapi.go serves what package apidoc makes of it.
//
// metrics.go serves those who operate the server, and probes of its health.
package ingress
