// Package ratelimit bounds how often each of many keys may do something, in a table of fixed size.
//
// A key has a bucket of the generic cell rate algorithm (GCRA; ITU-T I.371, annex A): it may do Burst things at once, and
// one more each 1/PerSecond seconds. All that a bucket needs is one point in time, at which it will be full again.
package ratelimit

import (
	"fmt"
	"hash/maphash"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// Slots is how many keys a Limiter remembers: 8 MB.
	Slots = 1 << 20
	// ways is how many slots a key may stand in: a cache line of them.
	ways = 8
	// A slot counts time in ticks, of which the interval between two things has so many, in 32 bits.
	ticksPerInterval = 256
	// MaxBurst keeps the time in which a bucket fills far below what 32 bits of ticks can tell apart.
	MaxBurst = 1_000_000
	// MaxPerSecond keeps a tick so long that whole nanoseconds are exact enough.
	MaxPerSecond = 10_000
	// sweepTicks is how often slots of the past are cleared, before their ticks could be taken for those of the future.
	// futureTicks tells them apart: no bucket is full later than MaxBurst from now, with as much again for a caller whose
	// time is a little behind that of another one; and after a sweep no slot is older than three periods and a little.
	sweepTicks  = 1 << 30
	futureTicks = 1 << 29
)

// Rate is how many things a key may do in a second, on average. Zero: as many as it likes.
type Rate float64

// UnmarshalText reads "5/s", "30/m", "100/h", or "0".
func (r *Rate) UnmarshalText(text []byte) error {
	number, unit, hasUnit := strings.Cut(string(text), "/")
	seconds, known := map[string]float64{"s": 1, "m": 60, "h": 3600}[unit]
	n, err := strconv.ParseFloat(number, 64)
	switch {
	case string(text) == "0":
		*r = 0
		return nil
	case err != nil, math.IsNaN(n), n < 0, !hasUnit, !known:
		return fmt.Errorf("want a rate like 5/s, 30/m or 100/h, or 0 for none; %q is none", text)
	case n > 0 && n/seconds < 1.0/86400, n/seconds > MaxPerSecond:
		return fmt.Errorf("want a rate between one a day and %d/s; %q is not", MaxPerSecond, text)
	}
	*r = Rate(n / seconds)
	return nil
}

// String is a rate as UnmarshalText reads it.
func (r Rate) String() string {
	if r == 0 {
		return "0"
	}
	for _, u := range []struct {
		unit    string
		seconds float64
	}{{"s", 1}, {"m", 60}, {"h", 3600}} {
		if n := float64(r) * u.seconds; n >= 1 || u.unit == "h" {
			return strconv.FormatFloat(n, 'g', 6, 64) + "/" + u.unit
		}
	}
	return ""
}

// Limiter bounds each key. It is safe for concurrent use, takes no lock, and allocates nothing.
//
// It remembers the keys by hashes of 64 bits, seeded by chance, so nobody can make keys that share a bucket or a set on
// purpose. Two keys in eight slots share one by accident once in some hundred million.
type Limiter struct {
	tick  time.Duration
	burst uint32 // in ticks: how far a bucket may be ahead of the time
	seed  maphash.Seed
	start time.Time

	evicted atomic.Int64
	// swept is the number of the last period of sweepTicks in which the table was swept.
	swept atomic.Int64
	// slots are sets of ways. A slot is a fingerprint in its upper half, and in its lower the tick at which the bucket is full
	// again, of which the upper bits are lost. Zero is a slot that was never used.
	slots []atomic.Uint64
}

// New returns a Limiter whose keys may do burst things at once, and then so many in a second.
func New(rate Rate, burst int) *Limiter { return newLimiter(rate, burst, Slots) }

func newLimiter(rate Rate, burst, slots int) *Limiter {
	interval := time.Duration(float64(time.Second) / float64(rate))
	tick := max(interval/ticksPerInterval, 1)
	return &Limiter{
		tick: tick, burst: uint32(burst) * ticksPerInterval, seed: maphash.MakeSeed(), start: time.Now(), slots: make([]atomic.Uint64, slots),
	}
}

// Evicted is how many buckets were forgotten, before they were full, because a set had no slot left.
func (l *Limiter) Evicted() int64 { return l.evicted.Load() }

// Take tells whether the key may do one thing now, and if not, after what time. A refusal costs the key nothing.
//
// Of calls for a new key at the very same time two may find an empty bucket each, if one of them meets a slot that runs out
// between its look and that of the other one.
func (l *Limiter) Take(key string, now time.Time) (wait time.Duration, ok bool) {
	return l.take(maphash.String(l.seed, key), now)
}

// TakeBytes is Take for a key of bytes.
func (l *Limiter) TakeBytes(key []byte, now time.Time) (wait time.Duration, ok bool) {
	return l.take(maphash.Bytes(l.seed, key), now)
}

func (l *Limiter) take(hash uint64, now time.Time) (wait time.Duration, ok bool) {
	elapsed := int64(max(now.Sub(l.start), 0) / l.tick)
	if period := elapsed / sweepTicks; period != l.swept.Load() {
		l.sweep(period, elapsed)
	}
	tick := uint32(elapsed)
	first := int(hash%uint64(len(l.slots)/ways)) * ways
	set := l.slots[first : first+ways]
	fingerprint := hash &^ math.MaxUint32
	if fingerprint == 0 {
		fingerprint = 1 << 32
	}
	for {
		slot, old, evicts := find(set, fingerprint, tick)
		// ahead is how much of its burst the key has used.
		ahead := uint32(0)
		if old&^math.MaxUint32 == fingerprint {
			ahead = ticksAhead(old, tick)
		}
		if ahead+ticksPerInterval > l.burst {
			return time.Duration(ahead+ticksPerInterval-l.burst) * l.tick, false
		}
		if slot.CompareAndSwap(old, fingerprint|uint64(tick+ahead+ticksPerInterval)) {
			if evicts {
				l.evicted.Add(1)
			}
			return 0, true
		}
	}
}

// find returns the slot of the fingerprint and what is in it, or the slot to put it in: one whose bucket is full, or else
// the one whose bucket will be full first.
func find(set []atomic.Uint64, fingerprint uint64, tick uint32) (slot *atomic.Uint64, old uint64, evicts bool) {
	least := uint32(math.MaxUint32)
	for i := range set {
		v := set[i].Load()
		if v&^math.MaxUint32 == fingerprint {
			return &set[i], v, false
		}
		if ahead := ticksAhead(v, tick); ahead < least {
			slot, old, least = &set[i], v, ahead
		}
	}
	return slot, old, least > 0
}

// ticksAhead is for how many ticks from now on the bucket of a slot is not full: 0 if it is, or the slot was never used.
func ticksAhead(slot uint64, tick uint32) uint32 {
	if ahead := uint32(slot) - tick; slot != 0 && ahead < futureTicks {
		return ahead
	}
	return 0
}

// sweep clears the slots whose buckets are full. It runs once in each period, in a call of Take: for the default rate, once
// in nine days, and for a millisecond or two.
func (l *Limiter) sweep(period, elapsed int64) {
	last := l.swept.Load()
	if period < last || !l.swept.CompareAndSwap(last, period) {
		return // somebody else sweeps, or came with an earlier time
	}
	for i := range l.slots {
		old := l.slots[i].Load()
		// After two periods without a Take there is no bucket that is not full.
		if old != 0 && (period > last+2 || ticksAhead(old, uint32(elapsed)) == 0) {
			l.slots[i].CompareAndSwap(old, 0)
		}
	}
}
