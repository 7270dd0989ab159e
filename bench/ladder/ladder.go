// Package ladder compares the designs that one meets on the way to this one, and this one, behind the
// same front and on the same schema: how fast they sell, what that costs, and what becomes of the
// promises that they make. It has benchmarks only; what they find is in docs/bench/ladder.md.
package ladder
