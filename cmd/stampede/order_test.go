//go:build system

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

func TestOrderCommands(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann", "bob", "cid")
	_, err := ledger.New(s.pool).Pay(t.Context(), orders["ann"], "ann", "pi_1")
	require.NoError(t, err)
	ann := orders["ann"].String()

	output := s.ends(exitOK, "order", "list", "--sale="+sale.String(), "--limit=2")
	assert.Equal(t, 3, strings.Count(output, "\n"), output)
	assert.NotContains(t, output, ann, "it is the oldest of three")
	output = s.ends(exitOK, "order", "list", "--user=ann", "--status=paid", "--output=json")
	assert.Contains(t, output, `"payment_reference":"pi_1"`)
	assert.Contains(t, output, `"sequence":1,"epoch":1}`)

	output = s.ends(exitOK, "order", "cancel", ann, "--reason=bought twice", "--operator=eve")
	assert.Contains(t, output, "order "+ann+" is cancelled")
	assert.Contains(t, output, "refund the payment pi_1")
	status, again := s.run("order", "cancel", ann, "--reason=again")
	assert.Equal(t, exitOK, status, again)
	assert.Equal(t, output, again)
	output = s.ends(exitOK, "order", "cancel", orders["bob"].String(), "--reason=r", "--output=json")
	assert.Contains(t, output, `"status":"cancelled"`)

	output = s.ends(exitOK, "order", "show", ann)
	for _, want := range []string{
		"cancelled", "pi_1", "OrderReserved", "OrderConfirmed", "OrderPaid", "OrderCancelled",
		`operator=eve reason="bought twice" reference=pi_1`,
	} {
		assert.Contains(t, output, want)
	}
	output = s.ends(exitOK, "order", "show", "--output=json", orders["bob"].String())
	var shown struct {
		Version int
		Events  []struct{ Data map[string]any }
	}
	require.NoError(t, json.Unmarshal([]byte(output), &shown))
	require.Len(t, shown.Events, 3)
	name, err := operatorFlag{}.name()
	require.NoError(t, err)
	assert.True(t, strings.HasPrefix(name, "cli:"))
	assert.Equal(t, name, shown.Events[2].Data["operator"])

	missing := order.NewOrderID(sale).String()
	for _, args := range [][]string{
		{"show", missing}, {"show", missing, "--user=ann"}, {"cancel", missing, "--reason=r"},
	} {
		output = s.ends(exitFailed, append([]string{"order"}, args...)...)
		assert.Contains(t, output, "order not found")
	}
	for want, args := range map[string][]string{
		"--user or --sale":                      {"list"},
		`"x" is not an order id`:                {"show", "x"},
		"--status is \"reserved\", want one of": {"list", "--user=ann", "--status=reserved"},
		"--limit is 0":                          {"list", "--user=ann", "--limit=0"},
		"user id must be":                       {"list", "--user=a b"},
		"reason must":                           {"cancel", ann, "--reason= "},
		"--operator is":                         {"cancel", ann, "--reason=r", "--operator=a\nb"},
		"missing flags: --reason":               {"cancel", ann},
		"must be one of":                        {"export", "--format=xml"},
		"is not a time":                         {"export", "--since=yesterday"},
		`"nonsense" is not a sale id`:           {"export", "--sale=nonsense"},
	} {
		output = s.ends(exitUsage, append([]string{"order"}, args...)...)
		assert.Contains(t, output, want)
	}
}

