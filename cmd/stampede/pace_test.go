//go:build system

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"stampede/internal/retry"
	"stampede/internal/test/testkit"
	"stampede/reservation"
	"stampede/reservation/order"
)

// docs/bench/payments.md has figures of a larger crowd.
var (
	paceLimit   = flag.Int("pace.limit", 50, "payments that the fake provider takes in a second")
	paceWinners = flag.Int("pace.winners", 600, "buyers who win a unit and pay")
	paceWindow  = flag.Duration("pace.window", 10*time.Second, "payment window")
)

// lateEvery is of how many payments one arrives after the window.
const lateEvery = 100

// provider is a fake payment provider. It begins so many payments a second and answers 429 to others. Its webhooks come
// in another order, some of them several times, and some after the payment window.
type provider struct {
	limit    int
	late     time.Duration
	shop     func(report []byte) error
	webhooks errgroup.Group

	mu sync.Mutex
	// starts has the times at which buyers first came, and begun those of payments.
	starts, begun []time.Time
	refused       int
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	now := time.Now()
	if r.URL.Query().Get("try") == "0" {
		p.starts = append(p.starts, now)
	}
	n := len(p.begun)
	refused := n >= p.limit && now.Sub(p.begun[n-p.limit]) < time.Second
	if refused {
		p.refused++
	} else {
		p.begun = append(p.begun, now)
	}
	p.mu.Unlock()
	if refused {
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	id := r.URL.Query().Get("order")
	report := fmt.Appendf(nil, `{"order_id":%q,"reference":"ch_%s","amount":1290,"currency":"EUR"}`, id, id)
	send := func(after time.Duration) {
		p.webhooks.Go(func() error {
			retry.Pause(after, nil)
			return p.shop(report)
		})
	}
	if n%lateEvery == 0 {
		send(p.late)
		return
	}
	send(rand.N(500 * time.Millisecond))
	for range n % 3 {
		send(rand.N(3 * time.Second))
	}
}

// busiest is the most buyers who start to pay in any ten seconds.
func (p *provider) busiest() (most int) {
	first := 0
	for last, at := range p.starts {
		for at.Sub(p.starts[first]) >= 10*time.Second {
			first++
		}
		most = max(most, last-first+1)
	}
	return most
}

// Turns follow each other across the shards of a sale, crashes of its workers, and hand-overs of its partitions.
func TestPaceOutlivesCrashesOfWorkers(t *testing.T) {
	t.Parallel()
	s := newSharedShop(t, 4, 2, 3*time.Second)
	r := newRush(s.shop, s.url, s.createSale(s.url, reservation.Terms{
		Name: "test", Stock: 2000, Shards: 4, PaymentWindow: time.Hour,
		PaymentsPerSecond: 2, // the turns are soon minutes ahead of the clock, however slow the machine is
	}))
	r.open(t)
	for range 4 {
		r.sell(t, 100, "orders are accepted")
		r.allow(200)
		victim := s.busiest()
		s.workers[victim].Kill()
		r.sell(t, 50, "orders are accepted without it")
		s.join(victim)
	}
	r.endCrowd()
	s.ends(exitOK, "audit", "--wait=60s", "--sale="+r.sale.String())
	orders := s.count("SELECT count(*) FROM orders")
	require.GreaterOrEqual(t, orders, r.acceptedCount())
	require.Equal(t, orders-1, s.count(`SELECT count(*) FROM (
			SELECT due - lag(due) OVER one_by_one AS gap, row_number() OVER one_by_one AS n
			FROM orders WINDOW one_by_one AS (ORDER BY due)
		) AS turns WHERE gap = interval '500 ms' OR gap > interval '500 ms' AND n <= 100`))
}

// A sale with a pace asks no more of a payment provider than that takes, and no order expires whose money is in time.
// Without a pace a part of the winners cannot pay within the window.
func TestPaceKeepsLimitOfProvider(t *testing.T) {
	t.Parallel()
	for name, pace := range map[string]int{"pace": *paceLimit, "none": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			_, url := s.serve()
			s.worker("worker").Start()
			sale := s.createSale(url, reservation.Terms{
				Name: "test", Stock: int64(*paceWinners), PaymentWindow: *paceWindow, PaymentsPerSecond: int64(pace),
				UnitPrice: 1290, Currency: "EUR",
			})
			client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 100, MaxIdleConnsPerHost: 100}}
			t.Cleanup(client.CloseIdleConnections)
			post := func(to string, body []byte, into any, header ...string) (status int, err error) {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to, bytes.NewReader(body))
				if err != nil {
					return 0, err
				}
				r.Header.Set("Content-Type", "application/json")
				for i := 0; i < len(header); i += 2 {
					r.Header.Set(header[i], header[i+1])
				}
				answer, err := client.Do(r)
				if err != nil {
					return 0, err
				}
				defer func() { _ = answer.Body.Close() }()
				if into != nil {
					err = json.NewDecoder(answer.Body).Decode(into)
				}
				return answer.StatusCode, err
			}
			p := &provider{limit: *paceLimit, late: *paceWindow + 3*time.Second, shop: func(report []byte) error {
				status, err := post(url+"/v1/payments", report, nil, "Authorization", "Bearer "+adminToken)
				if err == nil && status != http.StatusOK {
					err = fmt.Errorf("HTTP %d for %s", status, report)
				}
				return err
			}}
			at := httptest.NewServer(p)
			t.Cleanup(at.Close)
			var buyers errgroup.Group
			for n := range *paceWinners {
				buyers.Go(func() error {
					var o order.View
					status, err := post(url+"/v1/sales/"+sale.String()+"/orders", nil, &o, "X-User-ID", fmt.Sprint("buyer-", n),
						"Prefer", "wait=30")
					if err != nil || status != http.StatusCreated {
						return fmt.Errorf("buy: HTTP %d %+v: %w", status, o, err)
					}
					if pace > 0 {
						turn, err := time.Parse(time.RFC3339, o.PayFrom)
						if err != nil {
							return err
						}
						retry.Pause(time.Until(turn), t.Context().Done())
					}
					until, err := time.Parse(time.RFC3339, o.ExpiresAt)
					for try := 0; err == nil && time.Now().Before(until); try++ {
						status, err = post(fmt.Sprintf("%s/?order=%s&try=%d", at.URL, o.OrderID, try), nil, nil)
						if status == http.StatusOK {
							break
						}
						retry.Pause(500*time.Millisecond+rand.N(time.Second), t.Context().Done())
					}
					return err
				})
			}
			require.NoError(t, buyers.Wait())
			require.NoError(t, p.webhooks.Wait())
			testkit.Eventually(t, within, "each order is paid or expired", func() bool {
				return s.count("SELECT count(*) FROM orders WHERE status IN ('paid', 'expired')") == *paceWinners
			})
			expired := s.count("SELECT count(*) FROM orders WHERE status = 'expired'")
			late := (len(p.begun) + lateEvery - 1) / lateEvery
			t.Logf("%s: %d of %d orders expired, %d of them paid too late; %d starts in the busiest 10 s; %d answers 429", name,
				expired, *paceWinners, late, p.busiest(), p.refused)
			if pace > 0 {
				assert.Equal(t, late, expired, "nobody's order expires whose money is in time")
				assert.LessOrEqual(t, p.busiest(), pace*11)
			} else {
				assert.Greater(t, expired, late)
			}
			assert.Equal(t, len(p.begun), s.count("SELECT count(*) FROM payments"))
			assert.Equal(t, *paceWinners-expired, s.count("SELECT count(*) FROM payments WHERE state = 'settled'"))
			assert.Equal(t, len(p.begun)-(*paceWinners-expired),
				s.count("SELECT count(*) FROM payments WHERE state = 'refund_due' AND reason = 'order-expired'"))
			s.ends(exitOK, "audit", "--wait=30s", "--sale="+sale.String())
		})
	}
}
