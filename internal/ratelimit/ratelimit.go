// Package ratelimit limits the rate of events per key, for many keys in a table of fixed size.
//
// Each key has a bucket of the generic cell rate algorithm (GCRA; ITU-T I.371, annex A): it allows a burst of events,
// and one more each 1/rate seconds. A bucket is stored as the time at which it will be full again.
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
	// slotsMax is how many keys a Limiter remembers: 8 MB.
	slotsMax = 1 << 20
	// ways is the number of slots that can hold a key: one cache line.
	ways = 8
	// ticksPerInterval divides the interval between two events. A slot counts time in ticks, in 32 bits.
	ticksPerInterval = 256
	// MaxBurst keeps the ticks in which a bucket fills far below 32 bits.
	MaxBurst = 1_000_000
	// MaxPerSecond keeps a tick long enough to be rounded to whole nanoseconds.
	MaxPerSecond = 10_000
	// sweepTicks is the period in which slots of the past are cleared, before their ticks wrap around and look like
	// the future. futureTicks separates the two: no bucket is full later than MaxBurst intervals from now, doubled
	// for a caller whose clock is a little behind; and after a sweep no slot is much older than three periods.
	sweepTicks  = 1 << 30
	futureTicks = 1 << 29
)

// Rate is the average number of events per second. Zero is unlimited.
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
		return fmt.Errorf("want a rate like 5/s, 30/m or 100/h, or 0 for none; got %q", text)
	case n > 0 && n/seconds < 1.0/86400, n/seconds > MaxPerSecond:
		return fmt.Errorf("want a rate between one a day and %d/s; got %q", MaxPerSecond, text)
	}
	*r = Rate(n / seconds)
	return nil
}

// String formats the rate for UnmarshalText.
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

// Limiter limits each key. It is safe for concurrent use, takes no lock, and does not allocate.
//
// It stores 64-bit hashes of keys with a random seed, so that clients cannot choose keys that share a bucket or a set.
// The probability that two keys of a set share a bucket is about one in a hundred million.
type Limiter struct {
	tick  time.Duration
	burst uint32 // in ticks: how far a bucket may be ahead of now
	seed  maphash.Seed
	start time.Time

	evicted atomic.Int64
	// swept is the number of the last period in which the table was swept.
	swept atomic.Int64
	// slots are sets of ways. The upper half of a slot is a fingerprint of the key; the lower half has the lower bits
	// of the tick at which the bucket is full again. Zero is a slot that was never used.
	slots []atomic.Uint64
}

// New returns a Limiter that allows each key a burst of events, and then the rate.
func New(rate Rate, burst int) *Limiter { return newLimiter(rate, burst, slotsMax) }

func newLimiter(rate Rate, burst, slots int) *Limiter {
	interval := time.Duration(float64(time.Second) / float64(rate))
	tick := max(interval/ticksPerInterval, 1)
	return &Limiter{
		tick: tick, burst: uint32(burst) * ticksPerInterval,
		seed: maphash.MakeSeed(), start: time.Now(), slots: make([]atomic.Uint64, slots),
	}
}

// Evicted returns how many buckets were dropped before they were full, because their set had no free slot.
func (l *Limiter) Evicted() int64 { return l.evicted.Load() }

// Take reports whether the key is allowed an event now, and if not, how long to wait. A refused call does not count.
//
// Of concurrent calls for a new key, two may find a full bucket each, if a slot of the set becomes free between them.
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
		// ahead is the used part of the burst, in ticks.
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

// find returns the slot with the fingerprint and its value, or the slot for it: one whose bucket is full, or else the
// one whose bucket will be full first.
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

// ticksAhead returns in how many ticks the bucket of a slot will be full; 0 if it is, or if the slot was never used.
func ticksAhead(slot uint64, tick uint32) uint32 {
	if ahead := uint32(slot) - tick; slot != 0 && ahead < futureTicks {
		return ahead
	}
	return 0
}

// sweep clears the slots whose buckets are full. A call of Take runs it once in each period: at the default rate every
// nine days, for a millisecond or two.
func (l *Limiter) sweep(period, elapsed int64) {
	last := l.swept.Load()
	if period < last || !l.swept.CompareAndSwap(last, period) {
		return // another call sweeps, or this one has an earlier time
	}
	for i := range l.slots {
		old := l.slots[i].Load()
		// After two periods without a Take all buckets are full.
		if old != 0 && (period > last+2 || ticksAhead(old, uint32(elapsed)) == 0) {
			l.slots[i].CompareAndSwap(old, 0)
		}
	}
}
