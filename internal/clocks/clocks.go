// Package clocks compares the clocks of servers. None of them is believed alone before a step that nothing undoes: one
// that is ahead for a moment would take it too early.
package clocks

import (
	"errors"
	"fmt"
	"time"
)

// ApartMax is how far clocks may be apart. A step that nothing undoes waits while they are further.
const ApartMax = time.Second

// ErrApart is returned while clocks are too far apart.
var ErrApart = errors.New("clocks are too far apart (stampede doctor compares them)")

// start makes readings of different times comparable: the monotonic time since then is set by nobody.
var start = time.Now()

// Reading is a clock as it was read through a call.
type Reading struct {
	// Offset is by how much it is ahead of start and the time since then, give or take Margin.
	Offset time.Duration
	// Margin is half the round trip.
	Margin time.Duration
}

// Read reads a clock with ask.
func Read(ask func() (time.Time, error)) (Reading, error) {
	sent := time.Since(start)
	at, err := ask()
	half := (time.Since(start) - sent) / 2
	return Reading{at.Round(0).Sub(start) - sent - half, half}, err
}

// Own reads the clock of this process.
func Own() Reading {
	r, _ := Read(func() (time.Time, error) { return time.Now(), nil }) // it is nil
	return r
}

// Ahead returns by how much the clock is ahead of another one at least, below 0 if it is behind: what the round trips
// may have added is taken off.
func (r Reading) Ahead(of Reading) time.Duration {
	apart, margin := r.Offset-of.Offset, r.Margin+of.Margin
	if apart < 0 {
		return min(apart+margin, 0)
	}
	return max(apart-margin, 0)
}

// Times is the time by several clocks.
type Times struct {
	// Earliest and Latest are that of the clocks furthest behind and ahead. Nothing is over before Earliest is after its
	// end, and nothing is in time if Latest is after it.
	Earliest, Latest time.Time
}

// Agree returns the time by these clocks, or an error that wraps ErrApart. There must be one.
func Agree(clocks ...Reading) (Times, error) {
	first, last := clocks[0], clocks[0]
	for _, c := range clocks {
		if c.Offset < first.Offset {
			first = c
		}
		if c.Offset > last.Offset {
			last = c
		}
	}
	// Of each two: those furthest apart may be the ones that were read slowly.
	for i, one := range clocks {
		for _, other := range clocks[:i] {
			if apart := one.Ahead(other).Abs(); apart > ApartMax {
				return Times{}, fmt.Errorf("%w: by %v", ErrApart, apart.Round(time.Millisecond))
			}
		}
	}
	now := start.Round(0).Add(time.Since(start))
	return Times{now.Add(first.Offset), now.Add(last.Offset)}, nil
}
