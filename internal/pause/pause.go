// Package pause waits in a way that can be broken off.
package pause

import "time"

// For waits for d, and returns false if done was closed before that. If done is
// closed already it returns false at once.
func For(d time.Duration, done <-chan struct{}) bool {
	select {
	case <-done:
		return false
	default:
	}
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}
