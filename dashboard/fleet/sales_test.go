package fleet

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
	"stampede/reservation/catalog"
)

func TestEntriesAreNoStock(t *testing.T) {
	t.Parallel()
	goods := uuid.Must(uuid.NewV7())
	c := catalog.CountedSale{Available: 997, Held: 1, Sold: 2, State: reservation.StateOpen}
	c.EntryFor, c.Stock = goods, 1000
	sale := NewSale(&c)
	sale.SetUnits(&c)
	require.Equal(t, []int64{3, 0}, []int64{sale.Stock, sale.Available})
	require.Equal(t, "open", sale.Status())
}
