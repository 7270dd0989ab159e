package loadgen

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
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"stampede/internal/format"
	"stampede/internal/retry"
	"stampede/reservation/order"
	"stampede/sql"
)

// Verifier reads how many units of the sale are sold, and which orders hold them.
type Verifier interface {
	// Sold is how many units were confirmed since the verifier was created.
	Sold(ctx context.Context) (int64, error)
	// Compare compares the ledger of a finished crowd with the stored orders, one by one.
	Compare(ctx context.Context, l *Ledger) (Comparison, error)
}

// storedOrder is an order as a verifier reads it.
type storedOrder struct {
	id       uuid.UUID
	user     string
	quantity int64
	items    order.Items
	status   string
}

// live reports whether the order holds units.
func (o storedOrder) live() bool { return o.status == "confirmed" || o.status == "paid" }

// Comparison is the result of Verifier.Compare.
type Comparison struct {
	// Accepted is how many orders the ledger has. Found of them are stored and live, with the same buyer and units.
	// The others ended in a way that their buyers can see: refused after the 202, voided because Redis lost them,
	// cancelled, or expired.
	Accepted  int `json:"accepted"`
	Found     int `json:"found"`
	Refused   int `json:"refused"`
	Voided    int `json:"voided"`
	Cancelled int `json:"cancelled"`
	Expired   int `json:"expired"`
	// Broken promises: accepted orders that are not stored, or are stored with another buyer or other units; live orders
	// that the crowd does not know; contradictory answers.
	Missing        int `json:"missing"`
	Altered        int `json:"altered"`
	Unexpected     int `json:"unexpected"`
	Contradictions int `json:"contradictions"`
	// Recovered counts live orders of buyers who got no answer.
	Recovered int `json:"recovered"`
	// Examples describe a few of the broken promises.
	Examples []string `json:"examples,omitempty"`
}

// maxExamples bounds Comparison.Examples.
const maxExamples = 5

// Holds reports whether no promise is broken.
func (c Comparison) Holds() bool {
	return c.Missing == 0 && c.Altered == 0 && c.Unexpected == 0 && c.Contradictions == 0
}

// String returns the comparison in one line.
func (c Comparison) String() string {
	line := fmt.Sprintf("%s accepted, %s of them found", format.Count(c.Accepted), format.Count(c.Found))
	for _, part := range []struct {
		n    int
		name string
	}{
		{c.Refused, "refused later"},
		{c.Voided, "voided"},
		{c.Cancelled, "cancelled"},
		{c.Expired, "expired"},
		{c.Recovered, "without an answer, found"},
		{c.Missing, "missing"},
		{c.Altered, "altered"},
		{c.Unexpected, "unknown to the crowd"},
		{c.Contradictions, "contradictions"},
	} {
		if part.n > 0 {
			line += fmt.Sprintf(", %s %s", format.Count(part.n), part.name)
		}
	}
	return line
}

func (c *Comparison) example(format string, a ...any) {
	if len(c.Examples) < maxExamples {
		c.Examples = append(c.Examples, fmt.Sprintf(format, a...))
	}
}

// countOrder counts an order of the ledger by what is stored of it.
func (c *Comparison) countOrder(l *Ledger, o storedOrder, user string) {
	quantity, items := l.bought(user)
	switch {
	case o.user != user || o.quantity != quantity || o.items != items:
		c.Altered++
		c.example("order %s is %d units %sfor %s, accepted was %d %sfor %s",
			o.id, o.quantity, spaced(o.items), o.user, quantity, spaced(items), user)
	case o.live():
		c.Found++
	case o.status == "rejected":
		c.Refused++
	case o.status == "voided":
		c.Voided++
	case o.status == "cancelled":
		c.Cancelled++
	case o.status == "expired":
		c.Expired++
	default:
		c.Altered++
		c.example("order %s is %q", o.id, o.status)
	}
}

// spaced leaves out what a sale without items has not.
func spaced(items order.Items) string {
	if items == "" {
		return ""
	}
	return string(items) + " "
}

