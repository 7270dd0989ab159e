// Package limits measures the most that each stage of an order's path could do on this machine: Echo
// without a design, the reserve script on a Redis without an ingress, inserts without a decision, reads
// of the stream without a worker. Beside each are the figures of `stampede serve` and `stampede work`.
package limits
