// Package ingress serves the HTTP API to buyers and operators.
//
// An order begins here. The ingress authenticates the buyer, reads the purchase, sheds the load that it
// cannot carry, and has reservation reserve the units. A purchase never waits for Postgres, unless it is
// repeated or its buyer prefers to wait. The files in running order:
//
//	config.go, server.go          what a server needs; how it starts, serves and stops
//	plain.go, plain_front.go      plain purchases, answered in front of net/http (plain_conn.go)
//	plain_request.go, …_answer.go how they are read, and answered
//	route.go                      the routes, and what is done for every request
//	cors.go                       which answers scripts of other origins may read
//	limit_rate.go                 rate limits by user and by client address (request_address.go)
//	auth.go                       who sent the request
//	request.go, request_body.go   reading headers, ids and JSON
//	limit_slots.go                bounds on requests in flight, waiting purchases and streams
//
// A purchase, which is written for speed because a crowd makes it (no reflection, no log line, pooled
// buffers):
//
//	purchase.go                   POST /v1/sales/{sale}/orders
//	receipts.go                   the signed receipt in each accepted answer
//	purchase_wait.go              Prefer: wait=N
//	purchase_replay.go            a repeated request
//	response.go, problem.go       writing answers; each error becomes one of RFC 9457
//	outage_log.go                 logging failures of our own servers
//
// What buyers do with their orders:
//
//	order_show.go                 GET /v1/orders/{order}
//	postgres.go                   queries, and the breaker that keeps requests from a silent Postgres
//	order_versions.go             no order is shown in a lower version than before
//	order_list.go                 GET /v1/orders (request_page.go)
//	order_change.go               pay and cancel
//	order_events.go               GET /v1/orders/{order}/events (event_stream.go)
//	stream_ticket.go              tickets with which browsers open streams
//	order_waiters.go              requests that wait for a change of an order
//	order_outcomes.go             workers announce changes of orders
//
// Sales:
//
//	sale_operate.go               operators create and change sales
//	sale_show.go                  GET /v1/sales and /v1/sales/{sale}
//	sale_feed.go                  one query for all requests for sales
//	sale_events.go                GET /v1/sales/{sale}/events
//
// openapi.yaml describes the API, and openapi.go serves what package apidoc makes of it.
//
// health.go and metrics.go serve those who operate the server.
package ingress
