// Package retry holds pauses and the delays between retries, and logs an outage as two lines: one when
// it begins, one when it ends.
package retry
