package apiclient_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/apiclient"
	"stampede/ledger/draws"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// server answers with the steps in turn, and with the last one from then on; "" breaks the connection.
func server(t *testing.T, steps ...string) (*apiclient.Client, *atomic.Int64) {
	t.Helper()
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		step := steps[min(int(asked.Add(1)), len(steps))-1]
		var status int
		var slug string
		if _, err := fmt.Sscan(step, &status, &slug); err != nil {
			panic(http.ErrAbortHandler)
		}
		if r.Header.Get("Authorization") != "Bearer token" || r.Method == http.MethodPost &&
			r.Header.Get("Idempotency-Key") != "key" && r.URL.Path == "/base/v1/sales" {
			status, slug = http.StatusUnauthorized, "unauthorized"
		}
		if status == http.StatusFound {
			w.Header().Set("Location", "/elsewhere")
		}
		w.WriteHeader(status)
		switch {
		case slug == "html":
			_, _ = fmt.Fprint(w, "<h1>a proxy's page</h1>")
		case slug == "json":
			_, _ = fmt.Fprint(w, `{"type":"https://proxy.example/errors/overloaded","status":"ok"}`)
		case slug == "cut":
			_, _ = fmt.Fprint(w, `{"id":"01a2027b-de9c-7adf-b6e6-5b263e1fb250","stock":`)
		case status/100 == 2:
			_, _ = fmt.Fprint(w, `{"id":"01a2027b-de9c-7adf-b6e6-5b263e1fb250","name":"x","stock":5}`)
		case slug != "-":
			_, _ = fmt.Fprintf(w, `{"type":"/problems/%s","title":"title","detail":"the detail"}`, slug)
		}
	}))
	t.Cleanup(s.Close)
	client, err := apiclient.New(s.URL+"/base/", "token", "test")
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client, &asked
}

func TestClientRepeatsWhatMayPass(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		steps []string
		asked int64
		want  error // nil: the call succeeds
		text  string
	}{
		"at once":             {[]string{"201 -"}, 1, nil, ""},
		"after an overload":   {[]string{"503 overloaded", "201 -"}, 2, nil, ""},
		"after a lost answer": {[]string{"", "201 -"}, 2, nil, ""},
		"after a bad gateway": {[]string{"502 -", "429 rate-limited", "201 -"}, 3, nil, ""},
		"never":               {[]string{"503 overloaded"}, 4, nil, "the detail"},
		"unknown":             {[]string{"", "503 overloaded"}, 4, apiclient.ErrUnknown, "the outcome is unknown"},
		"not in force":        {[]string{"503 sale-unavailable"}, 4, apiclient.ErrUnknown, "the detail"},
		"unknown by its word": {[]string{"503 outcome-unknown"}, 4, apiclient.ErrUnknown, "the detail"},
		"withdrawn":           {[]string{"503 restock-withdrawn"}, 4, catalog.ErrRestockWithdrawn, "the detail"},
		"decided in the end":  {[]string{"", "409 illegal-transition"}, 2, apiclient.ErrRefused, "the detail"},
		"key reused":          {[]string{"422 idempotency-key-reused"}, 1, catalog.ErrIdempotencyKeyReused, "the detail"},
		"invalid":             {[]string{"400 invalid-request"}, 1, apiclient.ErrInvalid, "the detail"},
		"missing":             {[]string{"404 sale-not-found"}, 1, reservation.ErrSaleNotFound, "the detail"},
		"no role":             {[]string{"403 forbidden"}, 1, apiclient.ErrToken, "the detail"},
		"gateway's own word":  {[]string{"502 overloaded"}, 4, apiclient.ErrUnknown, "the detail"},
		"a proxy's page":      {[]string{"413 html"}, 4, apiclient.ErrUnknown, "HTTP 413, without a problem"},
		"another's success":   {[]string{"200 json"}, 4, apiclient.ErrUnknown, "HTTP 200, without a problem"},
		"redirect": {
			[]string{"302 -"}, 4, apiclient.ErrUnknown, "HTTP 302, without a problem: is this the URL of an ingress?",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, asked := server(t, c.steps...)
			sale, _, err := client.CreateOnce(t.Context(), reservation.Terms{Name: "x", Stock: 5, PerOrderLimit: 1}, "key")
			require.Equal(t, c.asked, asked.Load())
			if c.text == "" {
				require.NoError(t, err)
				require.Equal(t, int64(5), sale.Stock)
				return
			}
			require.ErrorContains(t, err, c.text)
			require.ErrorContains(t, err, "create a sale: ")
			if c.want != nil {
				require.ErrorIs(t, err, c.want)
			} else {
				require.NotErrorIs(t, err, apiclient.ErrUnknown)
			}
		})
	}
}

