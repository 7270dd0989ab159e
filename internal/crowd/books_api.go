package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
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
	b := &APIBooks{client: &http.Client{}, url: baseURL, sale: sale, auth: auth}
	var err error
	b.sold, err = b.soldInAll(ctx)
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
	status, err := b.get(ctx, "", &sale, "v1", "sales", b.sale.String())
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

// Compare implements Books. An order that is still `reserved` has not reached Postgres and counts as missing.
func (b *APIBooks) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	accepted, contradictions := l.Orders()
	c := Comparison{Accepted: len(accepted), Contradictions: contradictions}
	var mu sync.Mutex
	lookups, ctx := errgroup.WithContext(ctx)
	lookups.SetLimit(apiCompareAtOnce)
	for id, user := range accepted {
		lookups.Go(func() error {
			var order struct {
				User     string `json:"user_id"`
				Quantity int64  `json:"quantity"`
				Status   string `json:"status"`
			}
			status, err := b.get(ctx, user, &order, "v1", "orders", id.String())
			if err != nil {
				return fmt.Errorf("read order=%s: %w", id, err)
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case status == http.StatusNotFound, order.Status == "reserved":
				c.Missing++
				c.example("order %s of %s: HTTP %d, status %q", id, user, status, order.Status)
			case status != http.StatusOK:
				return fmt.Errorf("read order=%s: HTTP %d", id, status)
			default:
				live := order.Status == "confirmed" || order.Status == "paid"
				c.judge(l, bookedOrder{id: id, user: order.User, quantity: order.Quantity, live: live}, user)
			}
			return nil
		})
	}
	return c, lookups.Wait()
}

// get asks as the user, or as nobody if user is empty, and decodes an answer of 200.
func (b *APIBooks) get(ctx context.Context, user string, into any, elements ...string) (status int, err error) {
	target, err := url.JoinPath(b.url, elements...)
	if err != nil {
		return 0, err
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
