// Package arrivals measures what an order costs, and how long it takes, when fewer buyers come than could be served: as
// it is before and after the rush, and on a machine that was chosen with room to spare. It has benchmarks only; what
// they find is in docs/bench/arrivals.md.
package arrivals
