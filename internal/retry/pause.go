package retry

import "time"

// Pause waits for d. It returns false if done is closed before d has passed, and immediately if done
// is already closed.
func Pause(d time.Duration, done <-chan struct{}) bool {
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
