// Package retry has the waits between tries of what fails for a while, and the log of such outages:
// one line when one begins, one when it is over.
package retry
