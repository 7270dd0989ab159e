// Package audit compares Redis and Postgres with the promises S1 to S5 and S7, and repairs
// differences.
//
// Run (audit.go) takes a look: at Postgres (checks.go), at Redis (shards.go, redis.go, keys.go, ended.go)
// and at the streams (stream.go), and reports each promise (report.go). Reconcile (reconcile.go)
// looks twice, and repairs what both looks found (reconcile_repair.go).
package audit
