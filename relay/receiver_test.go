package relay_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// within bounds the waits of tests on a busy machine.
const within = time.Minute

// receiver is a shop with a webhook. It drops repeats by their id.
type receiver struct {
	url string

	mu sync.Mutex
	// answer decides the status of a request; nil for 204.
	answer func(w http.ResponseWriter, id string) (status int)
	// ids are those of the events that were taken, in the order of their first arrival.
	ids      []string
	bodies   map[string]string
	taken    map[string]int
	requests int
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{taken: map[string]int{}, bodies: map[string]string{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

// ServeHTTP takes an event.
func (r *receiver) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body, err := io.ReadAll(q.Body)
	if err != nil {
		return
	}
	id := q.Header.Get("webhook-id")
	r.mu.Lock()
	r.requests++
	answer := r.answer
	r.mu.Unlock()
	status := http.StatusNoContent
	if answer != nil {
		status = answer(w, id)
	}
	if status < 300 {
		r.take(id, string(body))
	}
	w.WriteHeader(status)
}

func (r *receiver) take(id, body string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken[id]++
	if r.taken[id] == 1 {
		r.ids = append(r.ids, id)
		r.bodies[id] = body
	}
}

// respond sets the answers from now on.
func (r *receiver) respond(answer func(w http.ResponseWriter, id string) int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

func (r *receiver) got() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.ids)
}

func (r *receiver) asked() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.requests
}

// repeats counts the events that were taken more than once.
func (r *receiver) repeats() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, times := range r.taken {
		n += times - 1
	}
	return n
}

// await waits until exactly these events were taken, each order's in the order of its versions.
func (r *receiver) await(t *testing.T, want []string) {
	t.Helper()
	testkit.Eventually(t, within, "all events", func() bool { return len(r.got()) >= len(want) })
	got := r.got()
	require.ElementsMatch(t, want, got)
	requireOrder(t, got)
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, body := range r.bodies {
		var e struct{ ID string }
		require.NoError(t, json.Unmarshal([]byte(body), &e))
		require.Equal(t, id, e.ID)
	}
}

// requireOrder requires that the versions of each order rise.
func requireOrder(t *testing.T, ids []string) {
	t.Helper()
	last := map[string]string{}
	for _, id := range ids {
		subject, version, _ := strings.Cut(id, ".")
		assert.Less(t, last[subject], version, id)
		last[subject] = version
	}
}