// The terms of payment of a sale and of its orders are shown by each command, over HTTP as from the databases.
func TestTermsOfPaymentAreShown(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	s.worker("worker").Start()
	status, out, output := remote(t, url, adminToken, "sale", "create", "--name=test", "--stock=5", "--per-order-limit=2",
		"--payment-window=10m", "--payment-grace=30s", "--payments-per-second=1", "--unit-price=1290", "--currency=EUR")
	require.Equal(t, exitOK, status, output)
	assert.Contains(t, out, "12.90 EUR")
	id, err := uuid.Parse(strings.Fields(strings.Split(out, "\n")[1])[0])
	require.NoError(t, err)
	show := s.ends(exitOK, "sale", "show", id.String())
	for _, want := range []string{
		`unit price +12.90 EUR`, `payment window +10m0s`, `payment grace +30s`, `payment pace +1 orders a second`,
	} {
		assert.Regexp(t, want, show)
	}
	var orders [2]order.View
	for i, user := range []string{"ann", "bob"} {
		bought := ask(t, http.MethodPost, url+"/v1/sales/"+id.String()+"/orders", user, `{"quantity":2}`)
		require.Equal(t, http.StatusAccepted, bought.HTTP)
		testkit.Eventually(t, within, "the order is confirmed", func() bool {
			return ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, user, "").Status == "confirmed"
		})
		output := s.ends(exitOK, "order", "show", bought.OrderID, "--output=json")
		require.NoError(t, json.Unmarshal([]byte(output), &orders[i]))
		assert.Equal(t, []any{int64(2580), "EUR"}, []any{orders[i].Amount, orders[i].Currency})
	}
	turn := func(o order.View) time.Time {
		at, err := time.Parse(time.RFC3339, o.PayFrom)
		require.NoError(t, err)
		return at
	}
	assert.GreaterOrEqual(t, turn(orders[1]).Sub(turn(orders[0])), time.Second-time.Millisecond)
	bob := orders[1]
	assert.Regexp(t, `amount +25.80 EUR\npay from +`+bob.PayFrom, s.ends(exitOK, "order", "show", bob.OrderID.String()))
	assert.Regexp(t, turn(bob).Format(time.RFC3339)+` +25.80 EUR +-\n`, s.ends(exitOK, "order", "list", "--user=bob"))
	assert.Contains(t, s.ends(exitOK, "order", "export", "--user=bob"),
		strings.Join([]string{"", bob.PayFrom, bob.ExpiresAt, "2580", "EUR", ""}, ","))

	for want, flags := range map[string]string{
		"--currency must be a code of ISO 4217":        "--unit-price=1 --currency=eur1",
		"--unit-price needs currency":                  "--unit-price=1",
		"--payment-grace must be":                      "--payment-grace=1500ms --payment-window=1m",
		"--payments-per-second needs --payment-window": "--payments-per-second=5",
	} {
		args := append([]string{"sale", "create", "--name=x", "--stock=1"}, strings.Fields(flags)...)
		assert.Contains(t, s.ends(exitUsage, args...), want)
		status, _, output := remote(t, url, adminToken, args...)
		assert.Equal(t, exitUsage, status)
		assert.Contains(t, output, want)
	}
}

// The text of a server does not reach the terminal as it is.
func TestPriceIsPrintable(t *testing.T) {
	t.Parallel()
	assert.NotContains(t, price(1, "E\x1b[2J"), "\x1b")
	assert.Equal(t, []string{"-", "-", "129.00 EUR"}, []string{price(0, ""), price(0, "EUR"), price(12900, "EUR")})
}

