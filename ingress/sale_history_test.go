package ingress

import (
	"net/http"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/reservation"
)

func TestHistoryShowsChangesAndOperators(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	sale := s.sale(reservation.Terms{Stock: 10})
	base := "/v1/sales/" + sale.String()
	viewer := bearing("token-viewer")
	s.post(base+"/pause", "", bearing("token-operator")).is(http.StatusOK)
	s.post(base+"/restock", `{"units":5}`, bearing("token-admin")).is(http.StatusOK)
	history := "/v1/admin/sales/" + sale.String() + "/history"
	r := s.get(history, viewer)
	changes := r.is(http.StatusOK)["changes"].([]any)
	require.Len(t, changes, 3)
	for i, want := range []struct{ change, operator string }{
		{"created", ""}, {"paused", "the-operator"}, {"restocked", "the-admin"},
	} {
		got := changes[i].(map[string]any)
		require.Equal(t, want.change, got["change"])
		require.EqualValues(t, i+1, got["revision"])
		operator, _ := got["operator"].(string)
		require.Equal(t, want.operator, operator)
	}
	require.EqualValues(t, 5, changes[2].(map[string]any)["data"].(map[string]any)["units"])
	require.Equal(t, noStore, r.header["Cache-Control"])

	newest := s.get(history+"?limit=1", viewer).is(http.StatusOK)["changes"].([]any)
	require.Equal(t, changes[2:], newest)
	require.Len(t, s.get(history+"?limit=", viewer).is(http.StatusOK)["changes"], 3)
	for query, detail := range map[string]string{
		"limit=0": "1 to 1000", "limit=1001": "1 to 1000", "limit=x": "1 to 1000", "limit=1&limit=2": "once",
		"cursor=x": "takes limit", "%zz": "not valid",
	} {
		p := s.get(history+"?"+query, viewer).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, query)
	}
	for _, id := range []string{"x", uuid.NewString()} {
		s.get("/v1/admin/sales/"+id+"/history", viewer).isProblem(http.StatusNotFound, "sale-not-found")
	}
	unlock := s.lock("sale_events")
	defer unlock()
	s.get(history, viewer).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
}
