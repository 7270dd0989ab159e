//go:build system

package main

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
)

// Settings may all be right, and Redis still refuses every write. Readiness and doctor tell what purchases are told.
func TestRedisThatRefusesWritesIsNamed(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := newShop(t)
	s.redisURL = own.URL
	rdb, err := connect.Control(own.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = rdb.Close() })
	_, ingress := s.serve()
	worker := s.worker("worker")
	worker.Start()
	ready := []string{ingress + "/readyz", "http://" + loggedAddr(worker, "metrics are served") + "/readyz"}
	readiness := func(url string) (int, string) { return call(t, http.MethodGet, url, "") }
	areReady := func() {
		for _, url := range ready {
			testkit.Eventually(t, within, url, func() bool { status, _ := readiness(url); return status == http.StatusOK })
		}
		status, text := s.run("doctor")
		require.Equal(t, exitOK, status, text)
	}
	set := func(name, value string) {
		t.Helper()
		require.NoError(t, rdb.ConfigSet(t.Context(), name, value).Err())
	}
	sale := s.sale(ingress, 10)
	s.buy(ingress, sale, "ann")
	areReady()
	limit := rdb.ConfigGet(t.Context(), "maxmemory").Val()["maxmemory"]
	for _, c := range []struct {
		answer         string
		refuse, accept func()
	}{
		{"NOREPLICAS", func() { set("min-replicas-to-write", "1") }, func() { set("min-replicas-to-write", "0") }},
		{"OOM", func() { set("maxmemory", "1") }, func() { set("maxmemory", limit) }},
		{
			"MISCONF",
			func() {
				set("save", "3600 1")
				require.NoError(t, os.RemoveAll(rdb.ConfigGet(t.Context(), "dir").Val()["dir"]))
				require.NoError(t, rdb.BgSave(t.Context()).Err())
				testkit.Eventually(t, within, "the snapshot has failed", func() bool {
					return strings.Contains(rdb.Info(t.Context(), "persistence").Val(), "rdb_last_bgsave_status:err")
				})
			},
			func() { set("save", "") },
		},
	} {
		c.refuse()
		require.ErrorContains(t, s.tryBuy(ingress, sale, "bob"), "503")
		for _, url := range ready {
			status, body := readiness(url)
			require.Equal(t, http.StatusServiceUnavailable, status, body)
			require.Contains(t, body, c.answer)
		}
		status, text := s.run("doctor")
		require.Equal(t, exitFailed, status, text)
		require.Contains(t, text, "refuses writes: "+c.answer)
		c.accept()
		areReady() // though nobody buys
	}
	s.buy(ingress, sale, "bob")
}
