// Package locks compares stampede/lock with other distributed locks. It has benchmarks only;
// docs/bench/lock.md explains the figures.
package locks
