package lock

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// dogLease makes the times of a watchdog easy to read: a lease ends here after 29.698 s, a renewal is due
// 9.698 s after the last one, and one that failed is tried again after 3 s.
const (
	dogLease = 30 * time.Second
	dogEnds  = dogLease - dogLease/100 - 2*time.Millisecond
	dogDue   = dogEnds - dogLease*2/3
	dogPause = dogLease / 10
)

// dog is a watchdog in a bubble, whose clock stands still while anybody works. Redis answers as the test
// has it.
type dog struct {
	*watchdog
	lock  sync.Mutex // the Locker's
	start time.Time

	// redis takes its time and tells whether the holds are renewed; nil for at once and all.
	redis  func(holds []*hold) bool
	rounds []round
	told   map[string]time.Duration // when the holders were told of the end
}

// round is one call of renew.
type round struct {
	at   time.Duration
	keys []string
}

// bubble runs a test with a watchdog, which ends with it.
func bubble(t *testing.T, test func(t *testing.T, d *dog)) {
	synctest.Test(t, func(t *testing.T) {
		d := &dog{start: time.Now(), told: make(map[string]time.Duration)}
		d.watchdog = newWatchdog(&d.lock, dogLease, d.renewAll, d.tell)
		defer d.wait()
		defer d.stop()
		test(t, d)
	})
}

func (d *dog) now() time.Duration { return time.Since(d.start) }

// renewAll does what Locker.renewCall does.
func (d *dog) renewAll(holds []*hold) {
	sent := time.Now()
	d.lock.Lock()
	call := round{at: d.now(), keys: keysOf(holds)}
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

// tell does what Locker.leasesExpired does.
func (d *dog) tell(holds []*hold) {
	d.lock.Lock()
	defer d.lock.Unlock()
	for _, h := range holds {
		if h.valid(time.Now()) {
			d.watch(h)
			continue
		}
		h.lost = true
		d.unwatch(h)
		d.told[h.key] = d.now()
	}
}

// hold returns one whose lease begins now; it is kept up if it is to be.
func (d *dog) hold(key string, keptUp bool) *hold {
	return d.holdFor(key, keptUp, d.lease)
}

func (d *dog) holdFor(key string, keptUp bool, lease time.Duration) *hold {
	h := newHold(key, keptUp)
	h.extend(time.Now(), lease)
	d.lock.Lock()
	defer d.lock.Unlock()
	d.watch(h)
	return h
}

func newHold(key string, keptUp bool) *hold {
	return &hold{grant: &grant{}, key: key, alarm: alarm{index: notInHeap}, leases: []*Lease{{watched: keptUp}}}
}

func (d *dog) answers(redis func(holds []*hold) bool) {
	d.lock.Lock()
	defer d.lock.Unlock()
	d.redis = redis
}

// until lets the clock run to a time since the start, and everything happen that happens by then.
func (d *dog) until(at time.Duration) {
	<-time.After(at - d.now())
	synctest.Wait()
}

func (d *dog) calls() []round {
	d.lock.Lock()
	defer d.lock.Unlock()
	return slices.Clone(d.rounds)
}

func (d *dog) endsTold() map[string]time.Duration {
	d.lock.Lock()
	defer d.lock.Unlock()
	return maps.Clone(d.told)
}

func (d *dog) runs() bool {
	d.lock.Lock()
	defer d.lock.Unlock()
	return d.running
}

func TestALeaseIsRenewedAThirdOfItAfterTheLastSuccessfulSend(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		const latency = 2 * time.Second
		d.redis = func([]*hold) bool {
			<-time.After(latency)
			return true
		}
		d.hold("ann", true)
		d.until(3*dogDue + latency)
		assert.Equal(t, []round{
			{1 * dogDue, []string{"ann"}},
			{2 * dogDue, []string{"ann"}},
			{3 * dogDue, []string{"ann"}},
		}, d.calls(), "the time that an answer takes does not add up")
		assert.LessOrEqual(t, dogDue, dogLease/3)

		// One that failed does not count: the next third begins with the send that succeeded.
		good := true
		d.answers(func([]*hold) bool {
			good = !good
			return good
		})
		d.until(5*dogDue + dogPause)
		require.Greater(t, len(d.calls()), 3)
		assert.Equal(t, []round{
			{4 * dogDue, []string{"ann"}},
			{4*dogDue + dogPause, []string{"ann"}},
			{5*dogDue + dogPause, []string{"ann"}},
		}, d.calls()[3:])
		assert.Empty(t, d.endsTold())
	})
}

