package ingress

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

func TestCreateAndShowSale(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	opens := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	r := s.post(
		"/v1/sales",
		`{"name":"Tickets – première","stock":100,"per_order_limit":4,"opens_at":"`+opens.Format(time.RFC3339)+
			`","closes_at":"`+opens.Add(time.Hour).Format(time.RFC3339)+`","payment_window_seconds":600}`,
		operator,
	)
	sale := r.is(http.StatusCreated)
	id := sale["id"].(string)
	require.Equal(t, "/v1/sales/"+id, r.header.Get("Location"))
	require.NoError(t, uuid.Validate(id))
	created, err := time.Parse(time.RFC3339, sale["created_at"].(string))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), created, time.Minute)
	require.Equal(t, sale, s.get("/v1/sales/"+id).is(http.StatusOK))
	delete(sale, "created_at")
	require.Equal(t, map[string]any{
		"id":                     id,
		"name":                   "Tickets – première",
		"state":                  "scheduled",
		"stock":                  100.0,
		"available":              100.0,
		"held":                   0.0,
		"sold":                   0.0,
		"per_order_limit":        4.0,
		"payment_window_seconds": 600.0,
		"shards":                 1.0,
		"opens_at":               opens.Format("2006-01-02T15:04:05.000Z"),
		"closes_at":              opens.Add(time.Hour).Format("2006-01-02T15:04:05.000Z"),
	}, sale)

	plain := s.post("/v1/sales", `{"name":"plain","stock":1,"items":null,"per_order_limit":null,"opens_at":null,`+
		`"closes_at":null,"payment_window_seconds":null,"payment_grace_seconds":null,"payments_per_second":null,`+
		`"unit_price":null,"currency":null,"shards":null,"waitlist":null}`, operator).is(http.StatusCreated)
	require.NotContains(t, plain, "opens_at")
	require.NotContains(t, plain, "closes_at")
	require.EqualValues(t, 1, plain["per_order_limit"])
	require.Equal(t, "open", plain["state"])
}

func TestCreateSaleRejectsInvalidTerms(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	for body, detail := range map[string]string{
		`{}`:                                    "name",
		`{"name":"x"}`:                          "stock",
		`{"name":"","stock":1}`:                 "name",
		`{"name":1,"stock":1}`:                  "name",
		`{"name":"x","stock":0}`:                "stock",
		`{"name":"x","stock":null}`:             "stock",
		`{"name":"x","stock":1.5}`:              "stock",
		`{"name":"x","stock":1e2}`:              "stock",
		`{"name":"x","stock":"3"}`:              "stock",
		`{"name":"x","stock":100000001}`:        "stock",
		`{"name":"x","stock":9007199254740993}`: "stock",

		`{"name":"x","stock":99999999999999999999}`:      "stock",
		`{"name":"x","stock":1,"per_order_limit":0}`:     "per_order_limit",
		`{"name":"x","stock":1,"opens_at":"tomorrow"}`:   "opens_at",
		`{"name":"x","stock":1,"opens_at":1700000000}`:   "opens_at",
		`{"name":"x","stock":1,"opens_at":"2030-01-01"}`: "opens_at",

		`{"name":"x","stock":1,"opens_at":"2030-01-01T00:00:00Z","closes_at":"2030-01-01T00:00:00Z"}`: "closes_at",

		`{"name":"x","stock":1,"opens_at":"0001-01-01T00:00:00Z"}`:             "opens_at",
		`{"name":"x","stock":1,"closes_at":"0001-01-01T00:00:00Z"}`:            "closes_at",
		`{"name":"x","stock":1,"opens_at":"1970-01-01T00:00:00Z"}`:             "opens_at",
		`{"name":"x","stock":1,"opens_at":"9999-12-31T23:59:59-01:00"}`:        "opens_at",
		`{"name":"\u200b \u3164","stock":1}`:                                   "name",
		`{"name":"x","stock":1,"payment_window_seconds":-1}`:                   "payment_window_seconds",
		`{"name":"x","stock":1,"payment_window_seconds":9223372036854775807}`:  "payment_window_seconds",
		`{"name":"x","stock":1,"payment_window_seconds":-9223372036854775808}`: "payment_window_seconds",

		`{"name":"x","stock":1,"shards":0}`:    "shards",
		`{"name":"x","stock":1,"shards":-1}`:   "shards",
		`{"name":"x","stock":1,"shards":65}`:   "shards",
		`{"name":"x","stock":1,"shards":2}`:    "number of partitions, which is 1",
		`{"name":"x","stock":1,"shards":"2"}`:  "shards",
		`{"name":"x","stock":1,"shards":1e99}`: "shards",

		"{\"name\":\"\xff\",\"stock\":1}":                       "name",
		`{"name":"a\u0000b","stock":1}`:                         "name",
		`{"name":"` + strings.Repeat("ñ", 201) + `","stock":1}`: "name",
	} {
		p := s.post("/v1/sales", body, operator).isProblem(http.StatusBadRequest, "invalid-request")
		require.Contains(t, p["detail"], detail, body)
	}
	require.Empty(t, s.get("/v1/sales").is(http.StatusOK)["sales"])
}

