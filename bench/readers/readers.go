// Package readers measures how anonymous reads of a sale affect buyers who pay. It has benchmarks only;
// docs/bench/readers.md holds the figures.
package readers