// What no ingress has answered says nothing about a change, whatever its status.
func TestAnswersOfProxiesLeaveOutcomeUnknown(t *testing.T) {
	t.Parallel()
	for _, status := range []int{200, 201, 204, 302, 400, 401, 403, 404, 408, 413, 429, 431, 500, 502, 503, 504} {
		for _, page := range []string{"html", "json", "cut"} {
			answer := fmt.Sprint(status, " ", page)
			t.Run(answer, func(t *testing.T) {
				t.Parallel()
				client, asked := server(t, answer, "201 -")
				sale, _, err := client.CreateOnce(t.Context(), reservation.Terms{Name: "x", Stock: 5, PerOrderLimit: 1}, "key")
				require.NoError(t, err)
				require.Equal(t, int64(5), sale.Stock)
				require.Equal(t, int64(2), asked.Load())
			})
		}
	}
}

// A look changes nothing, so its outcome is never unknown; neither is that of a request that was never sent.
func TestUnknownIsOnlyWhatMayBeDone(t *testing.T) {
	t.Parallel()
	client, asked := server(t, "")
	_, err := client.Show(t.Context(), uuid.New())
	require.Error(t, err)
	require.NotErrorIs(t, err, apiclient.ErrUnknown)
	require.Equal(t, int64(4), asked.Load())

	nowhere, err := apiclient.New("http://127.0.0.1:1", "token", "test")
	require.NoError(t, err)
	_, err = nowhere.Pause(t.Context(), uuid.New())
	require.ErrorContains(t, err, "refused")
	require.NotErrorIs(t, err, apiclient.ErrUnknown)
}

// A caller acts on some answers as on the errors of the stores; the others are only texts.
func TestSomeSlugsAreSentinels(t *testing.T) {
	t.Parallel()
	sentinels := map[string]error{
		"sale-not-found": reservation.ErrSaleNotFound, "order-not-found": order.ErrNotFound,
		"order-archived": order.ErrArchived, "idempotency-key-reused": catalog.ErrIdempotencyKeyReused,
		"restock-withdrawn": catalog.ErrRestockWithdrawn, "payment-not-found": order.ErrPaymentNotFound,
		"refund-not-due": order.ErrRefundNotDue, "already-refunded": order.ErrRefundNotDue,
		"not-unclear": order.ErrNotUnclear, "draw-not-found": draws.ErrNoDraw,
	}
	for _, k := range problems.Kinds() {
		t.Run(k.Slug, func(t *testing.T) {
			t.Parallel()
			client, _ := server(t, "409 "+k.Slug) // with its own status, some would be asked for again
			_, err := client.Show(t.Context(), uuid.New())
			require.ErrorContains(t, err, "the detail")
			for _, known := range problems.All() {
				require.Equal(t, errors.Is(sentinels[k.Slug], known.Err), errors.Is(err, known.Err), "%v", known.Err)
			}
		})
	}
}

func TestNewRefusesOtherURLs(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"", "shop.example", "redis://shop.example", "https://", "https://user:password@shop.example",
		"https://shop.example?x=1", "https://shop.example#x", "http://[", "https:shop.example",
	} {
		_, err := apiclient.New(url, "token", "test")
		require.ErrorIs(t, err, apiclient.ErrURL, url)
	}
}
