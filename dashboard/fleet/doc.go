// Package fleet looks at a whole installation once a second: it scrapes the metrics of all processes, asks Redis and
// Postgres, and publishes what it found as a Snapshot. However many watch, each server is asked as if one did.
//
// It changes nothing in either server. A process or a server that does not answer is shown as gone, with the time
// since when, and delays nothing else.
package fleet