// create posts a sale with an idempotency key.
func (s *shop) create(body, key string) reply {
	s.t.Helper()
	return s.post("/v1/sales", body, operator, withKey(key))
}

func TestCreateSaleReplays(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	other := openShopOn(t, s.on)
	closes := time.Now().Add(15 * time.Second) // it is changed before
	body := `{"name":"x","stock":3,"opens_at":"2026-01-02T03:04:05.1234567+01:00","closes_at":"` +
		closes.Format(time.RFC3339Nano) + `"}`
	first := s.create(body, "autumn")
	sale := "/v1/sales/" + first.is(http.StatusCreated)["id"].(string)
	require.Empty(t, first.header.Get("Idempotency-Replayed"))
	again := func(on *shop, body string) {
		r := on.create(body, "autumn")
		require.Equal(t, first.body, r.body)
		require.Equal(t, http.StatusCreated, r.status)
		require.Equal(t, []string{"true", sale}, []string{r.header.Get("Idempotency-Replayed"), r.header.Get("Location")})
	}
	again(s, body)
	again(
		other,
		`{"per_order_limit":1,"stock":3,`+body[1:strings.Index(body, `"stock"`)]+body[strings.Index(body, `"opens_at"`):],
	)
	// The answer does not change when the sale was changed or has ended.
	s.post(sale+"/restock", `{"units":2}`, operator).is(http.StatusOK)
	s.post(sale+"/pause", "", operator).is(http.StatusOK)
	again(other, body)
	testkit.Eventually(t, time.Minute, "the sale is over", func() bool {
		return s.get(sale).is(http.StatusOK)["state"] == "ended"
	})
	again(s, body)

	for _, another := range []string{
		strings.Replace(body, `"x"`, `"y"`, 1), strings.Replace(body, "3", "4", 1),
		strings.Replace(body, "{", `{"per_order_limit":2,`, 1),
		strings.Replace(body, "{", `{"payment_window_seconds":1,`, 1), strings.Replace(body, "05.1", "06.1", 1),
		`{"name":"x","stock":3}`,
	} {
		s.create(another, "autumn").isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
	}
	s.create(strings.Replace(body, `"x"`, `""`, 1), "autumn").isProblem(http.StatusBadRequest, "invalid-request")
	s.create(body, "").isProblem(http.StatusBadRequest, "invalid-request")
	require.Contains(
		t,
		s.create(body, "winter").isProblem(http.StatusBadRequest, "invalid-request")["detail"],
		"closes_at must be in the future",
	)
	require.Len(t, s.get("/v1/sales").is(http.StatusOK)["sales"], 1)
	// Keys of restocks are separate, and without a key each request is another sale.
	s.create(`{"name":"x","stock":3}`, "winter").is(http.StatusCreated)
	s.post(sale+"/restock", `{"units":2}`, operator, withKey("autumn")).
		isProblem(http.StatusConflict, "illegal-transition")
	for range 2 {
		require.Empty(t, s.post("/v1/sales", `{"name":"x","stock":3}`, operator).header.Get("Idempotency-Replayed"))
	}
	require.Len(t, s.get("/v1/sales").is(http.StatusOK)["sales"], 4)
}

