package front

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// verdicts is a design that maps users to verdicts.
type verdicts map[string]Verdict

func (verdicts) Prepare(context.Context, uuid.UUID, int64) error { return nil }

func (v verdicts) Buy(_ context.Context, o Order) (Verdict, error) {
	if verdict, found := v[o.User]; found {
		return verdict, nil
	}
	return 0, errors.New("no such buyer")
}

func (verdicts) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func TestServerAnswersEachVerdict(t *testing.T) {
	t.Parallel()
	sale := uuid.New()
	design := verdicts{"reserved": Reserved, "confirmed": Confirmed, "late": SoldOut, "greedy": AlreadyPurchased}
	for _, reader := range []string{"off", "on"} {
		url := start(t, design, Spec{Sale: sale, Backend: Backend{Options: map[string]string{PlainReader: reader}}})
		askForEachVerdict(t, url, sale)
	}
}

// start serves a design until the end of the test, and returns its URL.
func start(t *testing.T, design Design, spec Spec) (url string) {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- serve(ctx, listener, design, spec) }()
	t.Cleanup(func() {
		stop()
		require.NoError(t, <-served)
	})
	return "http://" + listener.Addr().String()
}

func askForEachVerdict(t *testing.T, url string, sale uuid.UUID) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for _, c := range []struct {
		user, sale, body string
		status           int
		want             string // in the answer
	}{
		{"reserved", sale.String(), `{"quantity":2}`, http.StatusAccepted, `"status":"reserved","quantity":2`},
		{"confirmed", sale.String(), `{"quantity":1}`, http.StatusCreated, `"status":"confirmed"`},
		{"late", sale.String(), `{"quantity":1}`, http.StatusConflict, "/problems/sold-out"},
		{"greedy", sale.String(), `{"quantity":1}`, http.StatusConflict, "/problems/already-purchased"},
		{"unknown", sale.String(), `{"quantity":1}`, http.StatusInternalServerError, "/problems/internal"},
		{"", sale.String(), `{"quantity":1}`, http.StatusUnauthorized, "/problems/unauthorized"},
		{"reserved", uuid.NewString(), `{"quantity":1}`, http.StatusNotFound, "/problems/sale-not-found"},
		{"reserved", sale.String(), `{"quantity":0}`, http.StatusBadRequest, "/problems/invalid-request"},
		{"reserved", sale.String(), `{`, http.StatusBadRequest, "/problems/invalid-request"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/sales/"+c.sale+"/orders",
			strings.NewReader(c.body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-User-ID", c.user)
		resp, err := client.Do(req)
		require.NoError(t, err)
		var answer json.RawMessage
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&answer))
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, c.status, resp.StatusCode, "%+v", c)
		assert.Contains(t, string(answer), c.want)
	}
}
