package catalog_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testsale"
	"stampede/reservation"
)

// The operator calls another ingress than the two that remember the sale.
func TestOperatorChangesReachEveryIngressWithinASecond(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// before prepares the sale. With a stock of 1 the ingresses remember it as sold out.
		stock  int64
		before func(s *testsale.Shop, sale uuid.UUID) error
		does   func(s *testsale.Shop, sale uuid.UUID) error
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
			s, _ := testsale.SoldOutShop(t) // on its own Redis, which counts no other calls
			sale := s.Sale(c.stock).ID
			require.Equal(t, reservation.Reserved, s.Buy(sale, "ann").Verdict)
			if c.before != nil {
				require.NoError(t, c.before(s, sale))
			}
			ingresses := []*testsale.Shop{s.Next(s.Redis), s.Next(s.Redis)}
			for _, ingress := range ingresses {
				require.Equal(t, reservation.AlreadyPurchased, ingress.Buy(sale, "ann").Verdict, "it has looked up the sale")
				if s.Left(sale) == "0" {
					ingress.RememberSoldOut(sale)
				}
			}
			require.NoError(t, c.does(s, sale))
			changed := time.Now()
			for i, ingress := range ingresses {
				for {
					asked := time.Now()
					if ingress.Buy(sale, []string{"bob", "cid"}[i]).Verdict == c.want {
						break
					}
					require.Less(t, asked.Sub(changed), time.Second)
				}
			}
		})
	}
}

func pausing(s *testsale.Shop, sale uuid.UUID) error {
	_, err := s.Pause(s.T.Context(), sale)
	return err
}

func resuming(s *testsale.Shop, sale uuid.UUID) error {
	_, err := s.Resume(s.T.Context(), sale)
	return err
}

func ending(s *testsale.Shop, sale uuid.UUID) error {
	_, err := s.End(s.T.Context(), sale)
	return err
}

func restocking(units int64) func(*testsale.Shop, uuid.UUID) error {
	return func(s *testsale.Shop, sale uuid.UUID) error {
		_, err := s.Restock(s.T.Context(), sale, units, "")
		return err
	}
}
