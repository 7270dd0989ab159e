// Package arrivals measures the cost of an order, and how long it takes, when buyers arrive at a rate
// well below the maximum. It has benchmarks only; docs/bench/arrivals.md holds the figures.
package arrivals
