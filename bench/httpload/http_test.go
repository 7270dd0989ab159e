package httpload

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/retry"
)

func serve(t *testing.T, h http.HandlerFunc) []string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return []string{strings.TrimPrefix(server.URL, "http://")}
}

func get(dst []byte, _ uint64) []byte { return append(dst, "GET / HTTP/1.1\r\nHost: test\r\n\r\n"...) }

func TestClosedLoopCountsAnswersByStatus(t *testing.T) {
	t.Parallel()
	var asked atomic.Uint64
	load := Load{
		Connections: 4, For: time.Minute, Most: 90, Request: get,
		Addrs: serve(t, func(w http.ResponseWriter, _ *http.Request) {
			if asked.Add(1)%3 == 0 {
				w.WriteHeader(http.StatusConflict)
			}
			_, _ = io.WriteString(w, "body")
		}),
	}
	var bodies sync.Map
	load.OnAnswer = func(n uint64, _ int, body []byte) { bodies.Store(n, string(body)) }
	answers, err := load.Measure(t.Context())
	require.NoError(t, err)
	assert.Equal(t, map[int]int64{200: 60, 409: 30}, answers.ByStatus)
	assert.Equal(t, int64(60), answers.Wanted)
	assert.Equal(t, int64(30), answers.Others())
	assert.Len(t, answers.latencies, 60)
	for n := range uint64(90) {
		body, found := bodies.Load(n + 1)
		assert.True(t, found)
		assert.Equal(t, "body", body)
	}
}

func TestRateExcludesLateAnswers(t *testing.T) {
	t.Parallel()
	const length = 100 * time.Millisecond
	var asked atomic.Uint64
	load := Load{
		Connections: 2, For: length, Request: get,
		Addrs: serve(t, func(_ http.ResponseWriter, r *http.Request) {
			if asked.Add(1) == 1 {
				retry.Pause(4*length, r.Context().Done())
			}
		}),
	}
	answers, err := load.Measure(t.Context())
	require.NoError(t, err)
	assert.GreaterOrEqual(t, answers.Took, 4*length)
	assert.Equal(t, length, answers.lasted)
	assert.Less(t, answers.inTime, answers.Wanted)
	assert.InDelta(t, float64(answers.inTime)*10, answers.PerSecond(), 0.001)

	load.Most = 1
	answers, err = load.Measure(t.Context())
	require.NoError(t, err)
	assert.Equal(t, int64(1), answers.inTime)
	assert.Equal(t, answers.Took, answers.lasted, "the load ended with its last answer")
}

// One connection and one slow answer: all requests that are due meanwhile wait for it.
func TestOpenLoopLatencyCountsFromDueTime(t *testing.T) {
	t.Parallel()
	const hold = 200 * time.Millisecond
	var first atomic.Bool
	load := Load{
		Connections: 1, For: 300 * time.Millisecond, Rate: 100, Request: get,
		Addrs: serve(t, func(_ http.ResponseWriter, r *http.Request) {
			if !first.Swap(true) {
				retry.Pause(hold, r.Context().Done())
			}
		}),
	}
	answers, err := load.Measure(t.Context())
	require.NoError(t, err)
	assert.Equal(t, int64(30), answers.Wanted)
	assert.GreaterOrEqual(t, answers.Percentile(100), hold)
	// Requests due in the first half of the hold waited at least for its second half.
	assert.GreaterOrEqual(t, answers.Percentile(70), hold/2)
}

func TestOpenLoopCountsUnsentRequests(t *testing.T) {
	t.Parallel()
	const length = 50 * time.Millisecond
	load := Load{
		Connections: 1, For: length, Rate: 1000, Request: get,
		Addrs: serve(t, func(_ http.ResponseWriter, r *http.Request) { retry.Pause(3*length, r.Context().Done()) }),
	}
	answers, err := load.Measure(t.Context())
	require.NoError(t, err)
	assert.Equal(t, int64(1), answers.Wanted)
	assert.Equal(t, int64(49), answers.unsent)
	assert.GreaterOrEqual(t, answers.Percentile(0), 2*length)
}

func TestBrokenConnectionsAreCounted(t *testing.T) {
	t.Parallel()
	load := Load{
		Connections: 3, For: time.Minute, Request: get,
		Addrs: serve(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
	}
	answers, err := load.Measure(t.Context())
	require.NoError(t, err)
	assert.Equal(t, int64(3), answers.Broken)
	assert.Zero(t, answers.Percentile(50))
	assert.Equal(t, "3 × broken", answers.String())
}

func TestAnswerWithoutLengthIsError(t *testing.T) {
	t.Parallel()
	load := Load{
		Connections: 1, For: time.Minute, Request: get,
		Addrs: serve(t, func(w http.ResponseWriter,
			_ *http.Request,
		) {
			assert.NoError(t, http.NewResponseController(w).Flush())
		}),
	}
	_, err := load.Measure(t.Context())
	require.ErrorIs(t, err, errNotHTTP)
}
