package ingress

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/accept"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

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
