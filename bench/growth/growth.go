// Package growth measures how the cost of an order changes with the size of something: the stock, the
// number of buyers, connections, workers, partitions. With linear growth the cost of an order is the
// same at both ends of a series.
package growth
