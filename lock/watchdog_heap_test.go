package lock

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The heap is compared with a linear scan of all holds.
func TestWatchdogPicksTheSameHoldsAsAScan(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed=%d", seed)
	bubble(t, func(t *testing.T, d *watchdogBench) {
		d.running = true // the test replaces the goroutine
		defer func() { d.running = false }()
		random := rand.New(rand.NewPCG(seed, 0))
		upTo := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
		var all, renewing []*hold
		picked := 0
		for step := range 5_000 {
			switch random.IntN(8) {
			case 0, 1: // acquired
				h := newHold(fmt.Sprint(step), random.IntN(2) == 0)
				h.extend(time.Now(), MinLease+upTo(2*benchLease))
				d.watch(h)
				all = append(all, h)
			case 2: // released, in any state
				if len(all) > 0 {
					i := random.IntN(len(all))
					d.unwatch(all[i])
					all = slices.Delete(all, i, i+1)
				}
			case 3: // extended by a reentry, which may be watched
				if len(all) > 0 {
					h := all[random.IntN(len(all))]
					h.extend(time.Now(), upTo(2*benchLease))
					h.leases[0].watched = random.IntN(2) == 0
					d.update(h)
				}
			case 4, 5: // an answer of Redis
				if n := len(renewing); n > 0 {
					some := renewing[random.IntN(n):]
					renewing = renewing[:n-len(some)]
					if random.IntN(2) == 0 {
						for _, h := range some {
							h.extend(time.Now(), benchLease)
							d.update(h)
						}
					}
					d.renewalDone(some)
				}
			default:
				<-time.After(upTo(benchLease / 10))
				now := time.Now()
				wantRenew, wantOver := scan(all, now)
				renew, expired := d.pop(now)
				require.ElementsMatch(t, keysOf(wantRenew), keysOf(renew), "step %d: to renew", step)
				require.ElementsMatch(t, keysOf(wantOver), keysOf(expired), "step %d: expired", step)
				renewing = append(renewing, renew...)
				all = slices.DeleteFunc(all, func(h *hold) bool { return slices.Contains(expired, h) })
				picked += len(renew) + len(expired)
			}
			requireHeap(t, d.heap, all)
		}
		require.Greater(t, picked, 500, "too few holds were picked: the test shows nothing")
	})
}

// scan returns what pop should return.
func scan(all []*hold, now time.Time) (renew, expired []*hold) {
	for _, h := range all {
		due := h.ends.Add(-benchLease * 2 / 3)
		if third := h.renewedAt.Add(benchLease/3 - drift(benchLease)); third.Before(due) {
			due = third
		}
		if due.Before(h.notBefore) {
			due = h.notBefore
		}
		if due.After(h.ends) {
			due = h.ends
		}
		switch {
		case !now.Before(h.ends):
			expired = append(expired, h)
		case h.leases[0].watched && !h.renewing && due.Sub(now) <= benchLease/20:
			renew = append(renew, h)
		}
	}
	return renew, expired
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

// requireHeap checks the order of the heap and the index of each hold.
func requireHeap(t *testing.T, in alarms, want []*hold) {
	t.Helper()
	require.Len(t, in, len(want))
	for i, h := range in {
		if h.index != i || i > 0 && h.at.Before(in[(i-1)/2].at) {
			t.Fatalf("the hold at %d has index %d, or is due before its parent", i, h.index)
		}
	}
	for _, h := range want {
		if h.index == notInHeap || in[h.index] != h {
			t.Fatalf("hold %s is not in the heap", h.key)
		}
	}
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
	renew, expired := w.pop(clocks(now, time.Second, 20*time.Minute))
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
