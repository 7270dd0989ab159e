package fleet

import (
	"slices"

	"github.com/google/uuid"
)

// historyMax is how many points are kept: fifteen minutes.
const historyMax = 900

// history is a ring of the last points. The zero value is empty.
type history struct {
	ring []Point
	next int // the place of the oldest point, once the ring is full
}

func (h *history) add(p Point) {
	if len(h.ring) < historyMax {
		h.ring = append(h.ring, p)
		return
	}
	h.ring[h.next] = p
	h.next = (h.next + 1) % historyMax
}

// points returns all points, oldest first.
func (h *history) points() []Point {
	return slices.Concat(h.ring[h.next:], h.ring[:h.next])
}

func newPoint(s *Snapshot) Point {
	p := Point{At: s.At, Rates: s.Rates, Sales: make(map[uuid.UUID]SalePoint, len(s.Sales))}
	for i := range s.Sales {
		sale := &s.Sales[i]
		p.Sales[sale.ID] = SalePoint{
			Rates: sale.Rates, Available: sale.Available, Held: sale.Held, Sold: sale.Sold,
			Known: sale.UnitsKnown && s.SalesRead,
		}
	}
	return p
}
