package lock

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// With benchLease, a lease ends here after 29.698 s, a renewal is due 9.698 s after the last one,
// and a failed one is retried after 3 s.
const (
	benchLease = 30 * time.Second
	benchEnd   = benchLease - benchLease/100 - 2*time.Millisecond
	benchDue   = benchEnd - benchLease*2/3
	benchPause = benchLease / 10
)

// watchdogBench is a watchdog in a synctest bubble. The test provides the answers of Redis.
type watchdogBench struct {
	*watchdog
	lock  sync.Mutex // the Locker's
	start time.Time

	// redis waits as long as Redis would and reports whether the holds are renewed; nil renews all
	// immediately.
	redis    func(holds []*hold) bool
	rounds   []watchdogRound
	reported map[string]time.Duration // when the ends of leases were reported
}

// watchdogRound is one call of renew.
type watchdogRound struct {
	at   time.Duration
	keys []string
}

// bubble runs a test with a watchdog, which ends with the test.
func bubble(t *testing.T, test func(t *testing.T, d *watchdogBench)) {
	synctest.Test(t, func(t *testing.T) {
		d := &watchdogBench{start: time.Now(), reported: make(map[string]time.Duration)}
		d.watchdog = newWatchdog(&d.lock, benchLease, d.renewAll, d.expire)
		defer d.wait()
		defer d.stop()
		test(t, d)
	})
}

func (d *watchdogBench) now() time.Duration { return time.Since(d.start) }

// renewAll stands for Locker.renewChunk.
func (d *watchdogBench) renewAll(holds []*hold) {
	sent := time.Now()
	d.lock.Lock()
	call := watchdogRound{at: d.now(), keys: holdKeys(holds)}
	slices.Sort(call.keys)
	d.rounds = append(d.rounds, call)
	redis := d.redis
	d.lock.Unlock()
	if redis == nil || redis(holds) {
		d.lock.Lock()
		for _, h := range holds {
			h.extend(sent, d.lease)
			d.update(h)
		}
		d.lock.Unlock()
	}
	d.renewalDone(holds)
}

// expire stands for Locker.leasesExpired.
func (d *watchdogBench) expire(holds []*hold) {
	d.lock.Lock()
	defer d.lock.Unlock()
	for _, h := range holds {
		if h.valid(time.Now()) {
			d.watch(h)
			continue
		}
		h.lost = true
		d.unwatch(h)
		d.reported[h.key] = d.now()
	}
}

// hold returns a hold whose lease begins now, watched or not.
func (d *watchdogBench) hold(key string, watched bool) *hold {
	return d.holdFor(key, watched, d.lease)
}

func (d *watchdogBench) holdFor(key string, watched bool, lease time.Duration) *hold {
	h := newHold(key, watched)
	h.extend(time.Now(), lease)
	d.lock.Lock()
	defer d.lock.Unlock()
	d.watch(h)
	return h
}

func newHold(key string, watched bool) *hold {
	return &hold{grant: &grant{}, key: key, leases: []*Lease{{watched: watched}}}
}

func (d *watchdogBench) answers(redis func(holds []*hold) bool) {
	d.lock.Lock()
	defer d.lock.Unlock()
	d.redis = redis
}

// until advances the clock to a time since the start and waits for everything that happens by then.
func (d *watchdogBench) until(at time.Duration) {
	<-time.After(at - d.now())
	synctest.Wait()
}

func (d *watchdogBench) calls() []watchdogRound {
	d.lock.Lock()
	defer d.lock.Unlock()
	return slices.Clone(d.rounds)
}

func (d *watchdogBench) expiredAt() map[string]time.Duration {
	d.lock.Lock()
	defer d.lock.Unlock()
	return maps.Clone(d.reported)
}

func (d *watchdogBench) runs() bool {
	d.lock.Lock()
	defer d.lock.Unlock()
	return d.running
}

