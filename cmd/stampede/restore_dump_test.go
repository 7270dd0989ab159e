//go:build system

package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/sql/migrate"
)

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
