// Package queues compares Stampede's stream and worker with job queues that could replace them. It has
// benchmarks only; docs/bench/queues.md explains the figures.
package queues
