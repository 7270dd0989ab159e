package fleet

import (
	"slices"
	"time"
)

// Pending is something that was seen, and is a trouble if it lasts until Due.
type Pending struct {
	Trouble
	Due time.Time `json:"due"`
}

// unexplained are the pending ones that no trouble explains, the first due first.
func unexplained(pending, shown []*lasting) []Pending {
	all := []Pending{}
	for _, one := range pending {
		isCause := func(of *lasting) bool { return !of.ofOne && slices.Contains(one.causes, of.kind) }
		if !slices.ContainsFunc(shown, isCause) && !slices.Contains(shown, one.because) {
			all = append(all, Pending{Trouble: one.trouble(), Due: one.begun.Add(one.after)})
		}
	}
	slices.SortFunc(all, func(a, b Pending) int { return a.Due.Compare(b.Due) })
	return all
}

// IsMeasured is true if all processes that answer have answered twice.
func (s *Snapshot) IsMeasured() bool {
	return !slices.ContainsFunc(s.Processes, func(p Process) bool { return p.Up && !p.RatesKnown })
}

// IsSettled is true if a later snapshot says no more of the same state: all is looked at and all units are counted that
// can be, and nothing pending is due until then.
func (s *Snapshot) IsSettled(until time.Time) bool {
	return !s.unlooked && !slices.ContainsFunc(s.Sales, func(sale Sale) bool { return sale.uncounted }) &&
		!slices.ContainsFunc(s.Pending, func(p Pending) bool { return p.Due.Before(until) })
}
