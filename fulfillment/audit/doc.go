// Package audit holds Redis and Postgres against the promises S1 to S5 and S7, and mends the
// differences that it finds.
//
// Run (audit.go) takes one look: at Postgres (checks.go), at Redis (redis.go, keys.go, ended.go)
// and at the streams (stream.go), and reports each promise (report.go). Reconcile (reconcile.go)
// looks twice, and mends what is the same at both looks (reconcile_mend.go).
package audit
