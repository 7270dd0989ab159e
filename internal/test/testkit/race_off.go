//go:build !race

package testkit

// Race is whether the race detector is on: random tests, which take twice as long with it, then play fewer rounds.
const Race = false
