// Package readers measures what buyers who pay feel of a crowd that only looks. It has benchmarks only; what they find
// is in docs/bench/readers.md.
package readers
