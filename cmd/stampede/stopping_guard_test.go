//go:build system

package main

import (
	"net/http"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// A stopping ingress still sells, so the guard must still run.
func TestStoppingIngressRefusesReplacedRedis(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ingress, url := s.serve("--stop-delay=30s")
	purchases := url + "/v1/sales/" + s.sale(url, 1_000_000).String() + "/orders"
	buyer := 0
	buy := func() int {
		t.Helper()
		buyer++
		status, _ := call(t, http.MethodPost, purchases, "", "X-User-ID", strconv.Itoa(buyer))
		return status
	}
	testkit.Eventually(t, within, "the sale is open", func() bool { return buy() == http.StatusAccepted })
	require.NoError(t, syscall.Kill(ingress.Pid(), syscall.SIGTERM))
	testkit.Eventually(t, within, "the ingress is stopping", func() bool {
		status, _ := call(t, http.MethodGet, url+"/readyz", "")
		return status == http.StatusServiceUnavailable
	})
	require.Equal(t, http.StatusAccepted, buy())
	_, err := s.pool.Exec(t.Context(), "UPDATE redis_servers SET run_id = 'another'")
	require.NoError(t, err)
	testkit.Eventually(t, within, "nothing is sold", func() bool { return buy() == http.StatusServiceUnavailable })
}
