package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"stampede/internal/retry"
)

// APIVerifier reads orders from an ingress as their buyers: for load tests that have only a URL. It does not see orders
// whose buyer got no answer.
type APIVerifier struct {
	client *http.Client
	url    string
	sale   uuid.UUID
	auth   Auth
	sold   int64 // before the crowd
}

var _ Verifier = (*APIVerifier)(nil)

// ErrPaymentWindow is returned by APIVerifier.Sold for a sale with a payment window: there the API counts confirmed
// orders as held, together with orders in flight.
var ErrPaymentWindow = errors.New("the API does not count confirmed orders of a sale with a payment window")

// maxAPILookups bounds the concurrent requests for orders.
const maxAPILookups = 32

// NewAPIVerifier reads how many units of the sale are sold before the crowd.
func NewAPIVerifier(ctx context.Context, baseURL string, sale uuid.UUID, auth Auth) (*APIVerifier, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: maxAPILookups}
	v := &APIVerifier{client: &http.Client{Transport: transport}, url: baseURL, sale: sale, auth: auth}
	var err error
	if v.sold, err = v.totalSold(ctx); errors.Is(err, ErrPaymentWindow) {
		err = nil // Compare works without the count
	}
	return v, err
}

// Sold implements Verifier.
func (v *APIVerifier) Sold(ctx context.Context) (int64, error) {
	sold, err := v.totalSold(ctx)
	return sold - v.sold, err
}

func (v *APIVerifier) totalSold(ctx context.Context) (int64, error) {
	var sale struct {
		Sold          int64 `json:"sold"`
		PaymentWindow int64 `json:"payment_window_seconds"`
	}
	status, err := v.get(ctx, "", "", &sale, "v1", "sales", v.sale.String())
	switch {
	case err != nil:
		return 0, fmt.Errorf("read sale=%s: %w", v.sale, err)
	case status != http.StatusOK:
		return 0, fmt.Errorf("read sale=%s: HTTP %d", v.sale, status)
	case sale.PaymentWindow > 0:
		return 0, fmt.Errorf("read sale=%s: %w", v.sale, ErrPaymentWindow)
	}
	return sale.Sold, nil
}

// Compare implements Verifier. It waits for orders that are not in Postgres yet. Those that are still not there
// when ctx ends count as missing.
func (v *APIVerifier) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	orders, contradictions := l.orders()
	c := Comparison{Accepted: len(orders), Contradictions: contradictions}
	ended := make(map[uuid.UUID]bool)
	err := v.countOrders(ctx, &c, l, orders, ended)
	c.countPairs(l, ended)
	return c, err
}

// countOrders looks up the orders of these users and counts their states in c. It sets ended[id] for orders that
// no longer hold units.
func (v *APIVerifier) countOrders(
	ctx context.Context, c *Comparison, l *Ledger, orders map[uuid.UUID]string, ended map[uuid.UUID]bool,
) error {
	defer v.client.CloseIdleConnections()
	var mu sync.Mutex
	var lookups errgroup.Group
	lookups.SetLimit(maxAPILookups)
	for id, user := range orders {
		lookups.Go(func() error {
			o, found, err := v.lookUp(ctx, id, user, l.receipts[id])
			if err != nil {
				return fmt.Errorf("read order=%s: %w", id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if found {
				ended[id] = !o.live()
				c.countOrder(l, o, user)
				return nil
			}
			c.Missing++
			c.example("order %s of %s has no final state", id, user)
			return nil
		})
	}
	return lookups.Wait()
}

// lookUp requests an order, with its receipt if there is one, until the order has a final state. An unknown
// order is not found; with a receipt the ingress answers 404 only once that is certain.
func (v *APIVerifier) lookUp(
	ctx context.Context, id uuid.UUID, user, receipt string,
) (o storedOrder, found bool, err error) {
	// By default an ingress allows five requests per user and second.
	const interval = 250 * time.Millisecond
	for {
		var order struct {
			User     string `json:"user_id"`
			Quantity int64  `json:"quantity"`
			Status   string `json:"status"`
		}
		status, err := v.get(ctx, user, receipt, &order, "v1", "orders", id.String())
		switch {
		case ctx.Err() != nil, status == http.StatusNotFound:
			return storedOrder{}, false, nil //nolint:nilerr // the order counts as missing
		case err != nil:
			return storedOrder{}, false, err
		case status == http.StatusOK && order.Status != "reserved":
			return storedOrder{id: id, user: order.User, quantity: order.Quantity, status: order.Status}, true, nil
		case status != http.StatusOK && status != http.StatusServiceUnavailable && status != http.StatusTooManyRequests:
			return storedOrder{}, false, fmt.Errorf("HTTP %d", status)
		}
		if !retry.Pause(interval, ctx.Done()) {
			return storedOrder{}, false, nil
		}
	}
}

// get sends a GET request as the user, anonymously if user is empty, with the receipt if there is one. It decodes
// the body of a 200.
func (v *APIVerifier) get(
	ctx context.Context, user, receipt string, into any, elements ...string,
) (status int, err error) {
	target, err := url.JoinPath(v.url, elements...)
	if err != nil {
		return 0, err
	}
	if receipt != "" {
		target += "?" + url.Values{"receipt": {receipt}}.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return 0, err
	}
	if user != "" {
		if err := v.auth.sign(req.Header, user); err != nil {
			return 0, err
		}
	}
	resp, err := v.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		err = json.NewDecoder(resp.Body).Decode(into)
	}
	return resp.StatusCode, err
}
