// Package shards measures what a sale over several shards costs, and how its last units are sold. It has benchmarks
// only; docs/bench/shards.md holds the figures.
package shards
