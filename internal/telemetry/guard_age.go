package telemetry

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// GuardAge measures how long ago a guard has verified that Redis is the server that Postgres names: the longest time
// of any partition that it guards. It is safe for concurrent use; nil measures nothing.
type GuardAge struct {
	mu sync.Mutex
	// verified has the guarded partitions. idle counts while there are none.
	verified map[int]time.Time
	idle     time.Time
}

// NewGuardAge registers stampede_guard_age_seconds for the guard of an ingress or a worker. It counts from now on.
func NewGuardAge(reg prometheus.Registerer, of string) (*GuardAge, error) {
	a := &GuardAge{verified: map[int]time.Time{}, idle: time.Now()}
	_, err := RegisterOnce(reg, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "stampede_guard_age_seconds",
		Help: "Time since the guard of this ingress or worker verified that Redis is the server that Postgres names, of the " +
			"partition for which it is longest.",
		ConstLabels: prometheus.Labels{"of": of},
	}, a.seconds))
	return a, err
}

// Guards says which partitions are guarded from now on. New ones count from now on.
func (a *GuardAge) Guards(partitions []int) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	guarded := make(map[int]time.Time, len(partitions))
	for _, p := range partitions {
		if guarded[p] = now; !a.verified[p].IsZero() {
			guarded[p] = a.verified[p]
		}
	}
	a.verified, a.idle = guarded, now
}

// Verified notes that a guarded partition was verified.
func (a *GuardAge) Verified(partition int) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, guarded := a.verified[partition]; guarded {
		a.verified[partition] = time.Now()
	}
}

func (a *GuardAge) seconds() float64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	oldest := a.idle
	if len(a.verified) > 0 {
		oldest = time.Now()
	}
	for _, at := range a.verified {
		if at.Before(oldest) {
			oldest = at
		}
	}
	return time.Since(oldest).Seconds()
}
