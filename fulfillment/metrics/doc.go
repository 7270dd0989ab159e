// Package metrics holds the Prometheus metrics of a worker, which its batchers and its loops share,
// and Trouble, which reports in the log and in the metrics that a step fails and is retried.
package metrics