func TestRenewalsThatAreDueTogetherTravelTogether(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.hold("ann", true)
		d.until(d.batchWindow())
		d.hold("bob", true) // just near enough to travel with ann
		d.until(d.batchWindow() + 1)
		d.hold("cid", true) // a nanosecond too late
		d.until(2 * dogDue)
		assert.Equal(t, []round{
			{dogDue, []string{"ann", "bob"}},
			{dogDue + d.batchWindow() + 1, []string{"cid"}},
			{2 * dogDue, []string{"ann", "bob"}}, // and stay together
		}, d.calls())
	})
}

func TestARenewalThatFailsIsTriedAgainUntilTheLeaseEnds(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.redis = func([]*hold) bool { return false }
		d.hold("ann", true)
		d.until(dogEnds - 1)
		assert.Empty(t, d.endsTold(), "not before the end")
		var tries []time.Duration
		for _, call := range d.calls() {
			tries = append(tries, call.at)
		}
		want := make([]time.Duration, 0, 8)
		for at := dogDue; at < dogEnds; at += dogPause {
			want = append(want, at)
		}
		assert.Equal(t, want, tries)

		d.until(dogEnds)
		assert.Equal(t, map[string]time.Duration{"ann": dogEnds}, d.endsTold())
		d.until(2 * dogLease)
		assert.Len(t, d.calls(), len(want), "what has ended is not renewed")
	})
}

func TestARenewalThatSucceedsAtLastSavesTheLease(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.redis = func([]*hold) bool { return d.now() > dogEnds-dogPause }
		h := d.hold("ann", true)
		d.until(dogEnds)
		assert.Empty(t, d.endsTold())
		calls := d.calls()
		require.NotEmpty(t, calls)
		last := calls[len(calls)-1].at
		assert.Greater(t, last, dogEnds-dogPause)
		assert.Equal(t, d.start.Add(last+dogEnds), h.ends)
	})
}

func TestARenewalThatHangsDelaysNobodyElse(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.redis = func(holds []*hold) bool {
			if holds[0].key == "ann" {
				<-time.After(2 * dogLease)
			}
			return true
		}
		d.hold("ann", true)
		d.until(2 * time.Second) // too late to travel with ann
		d.hold("bob", true)
		d.holdFor("explicit", false, 20*time.Second)
		d.until(2*dogLease + dogDue)

		told := d.endsTold()
		assert.Equal(t, dogEnds, told["ann"], "at its end, and not when Redis answers")
		assert.Equal(t, 2*time.Second+20*time.Second-drift(20*time.Second), told["explicit"])
		assert.NotContains(t, told, "bob", "which is renewed all the while")
		of := make(map[string]int)
		for _, call := range d.calls() {
			for _, key := range call.keys {
				of[key]++
			}
		}
		assert.Equal(t, 1, of["ann"], "nobody is asked twice at the same time")
		assert.Equal(t, 7, of["bob"])
	})
}

func TestALateAnswerBringsNothingBack(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		const late = dogEnds + time.Second
		d.redis = func(holds []*hold) bool {
			<-time.After(late - d.now())
			return true
		}
		expired := d.hold("expired", true)
		released := d.hold("released", true)
		d.until(dogDue + time.Second)
		d.lock.Lock()
		d.unwatch(released)
		d.lock.Unlock()
		d.until(late)

		assert.Equal(t, map[string]time.Duration{"expired": dogEnds}, d.endsTold())
		for _, h := range []*hold{expired, released} {
			assert.Equal(t, notInHeap, h.index, h.key)
		}
		assert.False(t, expired.valid(time.Now()), "what was told lost stays lost")
		d.until(2 * dogLease)
		assert.Len(t, d.calls(), 1)
	})
}

func TestALockThatIsNotKeptUpIsToldAtItsEnd(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.holdFor("ann", false, 7*time.Second)
		d.holdFor("bob", false, dogLease)
		kept := d.hold("cid", true)
		d.until(5 * time.Second)
		d.lock.Lock()
		kept.leases = []*Lease{{watched: false}} // the inner lease is released, and the outer one is explicit
		d.lock.Unlock()
		d.until(dogEnds - 1)
		assert.Equal(t, map[string]time.Duration{"ann": 7*time.Second - drift(7*time.Second)}, d.endsTold())
		d.until(dogEnds)
		assert.Equal(t, map[string]time.Duration{
			"ann": 7*time.Second - drift(7*time.Second), "bob": dogEnds, "cid": dogEnds,
		}, d.endsTold())
		assert.Empty(t, d.calls(), "and not renewed")
	})
}

func TestAShortHoldThatIsToBeKeptUpIsRenewedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		h := d.holdFor("ann", false, 7*time.Second)
		d.until(5 * time.Second)
		d.lock.Lock()
		h.leases = append(h.leases, &Lease{watched: true})
		d.watch(h)
		d.lock.Unlock()
		d.until(2 * dogLease)
		require.NotEmpty(t, d.calls())
		assert.Equal(t, 5*time.Second, d.calls()[0].at)
		assert.Empty(t, d.endsTold())
	})
}

