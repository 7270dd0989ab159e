// Package limits measures the most that each stage of an order's path could do on this machine, beside
// what `stampede serve` and `stampede work` reach: Echo without a design, the reserve script without an
// ingress, inserts without a decision, reads of the stream without a worker, and job queues in place of
// the stream and the worker.
package limits
