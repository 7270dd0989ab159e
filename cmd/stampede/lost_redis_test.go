//go:build system

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/dev/localserver"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/sql/migrate"
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

// documented returns the commands of the first block of a section of docs/recovery.md that has the text.
func documented(t *testing.T, section, text string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/recovery.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(page), "\n### "+section+"\n")
	require.True(t, found, section)
	rest, _, _ = strings.Cut(rest, "\n### ")
	for _, block := range regexp.MustCompile("(?ms)^ *```sh\n(.*?)^ *```").FindAllStringSubmatch(rest, -1) {
		if strings.Contains(block[1], text) {
			return block[1]
		}
	}
	require.Fail(t, "no block has "+text)
	return ""
}

// A dump is restored by the commands of docs/recovery.md while ingresses sell. What is lost is what the page says.
func TestDocumentedRestoreOfDumpBesideBuyers(t *testing.T) {
	t.Parallel()
	server, redis := testkit.OwnPostgres(t), testkit.OwnRedis(t)
	at, err := url.Parse(server.URL)
	require.NoError(t, err)
	at.Path = "/stampede"
	superuser, err := connect.Postgres(t.Context(), server.URL, 1)
	require.NoError(t, err)
	t.Cleanup(superuser.Close)
	_, err = superuser.Exec(t.Context(), "CREATE DATABASE stampede OWNER stampede")
	require.NoError(t, err)
	require.NoError(t, migrate.Up(t.Context(), at.String()))
	pool, err := connect.Postgres(t.Context(), at.String(), 4)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	shop := &shop{t: t, keys: testkit.Keys(t), pool: pool, redisURL: redis.URL, databaseURL: at.String()}
	ingress, url := shop.serve()
	s := &restoredShop{rush: newRush(shop, url, shop.sale(url, restoredStock)), redis: redis}
	folder := t.TempDir()
	sh := func(commands string) {
		cmd := exec.CommandContext(t.Context(), "bash", "-ec", commands)
		cmd.Dir = folder
		cmd.Env = append(os.Environ(),
			"DATABASE_URL="+at.String(), "PGHOST="+at.Hostname(), "PGPORT="+at.Port(), "PGUSER=stampede")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", commands, out)
	}
	s.work()
	s.open(t)
	s.sell(t, 100, "orders are accepted before the dump")
	small := s.buyers(reservation.Terms{Name: "small", Stock: 6, PaymentWindow: time.Hour})
	waitlist := s.buyers(reservation.Terms{
		Name: "with a waiting list", Stock: 1, PaymentWindow: time.Hour, Waitlist: true,
	})
	changed := map[string]*buyers{}
	for _, name := range []string{"pause", "pause again", "end", "restock", "restock again", "cancel again"} {
		changed[name] = s.buyers(reservation.Terms{Name: name, Stock: 1, PaymentWindow: time.Hour})
	}
	changed["cancel again"].buy("first", "confirmed")
	for _, user := range []string{"paid", "pays", "leaves", "refunded", "stays"} {
		small.buy(user, "confirmed")
	}
	small.pay("paid")
	small.pay("refunded")
	waitlist.buy("gives", "confirmed")
	waitlist.wait("waits")

	dump, restore, found := strings.Cut(documented(t, "Restore a dump", "pg_dump"), "\n")
	require.True(t, found)
	sh(dump)
	small.pay("pays")
	small.cancel("leaves")
	small.buy("takes", "confirmed") // what leaves has returned, or the last unit
	small.buy("late", "confirmed")
	small.cancel("late")
	small.buy("last", "confirmed")
	s.ends(exitOK, "order", "cancel", small.orders["refunded"].Order, "--reason=r")
	s.ends(exitOK, "payment", "refunded", "pi_refunded", "re_refunded")
	small.buy("again", "confirmed")
	waitlist.cancel("gives")
	offered := func(status string) bool {
		return s.count("SELECT count(*) FROM orders WHERE user_id = 'waits' AND sale_id = $1 AND status = $2", waitlist.sale,
			status) == 1
	}
	testkit.Eventually(t, within, "the unit is offered", func() bool { return offered("confirmed") })
	for name, of := range changed {
		switch name {
		case "pause", "pause again", "end":
			s.ends(exitOK, "sale", strings.TrimSuffix(name, " again"), of.sale.String())
		case "cancel again":
			of.cancel("first")
			of.buy("second", "confirmed")
		default:
			of.buy("first", "confirmed")
			s.ends(exitOK, "sale", "restock", of.sale.String(), "1")
			of.buy("second", "confirmed")
		}
	}
	s.ends(exitOK, "audit", "--wait=60s")
	s.sell(t, 100, "orders are accepted after the dump")

	// The steps of docs/recovery.md.
	for _, worker := range s.workers {
		require.True(t, worker.Stop().Success())
	}
	s.allow(200)
	pool.Reset()
	looks := small.look("paid", at.String())
	sh(restore)
	looks()
	s.ends(exitOK, "sale", "pause", changed["pause again"].sale.String())
	s.ends(exitOK, "sale", "restock", changed["restock again"].sale.String(), "1")
	s.ends(exitOK, "order", "cancel", changed["cancel again"].orders["first"].Order, "--reason=again")
	for command := range strings.Lines(documented(t, "Restore Postgres to a point in time", "reconcile")) {
		command, _, _ = strings.Cut(command, "#")
		status, output := s.run(strings.Fields(command)[1:]...)
		require.True(t, status == exitOK || strings.Contains(command, "reconcile") && status == exitFailed, output)
	}
	s.work()
	s.ends(exitOK, "audit", "--wait=60s")
	require.True(t, ingress.Stop().Success())
	_, s.url = s.serve()
	for of, want := range map[*buyers]map[string]string{
		small: {
			"paid": "paid", "stays": "confirmed", "takes": "confirmed",
			"pays":     "confirmed", // its payment is forgotten
			"leaves":   "confirmed", // its cancellation is forgotten
			"refunded": "paid",
			"late":     "voided",   // cancelled, so Redis held nothing for it
			"last":     "rejected", // accepted on units that are not free again
			"again":    "rejected",
		},
		waitlist:                 {"gives": "confirmed"},
		changed["restock"]:       {"first": "confirmed", "second": "rejected"},
		changed["restock again"]: {"first": "confirmed", "second": "confirmed"},
		changed["cancel again"]:  {"first": "cancelled", "second": "confirmed"},
		changed["pause"]:         {},
		changed["pause again"]:   {},
		changed["end"]:           {},
	} {
		of.url = s.url
		is := map[string]string{}
		for user := range of.orders {
			is[user] = of.status(user)
		}
		assert.Equal(t, want, is)
		shown := objects(t, s.ends(exitOK, "sale", "show", "--output=json", of.sale.String()))[0]
		state := "open" // nobody has paused or ended it
		if of == changed["pause again"] {
			state = "paused"
		}
		assert.Equal(t, state, shown["state"], shown["name"])
	}

	assert.True(t, offered("rejected"), "the unit of the offer has its owner again")

	provider := file(t, fmt.Sprintf(`{"order_id":%q,"reference":"pi_pays"}`, small.orders["pays"].Order)+"\n"+
		`{"reference":"pi_refunded","refund_reference":"re_refunded"}`)
	assert.Contains(t, s.ends(exitFailed, "payment", "import", provider),
		"line 2: not imported: no refund of the payment "+
			"pi_refunded is due: it is settled, for the order "+small.orders["refunded"].Order)
	s.ends(exitOK, "order", "cancel", small.orders["refunded"].Order, "--reason=again")
	assert.Contains(t, s.ends(exitOK, "payment", "import", provider), "1 refunded, 1 reported before")
	s.sell(t, 50, "the sale continues")
	assert.Zero(t, s.requireEnds(restoredStock), "voided")
}