func TestConcurrentCreateSaleCreatesOne(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	ingresses := []*shop{s, openShopOn(t, s.on)}
	for round := range 5 {
		replies := make([]reply, 8)
		var all sync.WaitGroup
		for i := range replies {
			all.Go(func() { replies[i] = ingresses[i%2].create(`{"name":"x","stock":3}`, fmt.Sprint("key-", round)) })
		}
		all.Wait()
		created := 0
		for _, r := range replies {
			r.is(http.StatusCreated)
			require.Equal(t, replies[0].body, r.body)
			if r.header.Get("Idempotency-Replayed") == "" {
				created++
			}
		}
		require.Equal(t, 1, created)
		require.Len(t, s.get("/v1/sales").is(http.StatusOK)["sales"], round+1)
	}
}

// Redis did not answer when the sale was created.
func TestReplayPublishesUnpublishedSale(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	own.Kill()
	first := s.create(`{"name":"x","stock":3}`, "k")
	sale := "/v1/sales/" + first.is(http.StatusCreated)["id"].(string)
	require.NoError(t, own.Restart(t.Context()))
	testkit.Eventually(t, 20*time.Second, "Redis answers", func() bool { return s.get("/readyz").status == http.StatusOK })
	s.post(sale+"/orders", "", as("ada")).isProblem(http.StatusServiceUnavailable, "sale-unavailable")
	again := s.create(`{"name":"x","stock":3}`, "k")
	require.Equal(t, first.body, again.body)
	require.Equal(t, "true", again.header.Get("Idempotency-Replayed"))
	s.post(sale+"/orders", "", as("ada")).is(http.StatusAccepted)
}

func TestOperateSale(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	sale := "/v1/sales/" + s.sale(reservation.Terms{Stock: 3}).String()
	state := func(action string) any { return s.post(sale+action, "", operator).is(http.StatusOK)["state"] }
	require.Equal(t, "paused", state("/pause"))
	require.Equal(t, "paused", state("/pause"))
	s.post(sale+"/orders", "", as("ada")).isProblem(http.StatusConflict, "sale-paused")
	require.Equal(t, "open", state("/resume"))
	s.post(sale+"/orders", "", as("ada")).is(http.StatusAccepted)

	restock := func(units, key string) map[string]any {
		return s.post(sale+"/restock", `{"units":`+units+`}`, operator, withKey(key)).is(http.StatusOK)
	}
	require.EqualValues(t, 13, restock("10", "delivery-1")["stock"])
	require.EqualValues(t, 13, restock("10", "delivery-1")["stock"])
	s.post(sale+"/restock", `{"units":11}`, operator, withKey("delivery-1")).
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
	now := s.post(sale+"/restock", `{"units":1}`, operator).is(http.StatusOK)
	require.Equal(t, []any{14.0, 13.0, 1.0, 0.0}, []any{now["stock"], now["available"], now["held"], now["sold"]})
	for _, bad := range []string{
		``, `{}`, `{"units":0}`, `{"units":-14}`, `{"units":-100000001}`, `{"units":1.5}`, `{"units":"1"}`,
		`{"units":null}`, `{"units":100000000}`, `{"units":1,"x":1}`,
	} {
		s.post(sale+"/restock", bad, operator).isProblem(http.StatusBadRequest, "invalid-request")
	}
	s.post(sale+"/restock", `{"units":1}`, operator, withKey("")).isProblem(http.StatusBadRequest, "invalid-request")
	require.EqualValues(t, 14, s.get(sale).is(http.StatusOK)["stock"])

	require.EqualValues(t, 4, restock("-10", "returned-1")["stock"])
	now = restock("-10", "returned-1")
	require.Equal(t, []any{4.0, 3.0, 1.0}, []any{now["stock"], now["available"], now["held"]})
	s.post(sale+"/orders", "", as("bob")).is(http.StatusAccepted)
	refused := s.post(sale+"/restock", `{"units":-3}`, operator, withKey("returned-2")).
		isProblem(http.StatusConflict, "illegal-transition")
	require.Contains(t, refused["detail"], "the 2 units that are taken")
	require.EqualValues(t, 4, s.get(sale).is(http.StatusOK)["stock"])

	require.Equal(t, "ended", state("/end"))
	require.Equal(t, "ended", state("/end"))
	for _, action := range []string{"/pause", "/resume"} {
		s.post(sale+action, "", operator).isProblem(http.StatusConflict, "illegal-transition")
	}
	s.post(sale+"/restock", `{"units":1}`, operator).isProblem(http.StatusConflict, "illegal-transition")
	s.post("/v1/sales/"+uuid.NewString()+"/end", "", operator).isProblem(http.StatusNotFound, "sale-not-found")
	s.post(sale+"/pause", strings.Repeat(" ", 5000), operator).
		isProblem(http.StatusRequestEntityTooLarge, "body-too-large")
}

