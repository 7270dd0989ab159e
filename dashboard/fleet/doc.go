// Package fleet watches an installation for its operators: it scrapes the metrics of every process and looks into
// Postgres and Redis, at most twice a second however many people watch, and keeps fifteen minutes in memory. The
// pages of the dashboard and stampede top show its snapshots.
package fleet
