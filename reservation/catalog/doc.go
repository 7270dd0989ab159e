// Package catalog holds the definitions of sales in Postgres: it creates and changes them
// (catalog.go, change.go), publishes them to Redis (publish.go), changes their stock (restock.go),
// and counts their units in both (sale_count.go).
package catalog