// The change is in Postgres only.
func TestSaleChangeWithoutRedisIsNotInForce(t *testing.T) {
	t.Parallel()
	own := testkit.OwnRedis(t)
	s := openShopOn(t, onRedis(t, own))
	sale := "/v1/sales/" + s.sale(reservation.Terms{Stock: 3}).String()
	own.Kill()
	for action, body := range map[string]string{"/pause": "", "/restock": `{"units":5}`} {
		r := s.post(sale+action, body, operator, withKey("delivery"))
		detail := r.isProblem(http.StatusServiceUnavailable, "sale-unavailable")["detail"]
		require.Contains(t, detail, "is recorded", action)
		require.Contains(t, detail, "Idempotency-Key", action)
		require.Equal(t, "1", r.header.Get("Retry-After"))
	}
	p := s.post(sale+"/restock", `{"units":-1}`, operator, withKey("returned")).
		isProblem(http.StatusServiceUnavailable, "outcome-unknown")
	require.Contains(t, p["detail"], "if Redis grants it")

	require.NoError(t, own.Restart(t.Context()))
	testkit.VerifyServer(t, s.pool, s.store, 0)
	testkit.Eventually(t, 30*time.Second, "the change is published", func() bool {
		_, err := s.catalog.PublishPending(t.Context())
		return err == nil
	})
	s.post(sale+"/restock", `{"units":5}`, operator, withKey("delivery")).is(http.StatusOK)
	now := s.get(sale).is(http.StatusOK)
	require.Equal(t, []any{"paused", 7.0}, []any{now["state"], now["available"]})
	s.post(sale+"/restock", `{"units":-1}`, operator, withKey("returned")).is(http.StatusOK)
	require.EqualValues(t, 7, s.get(sale).is(http.StatusOK)["available"])
}