func TestItemsAreShown(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, url := s.serve()
	s.worker("worker").Start()
	_, out, output := remote(t, url, adminToken, "sale", "create", "--name=Shirt", "--item=m:3:12900", "--item=l:1:9900",
		"--per-order-limit=3", "--currency=EUR", "--output=json")
	var sale struct{ ID uuid.UUID }
	require.NoError(t, json.Unmarshal([]byte(out), &sale), output)
	bought := ask(t, http.MethodPost, url+"/v1/sales/"+sale.ID.String()+"/orders", "ann", `{"items":{"l":1,"m":2}}`)
	require.Equal(t, http.StatusAccepted, bought.HTTP)
	testkit.Eventually(t, within, "the order is confirmed", func() bool {
		return ask(t, http.MethodGet, url+"/v1/orders/"+bought.OrderID, "ann", "").Status == "confirmed"
	})
	for _, server := range []string{"", url} {
		run := func(args ...string) string {
			if server == "" {
				return s.ends(exitOK, args...)
			}
			_, out, _ := remote(t, server, adminToken, args...)
			return out
		}
		assert.Regexp(t, `units +3\nitems +\{"m":2,"l":1\}\n(?s).*amount +357.00 EUR`, run("order", "show", bought.OrderID))
		assert.Contains(t, run("order", "show", bought.OrderID, "--output=json"), `"items":{"m":2,"l":1}`)
		assert.Contains(t, run("order", "list", "--user=ann", "--output=json"), `"items":{"m":2,"l":1}`)
		assert.Regexp(t, ` -  .*Shirt \(2 items\)\n`, run("sale", "list"))
		assert.Regexp(t, `unit price +-\n`, run("sale", "show", sale.ID.String()))
		show := run("sale", "show", sale.ID.String())
		assert.Regexp(t, `item m +1 of 3 left, 129.00 EUR, m\nitem l +0 of 1 left, 99.00 EUR, l\n`, show)
	}
	rename := []string{"sale", "rename", sale.ID.String(), "Tee", "--item=m:Medium", "--item=l:Large, that is: 54"}
	assert.Regexp(t, `Tee \(2 items\)\n`, s.ends(exitOK, rename...))
	show := s.ends(exitOK, "sale", "show", sale.ID.String())
	assert.Regexp(t, `(?s)name +Tee\n.*129.00 EUR, Medium\n.*99.00 EUR, Large, that is: 54\n`, show)
	for _, wrong := range []string{"--item=m", "--item=xl:XL", "--item=m:"} {
		s.ends(exitUsage, "sale", "rename", sale.ID.String(), wrong)
		status, _, output := remote(t, url, adminToken, "sale", "rename", sale.ID.String(), wrong)
		assert.Equal(t, exitUsage, status, output)
	}
	s.ends(exitUsage, "sale", "rename", sale.ID.String())
	s.ends(exitUsage, "sale", "restock", sale.ID.String(), "--item=m:1:12900")
	assert.Contains(t, s.ends(exitOK, "order", "export", "--user=ann"), `"{""m"":2,""l"":1}"`)
}

// An order that no worker has recorded is found in Redis by its buyer.
func TestOrderShowFindsReservation(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, _ := s.recorded()
	store := s.store(testkit.Redis(s.t))
	answer, err := store.Reserve(t.Context(), reservation.Request{Sale: sale, User: "ann", Quantity: 1})
	require.NoError(t, err)
	id := answer.Reservation.OrderID.String()
	output := s.ends(exitFailed, "order", "show", id)
	assert.Contains(t, output, "--user USER")
	output = s.ends(exitOK, "order", "show", id, "--user=ann")
	assert.Contains(t, output, "reserved")
	assert.Contains(t, output, "OrderReserved")
	output = s.ends(exitFailed, "order", "show", id, "--user=bob")
	assert.Contains(t, output, "receipt")
	assert.NotContains(t, output, "--user", "Redis was asked")
}

func TestDetailsShortenLists(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]string{
		`{"b": "x y", "a": 1}`:               `a=1 b="x y"`,
		`{"appended": ["a", "b", "c"]}`:      `appended=["a", "b", "c"]`,
		`{"appended": ["a", "b", "c", "d"]}`: `appended=["a","b","c"… (4 in all)`,
		`{"n": {"a": [1, 2, 3, 4]}}`:         `n={"a": [1, 2, 3, 4]}`,
	} {
		assert.Equal(t, want, details([]byte(data)))
	}
}

