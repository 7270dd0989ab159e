package lock

import (
	"math/rand/v2"
	"time"
)

const (
	// immediateAskers is how many of those who hear of a release ask at once, more or less: nobody does once in
	// twenty times.
	immediateAskers = 3
	// askSpread is the time for each of the others, so that few of them ask while the lock is held again.
	askSpread = time.Millisecond
	// yieldProcessesMax is for how many other processes at most there is a yield.
	yieldProcessesMax = 5
	// yieldsMax bounds the keys that are noted as left to others.
	yieldsMax = 1024
)

// released has the first who waits for a lock here ask for it or leave that to others for a while.
//
// If the lock was released here and other processes listen, they come first: the message is here sooner than there,
// where it wakes a thread of Java, so this process would hand the lock to itself again and again. And where many
// processes listen, not all ask: Redis would answer the one who gets it last, because it answers those
// who ask at the same time together. It needs mu.
func (ws *waiting) onRelease(key string) {
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

func (ws *waiting) yieldTime(processes int) time.Duration {
	return time.Duration(min(processes, yieldProcessesMax)) * ws.yield
}

// noteYield is told how many connections heard of the release of a lock by the call of a serial. If others than
// this process's are among them, and nobody waits here who would hear of it as well, the next who wants the lock here
// comes after them.
func (l *Locker) noteYield(key string, listeners int, serial uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ws := &l.waiting
	channel := channelOf(key)
	if ws.channels[channel] > 0 || ws.ended[channel] >= serial {
		listeners--
	}
	if listeners <= 0 || ws.queues[key] != nil {
		return
	}
	if len(ws.yields) >= yieldsMax {
		clear(ws.yields) // it was for milliseconds
	}
	ws.yields[key] = time.Now().Add(ws.yieldTime(listeners))
}

// yieldLeft is how long others come first. It needs mu.
func (ws *waiting) yieldLeft(key string) time.Duration {
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
