// Package metrics holds the Prometheus metrics of a worker, which its batchers and its loops share,
// and Trouble, which shows in the log and in the metrics that a step fails and is tried again.
package metrics