func TestSaleHistoryNamesOperators(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	output := s.ends(exitOK, "sale", "create", "--output=json", "--name=x", "--stock=5", "--operator=ann")
	var created struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(output), &created))
	for _, change := range [][]string{
		{"pause", created.ID, "--operator=bob"},
		{"resume", created.ID},
		{"restock", created.ID, "-2", "--operator=cid"},
		{"end", created.ID, "--operator=dan"},
	} {
		s.ends(exitOK, append([]string{"sale"}, change...)...)
	}
	output = s.ends(exitOK, "sale", "history", created.ID)
	name, err := operatorFlag{}.name()
	require.NoError(t, err)
	var got [][]string
	for line := range strings.Lines(output) {
		got = append(got, strings.Fields(line)[1:])
	}
	assert.Equal(t, [][]string{
		{"REVISION", "CHANGE", "OPERATOR", "DETAILS"},
		{"1", "created", "ann", "stock=5"},
		{"2", "paused", "bob", "stock=5"},
		{"3", "resumed", name, "stock=5"},
		{"4", "lowering", "cid", "stock=3", "units=-2"},
		{"5", "restocked", "cid", "lowering=4", "stock=3"},
		{"6", "ended", "dan", "stock=3"},
	}, got)
	output = s.ends(exitOK, "sale", "history", created.ID, "--output=json", "--limit=1")
	assert.Regexp(t, `^\{"revision":6,"change":"ended","occurred_at":".*Z","operator":"dan","data":\{"stock": ?3\}\}\n$`, output)
	output = s.ends(exitFailed, "sale", "history", uuid.NewString())
	assert.Contains(t, output, "sale not found")
}

func TestExportWritesAllOrders(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sale, orders := s.recorded("ann", "=1+1", "@bob", "a;=1+1", `a,b`)
	_, err := ledger.New(s.pool).Pay(t.Context(), orders["ann"], "ann", `-2+3,"x"`)
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), `INSERT INTO orders
		(id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at)
		SELECT ('01b20000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, $1, 'user-' || n, 1, 'voided', 2, n, 1,
			'2026-01-01'::timestamptz + n * interval '1 second', now()
		FROM generate_series(1, 5000) AS n`, sale)
	require.NoError(t, err)

	file := filepath.Join(t.TempDir(), "orders.csv")
	output := s.ends(exitOK, "order", "export", "--to="+file)
	assert.Equal(t, "5,005 orders are in "+file+"\n", output, "no progress, because there is no terminal")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 5006)
	byUser := map[string][]string{}
	ids := map[string]bool{}
	for _, row := range rows {
		byUser[row[2]], ids[row[0]] = row, true
	}
	require.Len(t, ids, 5006, "each once")
	assert.Equal(t, "order_id", rows[0][0])
	for _, user := range []string{"'=1+1", "'@bob", "a;'=1+1", "a,b", "ann"} {
		require.Contains(t, byUser, user)
	}
	assert.Equal(t, `'-2+3,"x"`, byUser["ann"][13])
	assert.Equal(t, byUser["ann"][7], byUser["ann"][8], "paid_at is updated_at")

	output = s.ends(exitOK, "order", "export", "--format=jsonl", "--sale="+sale.String(), "--status=voided",
		"--since=2026-01-01T00:00:10Z", "--until=2026-01-01T00:01:00Z")
	assert.Equal(t, 50, strings.Count(output, "\n"))
	output = s.ends(exitOK, "order", "export", "--format=jsonl", "--user==1+1")
	var line order.PlacedView
	require.NoError(t, json.Unmarshal([]byte(output), &line), output)
	assert.Equal(t, "=1+1", line.UserID, "as it is")
	output = s.ends(exitOK, "order", "export", "--user=user-7", "--since=2026-01-01T00:00:08Z")
	assert.Equal(t, 1, strings.Count(output, "\n"), "the header only")

	output = s.ends(exitFailed, "order", "export", "--to="+filepath.Join(t.TempDir(), "none", "x.csv"))
	assert.Contains(t, output, "no such file")
}

