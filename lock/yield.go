package lock

import (
	"math/rand/v2"
	"time"
)

const (
	// immediateAskers is about how many of the processes that receive a message ask immediately. In
	// one of twenty releases none does.
	immediateAskers = 3
	// askSpread is the time for each of the others, so that few of them ask while the lock is
	// already taken.
	askSpread = time.Millisecond
	// yieldProcessesMax bounds a yield to that many other processes.
	yieldProcessesMax = 5
	// yieldsMax bounds waiting.yields.
	yieldsMax = 1024
)

// onRelease wakes the first waiter of a released lock, now or later.
//
// If the lock was released here and other processes listen, they come first. A message reaches a
// goroutine of this process before it wakes a thread of Java, so without a yield this process would
// give the lock to itself again and again.
//
// Where many processes listen, few ask immediately: Redis answers concurrent calls together, so the
// one that gets the lock would wait for the answers to the others. Callers hold mu.
func (ws *waitState) onRelease(key string) {
	q := ws.queues[key]
	if q == nil {
		return
	}
	w := q.waiters[0]
	here := q.releasedHere
	q.releasedHere = false
	if others := q.listeners - 1; here && others > 0 {
		w.askBy(time.Now().Add(ws.yieldTime(others)))
		return
	}
	if q.listeners <= immediateAskers || rand.IntN(q.listeners) < immediateAskers {
		w.askNow()
		return
	}
	w.askBy(time.Now().Add(rand.N(time.Duration(q.listeners) * askSpread)))
}

func (ws *waitState) yieldTime(processes int) time.Duration {
	return time.Duration(min(processes, yieldProcessesMax)) * ws.yield
}

// noteListeners records how many connections were notified of a release by the call with this
// serial. Waiters here know the number at the next release; an attempt, which also asks for it, may
// be long ago, as one that gets the lock learns nothing. Without waiters here, the next acquire comes
// after the other processes that were notified.
func (l *Locker) noteListeners(key string, notified int, serial uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ws := &l.waiting
	channel := channelOf(key)
	others := notified
	if ws.channels[channel] > 0 || ws.ended[channel] >= serial {
		others--
	}
	if q := ws.queues[key]; q != nil {
		q.listeners = others + 1
		return
	}
	if others <= 0 {
		return
	}
	if len(ws.yields) >= yieldsMax {
		clear(ws.yields) // entries matter for milliseconds
	}
	ws.yields[key] = time.Now().Add(ws.yieldTime(others))
}

// yieldLeft is how long other processes come first. Callers hold mu.
func (ws *waitState) yieldLeft(key string) time.Duration {
	until, noted := ws.yields[key]
	if !noted {
		return 0
	}
	within := time.Until(until)
	if within <= 0 {
		delete(ws.yields, key)
	}
	return within
}
