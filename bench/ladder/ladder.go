// Package ladder compares Stampede with the designs of package designs, behind the same front and on
// the same schema: how fast they sell, what an order costs, and whether they keep their promises. It
// has benchmarks only; docs/bench/ladder.md holds the figures.
package ladder
