// Package limits measures what each stage of an order's way could do at most on this machine: Echo
// that does nothing, the reserve script on a Redis without an ingress, inserts without a decision, reads
// of the stream without a worker. Beside each stands what `stampede serve` and `stampede work` reach.
package limits
