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

// APIBooks asks an ingress, as any buyer may: for whoever load-tests with nothing but a URL. Orders
// that nobody was told of stay invisible to it.
type APIBooks struct {
	client *http.Client
	url    string
	sale   uuid.UUID
	auth   Auth
	sold   int64 // when the books were opened
}

var _ Books = (*APIBooks)(nil)

// ErrPaymentWindow is returned where the API cannot tell how many orders are confirmed: in a sale with
// a payment window it counts them as held, together with those that are on their way.
var ErrPaymentWindow = errors.New("the API does not count confirmed orders of a sale with a payment window")

// apiCompareAtOnce bounds the requests with which orders are looked up.
const apiCompareAtOnce = 32

// OpenAPIBooks notes how much of the sale is sold before the crowd comes.
func OpenAPIBooks(ctx context.Context, baseURL string, sale uuid.UUID, auth Auth) (*APIBooks, error) {
	transport := &http.Transport{MaxIdleConnsPerHost: apiCompareAtOnce}
	b := &APIBooks{client: &http.Client{Transport: transport}, url: baseURL, sale: sale, auth: auth}
	var err error
	if b.sold, err = b.soldInAll(ctx); errors.Is(err, ErrPaymentWindow) {
		err = nil // each order can still be looked up
	}
	return b, err
}

// Sold implements Books.
func (b *APIBooks) Sold(ctx context.Context) (int64, error) {
	sold, err := b.soldInAll(ctx)
	return sold - b.sold, err
}

func (b *APIBooks) soldInAll(ctx context.Context) (int64, error) {
	var sale struct {
		Sold          int64 `json:"sold"`
		PaymentWindow int64 `json:"payment_window_seconds"`
	}
	status, err := b.get(ctx, "", "", &sale, "v1", "sales", b.sale.String())
	switch {
	case err != nil:
		return 0, fmt.Errorf("read sale=%s: %w", b.sale, err)
	case status != http.StatusOK:
		return 0, fmt.Errorf("read sale=%s: HTTP %d", b.sale, status)
	case sale.PaymentWindow > 0:
		return 0, fmt.Errorf("read sale=%s: %w", b.sale, ErrPaymentWindow)
	}
	return sale.Sold, nil
}

// Compare implements Books. An order that is not in Postgres yet is waited for; if it is still not
// there when ctx ends, it counts as missing.
func (b *APIBooks) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	accepted, contradictions := l.orders()
	c := Comparison{Accepted: len(accepted), Contradictions: contradictions}
	over := make(map[uuid.UUID]bool)
	err := b.judgeEach(ctx, &c, l, accepted, over)
	c.judgePairs(l, over)
	return c, err
}

// judgeEach asks for the orders of these users, and counts in c what became of them. Those of which nothing is held any
// more become true in over.
func (b *APIBooks) judgeEach(
	ctx context.Context, c *Comparison, l *Ledger, orders map[uuid.UUID]string, over map[uuid.UUID]bool,
) error {
	defer b.client.CloseIdleConnections()
	var mu sync.Mutex
	var lookups errgroup.Group
	lookups.SetLimit(apiCompareAtOnce)
	for id, user := range orders {
		lookups.Go(func() error {
			o, found, err := b.lookUp(ctx, id, user, l.receipts[id])
			if err != nil {
				return fmt.Errorf("read order=%s: %w", id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if found {
				over[id] = !o.live()
				c.judge(l, o, user)
				return nil
			}
			c.Missing++
			c.example("order %s of %s came to no end", id, user)
			return nil
		})
	}
	return lookups.Wait()
}

// lookUp asks for an order, with its receipt if there is one, until it has come to its end. One that nobody knows any
// more is not found; with a receipt the ingress says that only when it has become certain.
func (b *APIBooks) lookUp(
	ctx context.Context, id uuid.UUID, user, receipt string,
) (o bookedOrder, found bool, err error) {
	// An ingress lets a user look five times in a second, unless it is told otherwise.
	const between = 250 * time.Millisecond
	for {
		var order struct {
			User     string `json:"user_id"`
			Quantity int64  `json:"quantity"`
			Status   string `json:"status"`
		}
		status, err := b.get(ctx, user, receipt, &order, "v1", "orders", id.String())
		switch {
		case ctx.Err() != nil, status == http.StatusNotFound:
			return bookedOrder{}, false, nil //nolint:nilerr // the caller looks at ctx
		case err != nil:
			return bookedOrder{}, false, err
		case status == http.StatusOK && order.Status != "reserved":
			return bookedOrder{id: id, user: order.User, quantity: order.Quantity, status: order.Status}, true, nil
		case status != http.StatusOK && status != http.StatusServiceUnavailable && status != http.StatusTooManyRequests:
			return bookedOrder{}, false, fmt.Errorf("HTTP %d", status)
		}
		if !retry.Pause(between, ctx.Done()) {
			return bookedOrder{}, false, nil
		}
	}
}

// get asks as the user, or as nobody if user is empty, with a receipt unless that is empty, and
// decodes an answer of 200.
func (b *APIBooks) get(
	ctx context.Context, user, receipt string, into any, elements ...string,
) (status int, err error) {
	target, err := url.JoinPath(b.url, elements...)
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
		if err := b.auth.Sign(req.Header, user); err != nil {
			return 0, err
		}
	}
	resp, err := b.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		err = json.NewDecoder(resp.Body).Decode(into)
	}
	return resp.StatusCode, err
}