// A change that is committed after later ones is in this export or the next, and each order is in each export once.
func TestExportOfChangesMissesNone(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	cursor := "0"
	file := filepath.Join(t.TempDir(), "changes.jsonl")
	export := func(flags ...string) *testkit.Cmd {
		c := s.command(append([]string{
			"order", "export", "--changed-since=" + cursor, "--to=" + file, "--output=json",
		}, flags...)...)
		c.Start()
		return c
	}
	users := func(c *testkit.Cmd) (users []string) {
		t.Helper()
		require.Equal(t, exitOK, c.Wait(within).ExitCode(), c.Output())
		cursor = fmt.Sprint(objects(t, c.Output())[0]["cursor"])
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, line := range objects(t, string(text)) {
			users = append(users, line["user_id"].(string)+" "+line["status"].(string))
		}
		return users
	}
	changed := func(flags ...string) []string {
		t.Helper()
		return users(export(flags...))
	}
	assert.Empty(t, changed())
	sale, orders := s.recorded("ann", "bob", "cid")
	_, err := ledger.New(s.pool).Pay(t.Context(), orders["ann"], "ann", "pi_1")
	require.NoError(t, err)
	first := cursor
	assert.Equal(t, []string{"bob confirmed", "cid confirmed", "ann paid"}, changed())
	assert.Empty(t, changed())
	cursor = first
	assert.Equal(t, []string{"ann paid"}, changed("--status=paid", "--sale="+sale.String()))

	// One writer has a position and does not commit; another one commits a later position.
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	cancel := `WITH o AS (
			UPDATE orders SET status = 'cancelled', version = version + 1 WHERE sale_id = $1 AND id = $2 RETURNING *)
		INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at)
		SELECT id, version, 'OrderCancelled', sale_id, user_id, quantity, now() FROM o`
	_, err = tx.Exec(t.Context(), cancel, sale, orders["bob"])
	require.NoError(t, err)
	_, err = s.pool.Exec(t.Context(), cancel, sale, orders["cid"])
	require.NoError(t, err)
	waits := export()
	testkit.Eventually(t, within, "the export waits for the first writer", func() bool {
		return s.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "+
			"AND pid <> pg_backend_pid() AND query LIKE '%pg_locks%'") > 0
	})
	require.NoError(t, tx.Commit(t.Context()))
	assert.Equal(t, []string{"bob cancelled", "cid cancelled"}, users(waits))
	assert.Empty(t, changed())
	output := s.ends(exitOK, "order", "export", "--changed-since=-1h", "--user=cid")
	assert.Equal(t, 3, strings.Count(output, "\n"), "header, order, and where to go on: %s", output)
	s.ends(exitUsage, "order", "export", "--changed-since=999")
	s.ends(exitUsage, "order", "export", "--changed-since=yesterday")
}

// An interrupted export leaves the file as it was.
func TestInterruptedExportLeavesNothing(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	file := filepath.Join(folder, "orders.csv")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, before := range []string{"", "of yesterday"} {
		if before != "" {
			require.NoError(t, os.WriteFile(file, []byte(before), 0o600))
		}
		err := writeWhole(file, nil, func(w io.Writer) error {
			_, err := w.Write(bytes.Repeat([]byte("x"), 1<<20))
			require.NoError(t, err)
			cancel()
			return ctx.Err()
		})
		require.ErrorIs(t, err, context.Canceled)
		text, err := os.ReadFile(file)
		if before == "" {
			require.ErrorIs(t, err, os.ErrNotExist)
		}
		require.Equal(t, before, string(text))
	}
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Len(t, left, 1, "no temporary file")

	// As a process that gets SIGINT while it waits for Postgres.
	s := newShop(t)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	other := t.TempDir()
	c := s.command("order", "export", "--to="+filepath.Join(other, "x.csv"))
	c.Start()
	testkit.Eventually(t, within, "the export has begun", func() bool {
		names, err := os.ReadDir(other)
		require.NoError(t, err)
		return len(names) == 1 && strings.HasSuffix(names[0].Name(), ".part")
	})
	assert.Equal(t, exitUnknown, c.Stop().ExitCode(), c.Output())
	names, err := os.ReadDir(other)
	require.NoError(t, err)
	require.Empty(t, names)
	require.NoError(t, writeWhole("", io.Discard, func(io.Writer) error { return nil }))
	require.Error(t, writeWhole(file, nil, func(io.Writer) error { return errors.New("x") }))
}

