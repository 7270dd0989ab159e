// Package queues compares Stampede's stream and worker with the job queues that one would use in
// their place. It has benchmarks only; what the figures mean is in docs/bench/queues.md.
package queues