// buyers are those of a small sale.
type buyers struct {
	*shop
	url    string
	sale   uuid.UUID
	orders map[string]acceptedOrder
}

func (s *restoredShop) buyers(terms reservation.Terms) *buyers {
	return &buyers{s.shop, s.url, s.createSale(s.url, terms), map[string]acceptedOrder{}}
}

// wait takes a place in the waiting list.
func (b *buyers) wait(user string) {
	b.t.Helper()
	status, text := call(b.t, http.MethodPost, b.url+"/v1/sales/"+b.sale.String()+"/waitlist", "", "X-User-ID", user)
	require.Equal(b.t, http.StatusAccepted, status, text)
}

// buy buys a unit, as soon as there is one, and waits for the status of the order.
func (b *buyers) buy(user, status string) {
	b.t.Helper()
	testkit.Eventually(b.t, within, user+" buys", func() bool {
		is, text := call(b.t, http.MethodPost, b.url+"/v1/sales/"+b.sale.String()+"/orders", "", "X-User-ID", user)
		if is == http.StatusAccepted {
			o := objects(b.t, text)[0]
			b.orders[user] = acceptedOrder{user, o["order_id"].(string), o["receipt"].(string)}
		}
		return is == http.StatusAccepted
	})
	testkit.Eventually(b.t, within, "the order of "+user, func() bool { return b.status(user) == status })
}

func (b *buyers) status(user string) string {
	o := b.orders[user]
	return fmt.Sprint(ask(b.t, http.MethodGet, b.url+"/v1/orders/"+o.Order+"?receipt="+o.Receipt, user, "").Status)
}

func (b *buyers) pay(user string) {
	b.t.Helper()
	status, text := call(b.t, http.MethodPost, b.url+"/v1/payments",
		fmt.Sprintf(`{"order_id":%q,"reference":"pi_%s"}`, b.orders[user].Order, user), "Authorization", "Bearer "+adminToken)
	require.Equal(b.t, http.StatusOK, status, text)
	require.Contains(b.t, text, `"settled"`)
}

func (b *buyers) cancel(user string) {
	b.t.Helper()
	status, text := call(b.t, http.MethodPost, b.url+"/v1/orders/"+b.orders[user].Order+"/cancel", "", "X-User-ID", user)
	require.Equal(b.t, http.StatusOK, status, text)
}

// look reads all the time, until end is called: no answer is an error of the server, and nobody sees half a schema.
func (b *buyers) look(user, database string) (end func()) {
	const half = "SELECT to_regclass('pulse') IS NOT NULL AND " +
		"NOT EXISTS (SELECT FROM pg_constraint WHERE conname = 'pulse_pkey')"
	var looking sync.WaitGroup
	stop := make(chan struct{})
	looking.Go(func() {
		for {
			for _, path := range []string{"/v1/orders/" + b.orders[user].Order, "/v1/sales/" + b.sale.String(), "/v1/sales"} {
				status, text := call(b.t, http.MethodGet, b.url+path, "", "X-User-ID", user)
				assert.Contains(b.t, []int{http.StatusOK, http.StatusServiceUnavailable}, status, text)
			}
			if conn, err := pgx.Connect(b.t.Context(), database); err == nil {
				var isHalf bool
				err := conn.QueryRow(b.t.Context(), half).Scan(&isHalf) // fails while the database is dropped
				assert.False(b.t, err == nil && isHalf, "half a schema")
				_ = conn.Close(b.t.Context())
			}
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	return func() {
		close(stop)
		looking.Wait()
	}
}
