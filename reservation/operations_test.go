package reservation_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

// Two ingresses, of which neither is where the operator asks, and each with what it remembers of the sale.
func TestOperatorChangesReachEveryIngressWithinASecond(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// before is how the sale stands when the operator comes. With one unit, it is sold out and remembered so.
		stock  int64
		before func(s *shop, sale uuid.UUID) error
		does   func(s *shop, sale uuid.UUID) error
		hears  reservation.Verdict
	}{
		"pause":                     {5, nil, pausing, reservation.Paused},
		"pause when sold out":       {1, nil, pausing, reservation.Paused},
		"resume":                    {5, pausing, resuming, reservation.Reserved},
		"end":                       {5, nil, ending, reservation.Ended},
		"end when sold out":         {1, nil, ending, reservation.Ended},
		"end when paused":           {5, pausing, ending, reservation.Ended},
		"restock up when sold out":  {1, nil, restocking(3), reservation.Reserved},
		"restock down to the taken": {5, nil, restocking(-4), reservation.SoldOut},
		"restock up after that":     {5, restocking(-4), restocking(3), reservation.Reserved},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _ := soldOutShop(t) // on a Redis of its own, in which nobody else's calls are counted
			sale := s.sale(c.stock).ID
			require.Equal(t, reservation.Reserved, s.buy(sale, "ann").Verdict)
			if c.before != nil {
				require.NoError(t, c.before(s, sale))
			}
			ingresses := []*shop{s.next(s.rdb), s.next(s.rdb)}
			for _, ingress := range ingresses {
				require.Equal(t, reservation.AlreadyPurchased, ingress.buy(sale, "ann").Verdict, "it knows the sale")
				if s.left(sale) == "0" {
					ingress.rememberSoldOut(sale)
				}
			}
			require.NoError(t, c.does(s, sale))
			changed := time.Now()
			for i, ingress := range ingresses {
				for {
					asked := time.Now()
					if ingress.buy(sale, []string{"bob", "cid"}[i]).Verdict == c.hears {
						break
					}
					require.Less(t, asked.Sub(changed), time.Second)
				}
			}
		})
	}
}

func pausing(s *shop, sale uuid.UUID) error {
	_, err := s.Pause(s.t.Context(), sale)
	return err
}

func resuming(s *shop, sale uuid.UUID) error {
	_, err := s.Resume(s.t.Context(), sale)
	return err
}

func ending(s *shop, sale uuid.UUID) error {
	_, err := s.End(s.t.Context(), sale)
	return err
}

func restocking(units int64) func(*shop, uuid.UUID) error {
	return func(s *shop, sale uuid.UUID) error {
		_, err := s.Restock(s.t.Context(), sale, units, "")
		return err
	}
}