// The stock is rebuilt right after the restock was recorded.
func TestRebuildWithdrawsRestock(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	id := s.sale(reservation.Terms{Stock: 10})
	sale := "/v1/sales/" + id.String()
	_, err := s.pool.Exec(t.Context(), `CREATE FUNCTION rebuilt() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO sale_events (sale_id, revision, type) VALUES (NEW.sale_id, NEW.revision + 1, 'SaleRebuilt');
		UPDATE sales SET epoch = 2, revision = NEW.revision + 1, published_revision = NEW.revision + 1 WHERE id = NEW.sale_id;
		RETURN NULL; END $$;
		CREATE TRIGGER rebuilt AFTER INSERT ON sale_events FOR EACH ROW
		WHEN (NEW.type = 'SaleLowering') EXECUTE FUNCTION rebuilt()`)
	require.NoError(t, err)
	r := s.post(sale+"/restock", `{"units":-4}`, operator, withKey("returned"))
	require.Contains(t, r.isProblem(http.StatusServiceUnavailable, "restock-withdrawn")["detail"], "nothing was changed")
	require.Equal(t, "1", r.header.Get("Retry-After"))
	_, err = s.pool.Exec(t.Context(), "DROP FUNCTION rebuilt CASCADE")
	require.NoError(t, err)
	require.NoError(t, s.rdb.HSet(t.Context(), s.keys.Sale(0, id), "epoch", 2, "revision", 3).Err())

	for range 2 {
		now := s.post(sale+"/restock", `{"units":-4}`, operator, withKey("returned")).is(http.StatusOK)
		require.Equal(t, []any{6.0, 6.0}, []any{now["stock"], now["available"]})
	}
	s.post(sale+"/restock", `{"units":-3}`, operator, withKey("returned")).
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
}

func TestListSales(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	require.Equal(t, map[string]any{"sales": []any{}}, s.get("/v1/sales").is(http.StatusOK))
	var want []string
	for range 5 {
		want = append(want, s.sale(reservation.Terms{Stock: 1}).String())
	}
	slices.Reverse(want) // newest first
	testkit.Eventually(t, 20*time.Second, "all are listed", func() bool {
		return len(s.get("/v1/sales").is(http.StatusOK)["sales"].([]any)) == len(want)
	})

	var got []string
	path := "/v1/sales?limit=2"
	for pages := 1; ; pages++ {
		page := s.get(path).is(http.StatusOK)
		for _, sale := range page["sales"].([]any) {
			got = append(got, sale.(map[string]any)["id"].(string))
		}
		next, more := page["next_cursor"].(string)
		if !more {
			require.Equal(t, 3, pages)
			break
		}
		path = "/v1/sales?limit=2&cursor=" + next
	}
	require.Equal(t, want, got)
	require.NotContains(t, s.get("/v1/sales?limit=5").is(http.StatusOK), "next_cursor")
	require.Len(t, s.get("/v1/sales?cursor=&limit=").is(http.StatusOK)["sales"], 5)
}

