package catalog_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/reservation"
)

// The operator calls another ingress than the two that remember the sale.
func TestOperatorChangesReachEveryIngressWithinASecond(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// before prepares the sale. With a stock of 1 the ingresses remember it as sold out.
		stock  int64
		before func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error
		does   func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error
		want   reservation.Verdict
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
			s, _ := testshop.SoldOutShop(t) // on its own Redis, which counts no other calls
			sale := s.Sale(t, c.stock).ID
			s.Buy(t, sale, "ann")
			if c.before != nil {
				require.NoError(t, c.before(t, s, sale))
			}
			ingresses := []*testshop.Shop{s.Next(t, s.Rdb), s.Next(t, s.Rdb)}
			for _, ingress := range ingresses {
				require.Equal(t, reservation.AlreadyPurchased, ingress.Ask(t, sale, "ann").Verdict, "it has looked up the sale")
				if s.Left(t, sale) == 0 {
					ingress.RememberSoldOut(t, sale)
				}
			}
			require.NoError(t, c.does(t, s, sale))
			changed := time.Now()
			for i, ingress := range ingresses {
				for {
					asked := time.Now()
					if ingress.Ask(t, sale, []string{"bob", "cid"}[i]).Verdict == c.want {
						break
					}
					require.Less(t, asked.Sub(changed), time.Second)
				}
			}
		})
	}
}

func pausing(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.Pause(t.Context(), sale)
	return err
}

func resuming(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.Resume(t.Context(), sale)
	return err
}

func ending(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
	_, err := s.End(t.Context(), sale)
	return err
}

func restocking(units int64) func(testing.TB, *testshop.Shop, uuid.UUID) error {
	return func(t testing.TB, s *testshop.Shop, sale uuid.UUID) error {
		_, err := s.Restock(t.Context(), sale, units, "")
		return err
	}
}
