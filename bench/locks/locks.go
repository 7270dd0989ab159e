// Package locks compares stampede/lock with the locks that one would use instead of it. It has
// benchmarks only; what the figures mean is in docs/bench/lock.md.
package locks