// A running ingress takes a change of the file of operators within ten seconds, and a faulty file stops its start.
func TestServeReadsOperatorsFile(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	hash := sha256.Sum256([]byte("secret-of-ann"))
	line := "ann viewer " + hex.EncodeToString(hash[:]) + "\n"
	file := filepath.Join(t.TempDir(), "operators")
	require.NoError(t, os.WriteFile(file, []byte("# team\n"+line+"bob\n"), 0o600))
	output := s.ends(exitUsage, "serve", "--operators-file="+file, "--auth=header", "--http-addr=127.0.0.1:0")
	assert.Contains(t, output, "line 3: 1 fields")

	require.NoError(t, os.WriteFile(file, []byte(line), 0o600))
	_, url := s.serve("--operators-file=" + file)
	look := func() int {
		status, _ := call(t, http.MethodGet, url+"/v1/admin/orders?user=ann", "", "Authorization", "Bearer secret-of-ann")
		return status
	}
	require.Equal(t, http.StatusOK, look())
	require.NoError(t, os.WriteFile(file, []byte("# nobody\n"), 0o600))
	testkit.Eventually(t, within, "ann is revoked", func() bool { return look() == http.StatusUnauthorized })
}

// A restock that fails halfway must be repeated with its key, even if the key was generated.
func TestFailedRestockPrintsRetry(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	own := testkit.OwnRedis(t)
	rdb := control(t, own.URL)
	store := s.store(rdb)
	sales := catalog.New(s.pool, store)
	sale, err := sales.Create(t.Context(), reservation.Terms{Name: "a sale", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	restock := func(flags ...string) (int, string) {
		c := s.command(append([]string{"sale", "restock", sale.ID.String(), "5"}, flags...)...)
		c.Setenv("REDIS_URL", own.URL)
		c.Start()
		return c.Wait(within).ExitCode(), c.Output()
	}

	own.Kill()
	status, output := restock()
	assert.Equal(t, exitFailed, status, output)
	flag := regexp.MustCompile(`--idempotency-key=[0-9a-f-]{36}`).FindString(output)
	require.NotEmpty(t, flag, output)
	require.NoError(t, own.Restart(t.Context()))
	testkit.VerifyServer(t, s.pool, store, 0)

	testkit.Eventually(t, within, "the same restock succeeds", func() bool {
		status, output = restock(flag)
		return status == exitOK
	})
	shown, err := sales.Show(t.Context(), sale.ID)
	require.NoError(t, err)
	assert.EqualValues(t, 15, shown.Available)

	status, output = restock("--idempotency-key=a space")
	assert.Equal(t, exitUsage, status)
	assert.NotContains(t, output, "repeat it", "nothing was added")
}

func TestRestockCommandLowersStock(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	store := s.store(testkit.Redis(s.t))
	sale, err := catalog.New(s.pool, store).Create(t.Context(),
		reservation.Terms{Name: "a sale", Stock: 10, PerOrderLimit: 1})
	require.NoError(t, err)
	output := s.ends(exitOK, "sale", "restock", sale.ID.String(), "--output=json", "--", "-7")
	assert.Contains(t, output, `"stock":3,`)
	assert.Contains(t, output, `"available":3,`)
	_, err = store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "ann", Quantity: 1})
	require.NoError(t, err)
	_, err = store.Reserve(t.Context(), reservation.Request{Sale: sale.ID, User: "bob", Quantity: 1})
	require.NoError(t, err)
	output = s.ends(exitFailed, "sale", "restock", sale.ID.String(), "--", "-2")
	assert.Contains(t, output, "the 2 units that are taken")
	assert.NotContains(t, output, "repeat it")
	s.ends(exitUsage, "sale", "restock", sale.ID.String(), "--", "-3")
}
