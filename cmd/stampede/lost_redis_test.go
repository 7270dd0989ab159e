//go:build system

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
)

// lostShop is a shop with its own Redis, which the test destroys.
type lostShop struct {
	*rush
	server *localserver.Redis
}

func newLostShop(t *testing.T, stock int64) *lostShop {
	t.Helper()
	server := testkit.OwnRedis(t)
	s := newShop(t)
	s.redisURL = server.URL
	_, url := s.serve()
	return &lostShop{newRush(s, url, s.sale(url, stock)), server}
}

// Redis is emptied during a sale, with unread orders and pending ones.
func TestSaleContinuesAfterRedisIsEmptied(t *testing.T) {
	t.Parallel()
	const stock = 1500
	s := newLostShop(t, stock)
	first, second := s.worker("first"), s.worker("second")
	first.Start()
	second.Start()
	s.open(t)
	rdb := control(t, s.server.URL)
	for round := 1; round <= 2; round++ {
		s.sell(t, 200, "orders are accepted")
		first.Freeze()
		second.Freeze()
		s.sell(t, 100, "orders are accepted that are not in Postgres")
		refused := s.refusals()
		require.NoError(t, rdb.FlushAll(t.Context()).Err())
		s.allow(100)
		testkit.Eventually(t, within, "buyers get 503", func() bool { return s.refusals() > refused+10 })
		second.Thaw()
		s.sell(t, 50, "the sale continues")
		require.Equal(t, round+1, s.epoch())
		first.Thaw()
	}
	voided := s.requireEnds(stock)
	require.GreaterOrEqual(t, voided, 150)
	require.Equal(t, 3, s.epoch(), "one rebuild per loss")
	require.LessOrEqual(t, s.count("SELECT count(*) FROM orders WHERE status = 'voided'"), voided+16)
	require.Zero(t, s.count("SELECT count(*) FROM dead_letters"))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status = 'rejected'"))
}

// With appendfsync=always a killed Redis restarts with all acknowledged writes.
func TestKilledRedisVoidsNothing(t *testing.T) {
	t.Parallel()
	const stock = 1500
	s := newLostShop(t, stock)
	worker := s.worker("worker")
	worker.Start()
	s.open(t)
	for round := 1; round <= 2; round++ {
		s.sell(t, 200, "orders are accepted")
		if round == 2 { // with a backlog of unread orders
			s.pause()
			require.True(t, worker.Stop().Success())
			s.sell(t, 200, "a backlog")
		}
		s.server.Kill()
		require.NoError(t, s.server.Restart(t.Context()))
		if round == 2 {
			before, refused := s.acceptedCount(), s.refusals()
			s.allow(100)
			testkit.Eventually(t, within, "buyers get 503", func() bool { return s.refusals() > refused+10 })
			require.LessOrEqual(t, s.acceptedCount(), before+16,
				"nothing is sold before the rebuild, except requests answered before the loss")
			worker = s.worker("worker")
			worker.Start()
		}
		s.sell(t, 50, "the sale continues")
		require.Equal(t, round+1, s.epoch())
	}
	require.Zero(t, s.requireEnds(stock))
	require.Zero(t, s.count("SELECT count(*) FROM orders WHERE status <> 'confirmed'"))
	require.Equal(t, 3, s.epoch())
}

func TestRebuildCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	output := s.ends(exitOK, "sale", "create", "--name=test", "--stock=10", "--output=json")
	var sale struct{ ID uuid.UUID }
	require.NoError(t, json.Unmarshal([]byte(output), &sale), output)
	_, url := s.serve()
	require.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, url+"/v1/sales/"+sale.ID.String()+"/orders", "ann",
		"").HTTP)

	output = s.ends(exitOK, "rebuild")
	require.Contains(t, output, "partition 0 was rebuilt in ")
	require.Contains(t, output, "confirmed now: 1")
	require.Regexp(t, sale.ID.String()+` +2 +1 +10 +9 +1 +1 +1 `, output)
	output = s.ends(exitOK, "rebuild", "--sale="+sale.ID.String(), "--output=json", "--log-level=error")
	var report struct {
		Reason string
		Sales  []struct {
			ID          uuid.UUID
			Epoch, Left int64
		}
	}
	require.NoError(t, json.Unmarshal([]byte(output), &report), output)
	require.Equal(t, "by-hand", report.Reason)
	require.Len(t, report.Sales, 1)
	require.EqualValues(t, 3, report.Sales[0].Epoch)
	require.EqualValues(t, 9, report.Sales[0].Left)
	s.ends(exitOK, "rebuild", "--partition=0")
	s.ends(exitFailed, "audit", "--wait=0s")
	s.worker("worker").Start()
	s.ends(exitOK, "audit", "--wait=30s")

	for args, exit := range map[string]int{
		"--sale=" + uuid.Must(uuid.NewV7()).String(): exitFailed,
		"--partition=64": exitUsage,
		"--partition=-1": exitUsage,
		"--partition=0 --sale=" + sale.ID.String(): exitUsage,
		"--sale=nonsense":                          exitUsage,
		"--shards=2":                               exitUsage,
		"--shards=0 --sale=" + sale.ID.String():    exitUsage,
		"--shards=2 --sale=" + sale.ID.String():    exitUsage, // it has one partition
		fmt.Sprintf("--partitions=%d", 0):          exitUsage,
	} {
		status, output := s.run(append([]string{"rebuild"}, strings.Fields(args)...)...)
		require.Equal(t, exit, status, args+": "+output)
	}
}

// Everything is rebuilt while no worker runs: no sale over several shards stays closed.
func TestRebuildCommandOpensShardedSales(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	output := s.ends(exitOK, "sale", "create", "--name=test", "--stock=10", "--shards=3", "--partitions=8",
		"--output=json")
	var sale struct{ ID uuid.UUID }
	require.NoError(t, json.Unmarshal([]byte(output), &sale), output)
	output = s.ends(exitOK, "rebuild", "--partitions=8")
	require.Regexp(t, sale.ID.String()+` +\d+ +3 +10 +10 +0 +0 `, output)
	output = s.ends(exitUsage, "rebuild", "--partitions=8", "--sale="+sale.ID.String(), "--shards=2")
	require.Contains(t, output, "must be 3, as many as the sale has, to 8")
	output = s.ends(exitOK, "rebuild", "--partitions=8", "--sale="+sale.ID.String(), "--shards=5")
	require.Regexp(t, sale.ID.String()+` +\d+ +5 +10 +10 +0 +0 `, output)
	_, url := s.serve()
	require.Equal(t, http.StatusAccepted, ask(t, http.MethodPost, url+"/v1/sales/"+sale.ID.String()+"/orders", "ann",
		"").HTTP)
}

// Settings may all be right, and Redis still refuses every write. Readiness and doctor tell what purchases are told.
func TestRedisThatRefusesWritesIsNamed(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := newShop(t)
	s.redisURL = own.URL
	rdb := control(t, own.URL)
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
