// Package survey looks at what all workers share (dead letters, units, audits, Redis servers) every few seconds, for
// gauges that are the same in each worker. A scrape costs no query. What cannot be read is absent: an old value would
// say that all is well.
package survey