func TestWhatIsForgottenIsLeftAlone(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		ann, bob := d.hold("ann", true), d.hold("bob", false)
		d.until(time.Second)
		d.lock.Lock()
		d.unwatch(ann)
		d.unwatch(bob)
		d.unwatch(bob) // twice does no harm
		d.lock.Unlock()
		d.until(2 * dogLease)
		assert.Empty(t, d.calls())
		assert.Empty(t, d.endsTold())

		// Looked after again, ann has ended in between.
		look := func() {
			d.lock.Lock()
			d.watch(ann)
			d.lock.Unlock()
			synctest.Wait()
		}
		look()
		assert.Equal(t, map[string]time.Duration{"ann": 2 * dogLease}, d.endsTold())
		d.until(3 * dogLease)
		look()
		assert.Equal(t, map[string]time.Duration{"ann": 2 * dogLease}, d.endsTold(), "a loss is told once")
	})
}

func TestAHoldThatWasRenewedWhileItsEndWasToldIsWatchedOn(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		h := newHold("ann", false)
		expired := d.expired
		d.expired = func(holds []*hold) { // an inner acquire has made it longer in this moment
			d.lock.Lock()
			h.extend(time.Now(), dogLease)
			d.lock.Unlock()
			d.expired = expired
			expired(holds)
		}
		d.lock.Lock()
		h.extend(time.Now(), 7*time.Second)
		d.watch(h)
		d.lock.Unlock()
		d.until(dogLease)
		assert.Empty(t, d.endsTold())
		d.until(2 * dogLease)
		assert.Equal(t, map[string]time.Duration{"ann": 7*time.Second - drift(7*time.Second) + dogEnds}, d.endsTold())
	})
}

func TestTheWatchdogEndsWhenItHasNothingToDoAndBeginsAnew(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
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
			assert.True(t, d.runs(), "one lock after another shares it")
			d.until(begun + watchIdle)
			assert.False(t, d.runs())
		}
		begun := d.now()
		d.hold("cid", true)
		d.until(begun + dogDue)
		assert.Equal(t, []round{{begun + dogDue, []string{"cid"}}}, d.calls())
	})
}

func TestWhatIsDueBeforeTheWatchdogWouldWakeUpWakesIt(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.holdFor("late", false, time.Hour)
		synctest.Wait()
		d.holdFor("soon", false, time.Second)
		d.until(time.Second)
		assert.Equal(t, map[string]time.Duration{"soon": time.Second - drift(time.Second)}, d.endsTold())
	})
}

func TestAStoppedWatchdogRenewsAndTellsNothing(t *testing.T) {
	bubble(t, func(t *testing.T, d *dog) {
		d.hold("ann", true)
		d.stop()
		synctest.Wait()
		assert.False(t, d.runs())
		late := d.hold("bob", false)
		assert.Equal(t, notInHeap, late.index)
		assert.False(t, d.runs())
		d.until(2 * dogLease)
		assert.Empty(t, d.calls())
		assert.Empty(t, d.endsTold())
	})
}

func TestTenThousandHoldsCostOneGoroutine(t *testing.T) {
	const holds = 10_000
	// Goroutines inherit the label of whoever starts them, so that those of other tests do not count.
	pprof.Do(context.Background(), pprof.Labels("test", t.Name()), func(context.Context) {
		bubble(t, func(t *testing.T, d *dog) {
			before := goroutinesOf(t)
			for i := range holds {
				d.hold(fmt.Sprint(i), i%2 == 0)
			}
			synctest.Wait()
			assert.Equal(t, before+1, goroutinesOf(t))

			during := 0
			d.answers(func(holds []*hold) bool {
				during = goroutinesOf(t)
				return true
			})
			d.until(dogDue)
			assert.Equal(t, before+2, during, "and one more while Redis is asked")
			require.Len(t, d.calls(), 1)
			assert.Len(t, d.calls()[0].keys, holds/2)
			d.until(dogEnds)
			assert.Len(t, d.endsTold(), holds/2)
		})
	})
}

// goroutinesOf counts those that carry the label of the test.
func goroutinesOf(t *testing.T) int {
	t.Helper()
	var profile bytes.Buffer
	require.NoError(t, pprof.Lookup("goroutine").WriteTo(&profile, 1))
	count, of := 0, 0
	for line := range strings.Lines(profile.String()) {
		if strings.Contains(line, " @ ") {
			_, err := fmt.Sscan(line, &of)
			require.NoError(t, err)
		}
		if strings.HasPrefix(line, "# labels:") && strings.Contains(line, `"test":"`+t.Name()+`"`) {
			count += of
		}
	}
	require.Positive(t, count, "the test's own goroutine is not found")
	return count
}