func TestRenewalFollowsAThirdOfALeaseAfterTheLastSend(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		const latency = 2 * time.Second
		d.redis = func([]*hold) bool {
			<-time.After(latency)
			return true
		}
		d.hold("ann", true)
		d.until(3*benchDue + latency)
		assert.Equal(t, []watchdogRound{
			{1 * benchDue, []string{"ann"}},
			{2 * benchDue, []string{"ann"}},
			{3 * benchDue, []string{"ann"}},
		}, d.calls(), "the time of an answer does not add up")
		assert.LessOrEqual(t, benchDue, benchLease/3)

		// Failed renewals do not count: the next third begins when the successful call was sent.
		good := true
		d.answers(func([]*hold) bool {
			good = !good
			return good
		})
		d.until(5*benchDue + benchPause)
		require.Greater(t, len(d.calls()), 3)
		assert.Equal(t, []watchdogRound{
			{4 * benchDue, []string{"ann"}},
			{4*benchDue + benchPause, []string{"ann"}},
			{5*benchDue + benchPause, []string{"ann"}},
		}, d.calls()[3:])
		assert.Empty(t, d.expiredAt())
	})
}

func TestRenewalsDueTogetherShareACall(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.hold("ann", true)
		d.until(d.batchWindow())
		d.hold("bob", true) // in time to be renewed with ann
		d.until(d.batchWindow() + 1)
		d.hold("cid", true) // a nanosecond too late
		d.until(2 * benchDue)
		assert.Equal(t, []watchdogRound{
			{benchDue, []string{"ann", "bob"}},
			{benchDue + d.batchWindow() + 1, []string{"cid"}},
			{2 * benchDue, []string{"ann", "bob"}}, // and stay together
		}, d.calls())
	})
}

func TestFailedRenewalIsRetriedUntilTheLeaseEnds(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.redis = func([]*hold) bool { return false }
		d.hold("ann", true)
		d.until(benchEnd - 1)
		assert.Empty(t, d.expiredAt(), "not before the end")
		var tries []time.Duration
		for _, call := range d.calls() {
			tries = append(tries, call.at)
		}
		want := make([]time.Duration, 0, 8)
		for at := benchDue; at < benchEnd; at += benchPause {
			want = append(want, at)
		}
		assert.Equal(t, want, tries)

		d.until(benchEnd)
		assert.Equal(t, map[string]time.Duration{"ann": benchEnd}, d.expiredAt())
		d.until(2 * benchLease)
		assert.Len(t, d.calls(), len(want), "ended leases are not renewed")
	})
}

func TestLateSuccessfulRenewalSavesTheLease(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.redis = func([]*hold) bool { return d.now() > benchEnd-benchPause }
		h := d.hold("ann", true)
		d.until(benchEnd)
		assert.Empty(t, d.expiredAt())
		calls := d.calls()
		require.NotEmpty(t, calls)
		last := calls[len(calls)-1].at
		assert.Greater(t, last, benchEnd-benchPause)
		assert.Equal(t, d.start.Add(last+benchEnd), h.ends)
	})
}

func TestHangingRenewalDelaysNoOther(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.redis = func(holds []*hold) bool {
			if holds[0].key == "ann" {
				<-time.After(2 * benchLease)
			}
			return true
		}
		d.hold("ann", true)
		d.until(2 * time.Second) // too late to be renewed with ann
		d.hold("bob", true)
		d.holdFor("explicit", false, 20*time.Second)
		d.until(2*benchLease + benchDue)

		reported := d.expiredAt()
		assert.Equal(t, benchEnd, reported["ann"], "at its end, not when Redis answers")
		assert.Equal(t, 2*time.Second+20*time.Second-drift(20*time.Second), reported["explicit"])
		assert.NotContains(t, reported, "bob", "renewed all the time")
		renewals := make(map[string]int)
		for _, call := range d.calls() {
			for _, key := range call.keys {
				renewals[key]++
			}
		}
		assert.Equal(t, 1, renewals["ann"], "one renewal at a time")
		assert.Equal(t, 7, renewals["bob"])
	})
}

func TestLateAnswerDoesNotReviveALease(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		const late = benchEnd + time.Second
		d.redis = func(holds []*hold) bool {
			<-time.After(late - d.now())
			return true
		}
		expired := d.hold("expired", true)
		released := d.hold("released", true)
		d.until(benchDue + time.Second)
		d.lock.Lock()
		d.unwatch(released)
		d.lock.Unlock()
		d.until(late)

		assert.Equal(t, map[string]time.Duration{"expired": benchEnd}, d.expiredAt())
		for _, h := range []*hold{expired, released} {
			assert.NotContains(t, d.watched, h, h.key)
		}
		assert.False(t, expired.valid(time.Now()), "a reported loss stays a loss")
		d.until(2 * benchLease)
		assert.Len(t, d.calls(), 1)
	})
}