func TestRenameSale(t *testing.T) {
	t.Parallel()
	s := openShop(t, withOperators(t))
	other := openShopOn(t, s.on)
	create := `{"name":"Shirt","currency":"EUR",` + twoSizes + `}`
	first := s.create(create, "drop")
	sale := "/v1/sales/" + first.is(http.StatusCreated)["id"].(string)
	other.get(sale).is(http.StatusOK) // it has the old name in memory
	rename := func(body string) reply { return s.post(sale+"/rename", body, bearing("token-operator")) }

	renamed := rename(`{"name":"Tee","items":{"m":"Medium"}}`)
	now := renamed.is(http.StatusOK)
	require.Equal(t, "Tee", now["name"])
	require.Equal(t, renamed.body, rename(`{"name":"Tee","items":{"m":"Medium"}}`).body, "a repeat")
	require.Equal(t, renamed.body, s.get(sale).body)
	testkit.Eventually(t, 3*time.Second, "other servers hear of it", func() bool {
		return other.get(sale).body == renamed.body
	})
	now = rename(`{"items":{"l":"Large"}}`).is(http.StatusOK)
	require.Equal(t, []any{"Tee", "Medium", "Large"}, []any{
		now["name"], now["items"].([]any)[0].(map[string]any)["name"], now["items"].([]any)[1].(map[string]any)["name"],
	})

	history := s.get("/v1/admin"+sale[len("/v1"):]+"/history", operator).is(http.StatusOK)["changes"].([]any)
	require.Len(t, history, 3, "a repeat is no change")
	change := history[1].(map[string]any)
	require.Equal(t, []any{"renamed", "the-operator"}, []any{change["change"], change["operator"]})
	require.Equal(t, "Shirt", change["data"].(map[string]any)["previous_name"])
	require.Equal(t, first.body, s.create(create, "drop").body, "as it was created")
	s.create(strings.Replace(create, "Shirt", "Tee", 1), "drop").
		isProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")

	long := strings.Repeat("ñ", 201)
	for body, detail := range map[string]string{
		`{}`:                             "name must be given, or items with names by their codes.",
		`{"name":""}`:                    "name must be 1 to 200 characters",
		`{"name":" \u200b"}`:             "name must be 1 to 200 characters",
		`{"name":"a\u0000b"}`:            "name must not contain control characters",
		`{"name":"` + long + `"}`:        "name must be 1 to 200 characters",
		`{"name":null,"items":null}`:     "name must be given",
		`{"items":{"m":null}}`:           "the name of an item must be",
		`{"name":7}`:                     "name",
		`{"name":"x","items":{}}`:        "items must be one or more",
		`{"items":["m"]}`:                "items",
		`{"items":{"m":""}}`:             "the name of an item must be 1 to 200 characters",
		`{"items":{"m":"` + long + `"}}`: "the name of an item must be 1 to 200 characters",
		`{"items":{"m":"a","m":"b"}}`:    "twice",
		`{"items":{"":"x"}}`:             "items must be one or more, each with its code",
		`{"name":"x","stock":5}`:         "stock",
	} {
		require.Contains(t, rename(body).isProblem(http.StatusBadRequest, "invalid-request")["detail"], detail, body)
	}
	for _, code := range []string{"xl", "M", "ö \\n"} {
		p := rename(`{"name":"x","items":{"m":"M","`+code+`":"y"}}`).isProblem(http.StatusUnprocessableEntity, "unknown-item")
		require.Equal(t, strings.ReplaceAll(code, `\n`, "\n"), p["item"])
	}
	require.Equal(t, "Tee", s.get(sale).is(http.StatusOK)["name"])
	p := s.post(sale+"/restock", `{"items":{"m":1,"xl":1}}`, operator).
		isProblem(http.StatusUnprocessableEntity, "unknown-item")
	require.Equal(t, "xl", p["item"])
	plain := "/v1/sales/" + s.sale(reservation.Terms{Stock: 1}).String() + "/rename"
	p = s.post(plain, `{"items":{"m":"M"}}`, operator).isProblem(http.StatusBadRequest, "invalid-request")
	require.Equal(t, "items must be left out: the sale has none, rename it by its name.", p["detail"])
	require.Equal(t, "Cap", s.post(plain, `{"name":"Cap"}`, operator).is(http.StatusOK)["name"])

	s.post("/v1/sales/"+uuid.NewString()+"/rename", `{"name":"x"}`, operator).
		isProblem(http.StatusNotFound, "sale-not-found")
	s.post(sale+"/end", "", operator).is(http.StatusOK)
	p = rename(`{"name":"x"}`).isProblem(http.StatusConflict, "illegal-transition")
	require.Equal(t, "cannot rename a sale that is ended.", p["detail"])
}

// The names of all items of a sale may be longer together than other bodies.
func TestRenameAllItems(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	items, names := make([]string, order.MaxItems), make([]string, order.MaxItems)
	for i := range items {
		items[i] = fmt.Sprintf(`{"code":"i%d","name":"x","stock":1}`, i)
		names[i] = fmt.Sprintf(`"i%d":"%s"`, i, strings.Repeat("ñ", 200))
	}
	create := `{"name":"all","items":[` + strings.Join(items, ",") + `]}`
	created := s.post("/v1/sales", create, operator).is(http.StatusCreated)
	body := `{"items":{` + strings.Join(names, ",") + `}}`
	require.Greater(t, len(body), accept.MaxBodyBytes)
	renamed := s.post("/v1/sales/"+created["id"].(string)+"/rename", body, operator).is(http.StatusOK)
	require.Equal(t, strings.Repeat("ñ", 200), renamed["items"].([]any)[order.MaxItems-1].(map[string]any)["name"])
}

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