// countPairs counts buyers who hold two orders. Ended are orders that no longer hold units.
func (c *Comparison) countPairs(l *Ledger, ended map[uuid.UUID]bool) {
	for _, pair := range l.pairs() {
		if !ended[pair[0]] && !ended[pair[1]] {
			c.Contradictions++
			c.example("one buyer holds the orders %s and %s", pair[0], pair[1])
		}
	}
}

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
		var found struct {
			User     string      `json:"user_id"`
			Quantity int64       `json:"quantity"`
			Items    order.Items `json:"items"`
			Status   string      `json:"status"`
		}
		status, err := v.get(ctx, user, receipt, &found, "v1", "orders", id.String())
		switch {
		case ctx.Err() != nil, status == http.StatusNotFound:
			return storedOrder{}, false, nil //nolint:nilerr // the order counts as missing
		case err != nil:
			return storedOrder{}, false, err
		case status == http.StatusOK && found.Status != "reserved":
			return storedOrder{id, found.User, found.Quantity, found.Items, found.Status}, true, nil
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

// PostgresVerifier reads the orders from Postgres.
type PostgresVerifier struct {
	pool   *pgxpool.Pool
	sale   uuid.UUID
	sold   int64                  // before the crowd
	before map[uuid.UUID]struct{} // the orders before the crowd
	api    *APIVerifier           // nil without UseAPI
}

var _ Verifier = (*PostgresVerifier)(nil)

// NewPostgresVerifier reads the orders of the sale before the crowd.
func NewPostgresVerifier(ctx context.Context, pool *pgxpool.Pool, sale uuid.UUID) (*PostgresVerifier, error) {
	v := &PostgresVerifier{pool: pool, sale: sale, before: make(map[uuid.UUID]struct{})}
	var err error
	if v.sold, err = v.totalSold(ctx); err != nil {
		return nil, err
	}
	err = v.eachOrder(ctx, func(o storedOrder) { v.before[o.id] = struct{}{} })
	return v, err
}

// UseAPI makes Compare look up accepted orders that Postgres lacks at an ingress, with their receipts: if Redis
// has lost them, they are voided, not missing.
func (v *PostgresVerifier) UseAPI(api *APIVerifier) { v.api = api }

// Sold implements Verifier.
func (v *PostgresVerifier) Sold(ctx context.Context) (int64, error) {
	sold, err := v.totalSold(ctx)
	return sold - v.sold, err
}

func (v *PostgresVerifier) totalSold(ctx context.Context) (int64, error) {
	var sold int64
	err := v.pool.QueryRow(ctx, sql.CrowdSaleSold, v.sale).Scan(&sold)
	if err != nil {
		return 0, fmt.Errorf("read sale=%s: %w", v.sale, err)
	}
	return sold, nil
}

func (v *PostgresVerifier) eachOrder(ctx context.Context, see func(storedOrder)) error {
	rows, _ := v.pool.Query(ctx, sql.CrowdSaleOrders, v.sale) // its error comes with the rows
	var o storedOrder
	_, err := pgx.ForEachRow(rows, []any{&o.id, &o.user, &o.quantity, &o.items, &o.status}, func() error {
		see(o)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the orders of sale=%s: %w", v.sale, err)
	}
	return nil
}

// Compare implements Verifier.
func (v *PostgresVerifier) Compare(ctx context.Context, l *Ledger) (Comparison, error) {
	missing, contradictions := l.orders() // until they are found
	undecided := l.undecided()
	c := Comparison{Accepted: len(missing), Contradictions: contradictions}
	ended := make(map[uuid.UUID]bool)
	err := v.eachOrder(ctx, func(o storedOrder) {
		user, known := missing[o.id]
		_, old := v.before[o.id]
		switch {
		case known:
			ended[o.id] = !o.live()
			c.countOrder(l, o, user)
			delete(missing, o.id)
		case !o.live(), old:
		case undecided[o.user]:
			c.Recovered++
		default:
			c.Unexpected++
			c.example("no answer named order %s of %s", o.id, o.user)
		}
	})
	if err != nil {
		return Comparison{}, err
	}
	if v.api != nil {
		if err := v.api.countOrders(ctx, &c, l, missing, ended); err != nil {
			return Comparison{}, err
		}
	} else if c.Missing = len(missing); c.Missing > 0 {
		c.example("%d accepted orders are not in Postgres", c.Missing)
	}
	c.countPairs(l, ended)
	return c, nil
}
