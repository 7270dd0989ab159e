package testkit

import (
	"testing"
	"time"
)

// Eventually fails the test unless cond becomes true in time; what names the condition in the failure. Call it
// from the test's own goroutine.
func Eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	const pauseMax = 50 * time.Millisecond
	deadline := time.Now().Add(within)
	for pause := time.Millisecond; !cond(); pause = min(2*pause, pauseMax) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(pause)
	}
}