func TestUnwatchedLeaseIsReportedAtItsEnd(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.holdFor("ann", false, 7*time.Second)
		d.holdFor("bob", false, benchLease)
		kept := d.hold("cid", true)
		d.until(5 * time.Second)
		d.lock.Lock()
		kept.leases = []*Lease{{watched: false}} // the inner lease is released, and the outer one is explicit
		d.lock.Unlock()
		d.until(benchEnd - 1)
		assert.Equal(t, map[string]time.Duration{"ann": 7*time.Second - drift(7*time.Second)}, d.expiredAt())
		d.until(benchEnd)
		assert.Equal(t, map[string]time.Duration{
			"ann": 7*time.Second - drift(7*time.Second), "bob": benchEnd, "cid": benchEnd,
		}, d.expiredAt())
		assert.Empty(t, d.calls(), "not renewed")
	})
}

func TestShortHoldIsRenewedImmediatelyOnceWatched(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		h := d.holdFor("ann", false, 7*time.Second)
		d.until(5 * time.Second)
		d.lock.Lock()
		h.leases = append(h.leases, &Lease{watched: true})
		d.watch(h)
		d.lock.Unlock()
		d.until(2 * benchLease)
		require.NotEmpty(t, d.calls())
		assert.Equal(t, 5*time.Second, d.calls()[0].at)
		assert.Empty(t, d.expiredAt())
	})
}

func TestUnwatchedHoldIsNeitherRenewedNorReported(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		ann, bob := d.hold("ann", true), d.hold("bob", false)
		d.until(time.Second)
		d.lock.Lock()
		d.unwatch(ann)
		d.unwatch(bob)
		d.unwatch(bob) // a second call does nothing
		d.lock.Unlock()
		d.until(2 * benchLease)
		assert.Empty(t, d.calls())
		assert.Empty(t, d.expiredAt())

		// Watched again, ann has ended meanwhile.
		look := func() {
			d.lock.Lock()
			d.watch(ann)
			d.lock.Unlock()
			synctest.Wait()
		}
		look()
		assert.Equal(t, map[string]time.Duration{"ann": 2 * benchLease}, d.expiredAt())
		d.until(3 * benchLease)
		look()
		assert.Equal(t, map[string]time.Duration{"ann": 2 * benchLease}, d.expiredAt(), "a loss is reported once")
	})
}

func TestHoldExtendedDuringItsReportStaysWatched(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		h := newHold("ann", false)
		expired := d.expired
		d.expired = func(holds []*hold) { // an inner acquire extends it at this moment
			d.lock.Lock()
			h.extend(time.Now(), benchLease)
			d.lock.Unlock()
			d.expired = expired
			expired(holds)
		}
		d.lock.Lock()
		h.extend(time.Now(), 7*time.Second)
		d.watch(h)
		d.lock.Unlock()
		d.until(benchLease)
		assert.Empty(t, d.expiredAt())
		d.until(2 * benchLease)
		assert.Equal(t, map[string]time.Duration{"ann": 7*time.Second - drift(7*time.Second) + benchEnd}, d.expiredAt())
	})
}

func TestWatchdogStopsWhenIdleAndStartsAgain(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		assert.False(t, d.runs(), "nothing to do yet")
		for _, key := range []string{"ann", "bob"} {
			begun := d.now()
			h := d.hold(key, true)
			assert.True(t, d.runs())
			d.until(begun + time.Second)
			d.lock.Lock()
			d.unwatch(h)
			d.lock.Unlock()
			d.until(begun + watchIdle - 1)
			assert.True(t, d.runs(), "consecutive locks share it")
			d.until(begun + watchIdle)
			assert.False(t, d.runs())
		}
		begun := d.now()
		d.hold("cid", true)
		d.until(begun + benchDue)
		assert.Equal(t, []watchdogRound{{begun + benchDue, []string{"cid"}}}, d.calls())
	})
}

func TestEarlierHoldWakesTheWatchdog(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.holdFor("late", false, time.Hour)
		synctest.Wait()
		d.holdFor("soon", false, time.Second)
		d.until(time.Second)
		assert.Equal(t, map[string]time.Duration{"soon": time.Second - drift(time.Second)}, d.expiredAt())
	})
}

func TestStoppedWatchdogRenewsAndReportsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.hold("ann", true)
		d.stop()
		synctest.Wait()
		assert.False(t, d.runs())
		late := d.hold("bob", false)
		assert.NotContains(t, d.watched, late)
		assert.False(t, d.runs())
		d.until(2 * benchLease)
		assert.Empty(t, d.calls())
		assert.Empty(t, d.expiredAt())
	})
}

// Tests of package lock do not run in parallel, so that no other goroutines count.
func TestTenThousandHoldsNeedOneGoroutine(t *testing.T) {
	const holds = 10_000
	bubble(t, func(t *testing.T, d *watchdogBench) {
		before := runtime.NumGoroutine()
		for i := range holds {
			d.hold(fmt.Sprint(i), i%2 == 0)
		}
		synctest.Wait()
		// Goroutines of tests before this one may end meanwhile.
		assert.LessOrEqual(t, runtime.NumGoroutine(), before+1)

		during := 0
		d.answers(func(holds []*hold) bool {
			during = runtime.NumGoroutine()
			return true
		})
		d.until(benchDue)
		assert.LessOrEqual(t, during, before+2, "one more while Redis is asked")
		require.Len(t, d.calls(), 1)
		assert.Len(t, d.calls()[0].keys, holds/2)
		d.until(benchEnd)
		assert.Len(t, d.expiredAt(), holds/2)
	})
}

// A hold that another lease holds for longer is renewed as often. Otherwise its loss would be
// reported late.
func TestLongLeaseIsRenewedAsOftenAsOthers(t *testing.T) {
	bubble(t, func(t *testing.T, d *watchdogBench) {
		h := newHold("ann", true)
		h.extend(time.Now(), MaxLease)
		assert.Equal(t, time.Now().Add(benchLease/3-drift(benchLease)), d.due(h))
		h.leases[0].watched = false
		assert.Equal(t, h.ends, d.due(h))
	})
}

func TestOvertakenAnswerDoesNotShortenALease(t *testing.T) {
	h, sent := newHold("ann", true), time.Now()
	h.extend(sent.Add(time.Second), benchLease)
	h.extend(sent, benchLease)
	assert.Equal(t, sent.Add(time.Second+benchEnd), h.ends)
}

// A suspended machine stops the monotonic clock and not the wall clock, and the wall clock may be
// set back. A lease has ended as soon as one of the clocks says so.
func TestLeaseEndsByTheClockThatIsAhead(t *testing.T) {
	now := time.Now()
	ends := now.Add(time.Minute)
	for name, at := range map[string]struct {
		monotonic, wall time.Duration // since now
		want            bool
	}{
		"just before the end":           {time.Minute - 1, time.Minute - 1, false},
		"at the end":                    {time.Minute, time.Minute, true},
		"suspended for an hour":         {time.Second, time.Hour, true},
		"suspended and resumed in time": {time.Second, 59 * time.Second, false},
		"ended, wall clock set back":    {time.Minute, -time.Hour, true},
		"valid, wall clock set back":    {time.Second, -time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			then := clocks(now, at.monotonic, at.wall)
			assert.Equal(t, at.want, hasEnded(ends, then))
			assert.Equal(t, !at.want, (&hold{ends: ends}).valid(then))
			assert.False(t, (&hold{ends: ends, lost: true}).valid(then), "a lost hold stays lost")
		})
	}
}

// A watchdog that was suspended with its machine finds the leases that have ended, and renews the
// others.
func TestWatchdogReadsBothClocks(t *testing.T) {
	w := newWatchdog(new(sync.Mutex), benchLease, nil, nil)
	w.running = true // the test replaces the goroutine
	now := time.Now()
	gone, kept := newHold("gone", false), newHold("kept", true)
	gone.extend(now, 10*time.Minute)
	kept.extend(now, MaxLease)
	w.watch(gone)
	w.watch(kept)
	renew, expired := w.takeDue(clocks(now, time.Second, 20*time.Minute))
	assert.Equal(t, []*hold{kept}, renew)
	assert.Equal(t, []*hold{gone}, expired)
}

// clocks returns a time at which the two clocks have advanced differently. Package time offers no
// function for that, so this writes the field of the monotonic clock.
func clocks(now time.Time, monotonic, wall time.Duration) time.Time {
	then := now.Add(wall)
	(*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&then)).ext += int64(monotonic - wall)
	if then.Sub(now) != monotonic || then.Round(0).Sub(now.Round(0)) != wall {
		panic("package time has changed how it stores the clocks")
	}
	return then
}
