package ingress

import (
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// newSales returns ids in the order of creation.
func newSales(n int) []uuid.UUID {
	ids := make([]uuid.UUID, n)
	for i := range ids {
		ids[i] = uuid.UUID{1, byte(i >> 8), byte(i)}
	}
	return ids
}

func (m *saleMetrics) counted(sale string, outcome saleOutcome) float64 {
	return testutil.ToFloat64(m.purchases.WithLabelValues(sale, saleOutcomeLabels[outcome]))
}

func TestFollowedSalesHaveSeries(t *testing.T) {
	t.Parallel()
	m, sales := newSaleMetrics(), newSales(saleSeriesMax+2)
	require.Equal(t, 4, testutil.CollectAndCount(m.purchases), "the others")
	m.count(sales[1], saleAccepted, true)
	m.count(sales[1], saleShed, false)
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleAccepted))
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleShed))
	m.count(uuid.UUID{9}, saleRefused, false)
	require.EqualValues(t, 1, m.counted(otherSales, saleRefused), "a sale that may not exist gets no series")
	require.Equal(t, 2*4, testutil.CollectAndCount(m.purchases))

	newest, selling := sales[saleSeriesMax+1], sales[0] // the catalog names those first that sell
	m.follow(sales[:saleSeriesMax]...)
	require.Equal(t, (saleSeriesMax+1)*4, testutil.CollectAndCount(m.purchases))
	m.count(newest, saleFailed, true)
	m.count(selling, saleAccepted, true)
	require.EqualValues(t, 1, m.counted(otherSales, saleFailed))
	require.EqualValues(t, 1, m.counted(selling.String(), saleAccepted))
	require.EqualValues(t, 1, m.counted(sales[1].String(), saleAccepted), "it has kept its own")
	m.follow(sales[2:]...)
	require.Equal(t, (saleSeriesMax+1)*4, testutil.CollectAndCount(m.purchases), "others have lost their series")
	m.count(newest, saleFailed, true)
	require.EqualValues(t, 1, m.counted(newest.String(), saleFailed))
}

// A sale that is asked for gets series although there are enough others, and keeps them for a while.
func TestActiveSalesAreFollowed(t *testing.T) {
	t.Parallel()
	m, sales := newSaleMetrics(), newSales(saleSeriesMax+1)
	asked := sales[0]
	m.follow(sales[1:]...)
	require.Empty(t, m.active())
	m.count(asked, saleRefused, true)
	require.EqualValues(t, 1, m.counted(otherSales, saleRefused))
	require.Equal(t, []uuid.UUID{asked}, m.active())
	require.Empty(t, m.active())
	m.follow(slices.Concat([]uuid.UUID{asked}, sales[1:])...)
	m.count(asked, saleRefused, true)
	require.EqualValues(t, 1, m.counted(asked.String(), saleRefused))
	for range activeLooks {
		require.Equal(t, []uuid.UUID{asked}, m.active())
	}
	require.Empty(t, m.active())
}

func TestCountOfPurchaseAllocatesNothing(t *testing.T) {
	m, sale := newSaleMetrics(), newSales(1)[0]
	require.NoError(t, register(prometheus.NewRegistry(), m.purchases))
	m.add(sale)
	require.Zero(t, testing.AllocsPerRun(100, func() { m.count(sale, saleRefused, true) }))
}
