package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// The stream goes on when the sale does.
func TestSaleStreamIsSilentDuringRebuild(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	path, key := "/v1/sales/"+sale.String(), s.keys.Sale(s.keys.Partition(sale), sale)
	w := s.watch(path + "/events")
	e, ok := w.next()
	require.True(t, ok)
	require.Equal(t, 10.0, e.data["available"])
	require.NoError(t, s.rdb.Rename(t.Context(), key, key+"-kept").Err())
	s.awaitUnavailable(path)
	s.awaitUnavailable("/v1/sales")
	select {
	case e := <-w.events:
		t.Fatalf("an update of unknown stock: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	require.NoError(t, s.rdb.HSet(t.Context(), key+"-kept", "left", "8").Err())
	require.NoError(t, s.rdb.Rename(t.Context(), key+"-kept", key).Err())
	e, ok = w.next()
	require.True(t, ok)
	require.Equal(t, []any{8.0, 2.0}, []any{e.data["available"], e.data["held"]})
}

// All streams see reservation, payment, pause and restock, at the cost of one query.
func TestSaleStreamSendsEachChange(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.startWorker()
	sale := s.sale(reservation.Terms{Stock: 10, PaymentWindow: time.Hour})
	streams := []*eventReader{
		s.watch("/v1/sales/" + sale.String() + "/events"),
		s.watch("/v1/sales/" + sale.String() + "/events"),
	}
	// Changes in quick succession may arrive as one event, so the test waits for the last.
	expect := func(state string, stock, available, held, sold float64) {
		t.Helper()
		want := map[string]any{"state": state, "stock": stock, "available": available, "held": held, "sold": sold}
		for _, w := range streams {
			for e, ok := w.next(); ; e, ok = w.next() {
				require.True(t, ok)
				require.Equal(t, []string{"sale", ""}, []string{e.name, e.id})
				require.NotEqual(t, w.last, e.data, "only changes are sent")
				if w.last = e.data; e.data["held"] == held && e.data["sold"] == sold && e.data["state"] == state &&
					e.data["stock"] == stock {
					require.Equal(t, want, e.data)
					break
				}
			}
		}
	}
	expect("open", 10, 10, 0, 0)
	path, _, _ := s.purchased(sale, "ada")
	expect("open", 10, 9, 1, 0)
	s.awaitStatus(path, "ada", order.StatusConfirmed)
	s.post(path+"/pay", `{"reference":"pi_1"}`, as("ada")).is(http.StatusOK)
	expect("open", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/pause", "", operator).is(http.StatusOK)
	expect("paused", 10, 9, 0, 1)
	s.post("/v1/sales/"+sale.String()+"/restock", `{"units":5}`, operator).is(http.StatusOK)
	expect("paused", 15, 14, 0, 1)
	streams = append(streams[:0:0], s.watch("/v1/sales/"+sale.String()+"/events"))
	expect("paused", 15, 14, 0, 1)
	select {
	case e := <-streams[0].events:
		t.Fatalf("nothing has changed: %v", e)
	case <-time.After(4 * refreshInterval):
	}
	s.server.sales.feed.mu.Lock()
	require.Len(t, s.server.sales.feed.items, 1)
	s.server.sales.feed.mu.Unlock()
}

func TestFeedForgetsSaleWithoutSubscribers(t *testing.T) {
	t.Parallel()
	s, _, _ := runShop(t)
	sale := s.sale(reservation.Terms{Stock: 10})
	for range 3 {
		w := s.watch("/v1/sales/" + sale.String() + "/events")
		_, ok := w.next()
		require.True(t, ok)
		w.stop()
		testkit.Eventually(t, 30*time.Second, "no subscriber is left", func() bool {
			s.server.sales.feed.mu.Lock()
			defer s.server.sales.feed.mu.Unlock()
			item, known := s.server.sales.feed.items[sale]
			return !known || len(item.subscribers) == 0
		})
	}
	testkit.Eventually(t, 20*time.Second, "the item is forgotten", func() bool {
		s.server.sales.feed.mu.Lock()
		defer s.server.sales.feed.mu.Unlock()
		return len(s.server.sales.feed.items) == 0
	})
}
