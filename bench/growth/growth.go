// Package growth measures how the cost of an order changes when something grows: the stock, the crowd,
// its connections, the workers, the partitions. What grows in a straight line costs the same for each
// order at either end; a bend shows as a ratio.
package growth
