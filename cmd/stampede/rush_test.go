//go:build system

package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

// rush is a crowd that buys one sale at an ingress while its servers are destroyed.
type rush struct {
	*shop
	url  string
	sale uuid.UUID

	mu       sync.Mutex
	accepted []acceptedOrder
	answers  map[int]int // by HTTP status
	// longest is the longest time between two accepted orders since measure was called.
	longest      time.Duration
	lastAccepted time.Time
	// limit bounds the accepted orders, so that the stock is not sold out early in a slow test. Trying counts the running
	// requests. Changed is broadcast when either changes.
	limit, trying int
	changed       *sync.Cond
	// stop ends the crowd.
	stop atomic.Bool
	// pace is the pause of each buyer between two requests.
	pace    time.Duration
	crowd   sync.WaitGroup
	buyers  atomic.Int64
	soldOut atomic.Bool
}

// acceptedOrder is a 202.
type acceptedOrder struct {
	user    string
	Order   string `json:"order_id"`
	Receipt string `json:"receipt"`
}

func newRush(s *shop, url string, sale uuid.UUID) *rush {
	r := &rush{shop: s, url: url, sale: sale, answers: map[int]int{}}
	r.changed = sync.NewCond(&r.mu)
	return r
}

// open starts buyers that run until the end of the test or endCrowd. Each retries with the same key until the answer is
// final. They wait until allow raises the limit.
func (s *rush) open(t *testing.T) {
	t.Helper()
	const connections = 16
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: connections, MaxIdleConnsPerHost: connections}}
	t.Cleanup(func() {
		s.endCrowd()
		client.CloseIdleConnections()
	})
	for range connections {
		s.crowd.Go(func() {
			for !s.stop.Load() {
				user := "buyer-" + strconv.FormatInt(s.buyers.Add(1), 10)
				for !s.stop.Load() && !s.buy(t, client, user) {
					<-time.After(s.pace)
				}
				<-time.After(s.pace)
			}
		})
	}
}

// buy is one try. It returns true if the answer is final.
func (s *rush) buy(t *testing.T, client *http.Client, user string) bool {
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/sales/"+s.sale.String()+"/orders", nil)
	if err != nil {
		t.Error(err)
		return true
	}
	r.Header.Set("X-User-ID", user)
	r.Header.Set("Idempotency-Key", "only")
	if !s.enter() {
		return true
	}
	defer s.exit()
	res, err := client.Do(r)
	if err != nil {
		return false // the buyer retries
	}
	defer func() { _ = res.Body.Close() }()
	body, _ := io.ReadAll(res.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[res.StatusCode]++
	switch res.StatusCode {
	case http.StatusAccepted:
		o := acceptedOrder{user: user}
		if err := json.Unmarshal(body, &o); err != nil || o.Receipt == "" {
			t.Errorf("%s: %s (%v)", user, body, err)
		}
		s.accepted = append(s.accepted, o)
		now := time.Now()
		s.longest, s.lastAccepted = max(s.longest, now.Sub(s.lastAccepted)), now
		return true
	case http.StatusConflict:
		if !strings.Contains(string(body), "sold-out") {
			t.Errorf("%s: %s", user, body)
		}
		s.soldOut.Store(true)
		return true
	case http.StatusServiceUnavailable:
		return false
	}
	t.Errorf("%s: %d %s", user, res.StatusCode, body)
	return true
}

// enter waits until the limit allows a request. It returns false when the crowd ends.
func (s *rush) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.accepted)+s.trying >= s.limit && !s.stop.Load() {
		s.changed.Wait()
	}
	if s.stop.Load() {
		return false
	}
	s.trying++
	return true
}

func (s *rush) exit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trying--
	s.changed.Broadcast()
}

// allow sets the limit to so many more than the accepted orders, and returns how many those are.
func (s *rush) allow(more int) (accepted int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = len(s.accepted) + more
	s.changed.Broadcast()
	return len(s.accepted)
}

// pause stops the crowd and waits for its running requests.
func (s *rush) pause() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = 0
	for s.trying > 0 {
		s.changed.Wait()
	}
}

// endCrowd ends the crowd and waits for it.
func (s *rush) endCrowd() {
	s.stop.Store(true)
	s.allow(0)
	s.crowd.Wait()
}

// sell waits until more than so many further orders are accepted. The crowd may buy twice as many.
func (s *rush) sell(t *testing.T, more int, what string) {
	t.Helper()
	before := s.allow(2 * more)
	testkit.Eventually(t, within, what, func() bool { return s.acceptedCount() > before+more })
}

// measure begins to measure the longest time between two accepted orders. The crowd must not be limited.
func (s *rush) measure() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.longest, s.lastAccepted = 0, time.Now()
}

// measured is the longest time between two accepted orders since measure.
func (s *rush) measured() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.longest.Round(time.Millisecond)
}

func (s *rush) acceptedCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.accepted)
}

// answered is the number of all answers.
func (s *rush) answered() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, count := range s.answers {
		n += count
	}
	return n
}

func (s *rush) refusals() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answers[http.StatusServiceUnavailable]
}

func (s *rush) epoch() int { return s.count("SELECT epoch FROM sales WHERE id = $1", s.sale) }

// requireEnds waits until all units are sold and checks that every accepted order has a final state. It returns how
// many were voided.
func (s *rush) requireEnds(stock int) (voided int) {
	s.t.Helper()
	s.allow(2 * stock)
	testkit.Eventually(s.t, within, "all units are sold", func() bool {
		return s.count("SELECT sold FROM sales WHERE id = $1", s.sale) == stock
	})
	s.soldOut.Store(false)
	testkit.Eventually(s.t, within, "a buyer gets sold-out", s.soldOut.Load)
	s.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+s.sale.String())

	ends := s.requireTruth()
	// A buyer without an answer may hold an order, and gets it by a retry.
	assert.LessOrEqual(s.t, ends["confirmed"], stock)
	assert.GreaterOrEqual(s.t, ends["confirmed"], stock-16)
	return ends["voided"]
}

// requireTruth checks, after the end of the crowd and a clean audit, that every accepted order has a final state, which
// its buyer is told. It counts the states.
func (s *rush) requireTruth() (ends map[string]int) {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), "SELECT id::text, user_id FROM orders WHERE sale_id = $1 AND "+
		"status = 'confirmed'", s.sale)
	require.NoError(s.t, err)
	confirmed := map[string]string{} // order → user
	var id, user string
	_, err = pgx.ForEachRow(rows, []any{&id, &user}, func() error {
		confirmed[id] = user
		return nil
	})
	require.NoError(s.t, err)
	ends = map[string]int{}
	orders := map[string]bool{}
	for _, o := range s.accepted {
		require.False(s.t, orders[o.Order], "one order per buyer")
		orders[o.Order] = true
		if user, recorded := confirmed[o.Order]; recorded {
			require.Equal(s.t, o.user, user)
			ends["confirmed"]++
			continue
		}
		end := ask(s.t, http.MethodGet, s.url+"/v1/orders/"+o.Order+"?receipt="+o.Receipt, o.user, "")
		require.Equal(s.t, "voided", end.Status, "order %s: %+v", o.Order, end)
		ends["voided"]++
	}
	s.t.Logf("%d accepted: %v; answers %v; epoch %d", len(s.accepted), ends, s.answers, s.epoch())
	return ends
}
