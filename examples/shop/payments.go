package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

var orderID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// paymentsMax bounds the memory of this example. A real shop has a table.
const paymentsMax = 10_000

// callTimeout bounds one call of the API.
const callTimeout = 10 * time.Second

// seatEuros is the price of a seat. Stampede does not know it.
const seatEuros = 49

// payment is what the shop knows of a payment. Its id is the reference of the order that it pays.
type payment struct {
	ID      string `json:"id"`
	OrderID string `json:"order_id"`
	// Status is "open" until the order is "paid", or the money is "refunded" for this Reason, the slug of a problem.
	Status string `json:"status"`
	Reason string `json:"reason,omitempty"`
	Euros  int    `json:"euros"`
	user   string
}

// payments are the payments of a shop, and what is done with money that has arrived.
type payments struct {
	api      string
	provider *provider
	token    func(user string) (string, error)

	mu   sync.Mutex
	made []*payment
}

func newPayments(api string, p *provider, token func(string) (string, error)) *payments {
	return &payments{api: api, provider: p, token: token}
}

// start opens a payment for an order at the provider.
func (p *payments) start(ctx context.Context, user, order string) (id string, err error) {
	var found struct {
		Quantity int `json:"quantity"`
	}
	if status, err := p.call(ctx, user, http.MethodGet, order, nil, &found); err != nil || status != http.StatusOK {
		return "", errors.Join(errors.New("the order cannot be looked up"), err)
	}
	euros := seatEuros * found.Quantity
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.made) == paymentsMax {
		return "", errors.New("this example remembers no more payments")
	}
	id = p.provider.open(order, euros)
	p.made = append(p.made, &payment{ID: id, OrderID: order, Status: "open", Euros: euros, user: user})
	return id, nil
}

// byUser returns the payments of a user, newest first.
func (p *payments) byUser(user string) []payment {
	p.mu.Lock()
	defer p.mu.Unlock()
	found := []payment{}
	for _, made := range slices.Backward(p.made) {
		if made.user == user {
			found = append(found, *made)
		}
	}
	return found
}

func (p *payments) find(id string) (payment, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, made := range p.made {
		if made.ID == id {
			return *made, nil
		}
	}
	return payment{}, errors.New("no such payment")
}

func (p *payments) end(id, status, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, made := range p.made {
		if made.ID == id {
			made.Status, made.Reason = status, reason
		}
	}
}

// settle pays the order with money that has arrived, or gives the money back. It may be called again at any time: an
// error asks for that.
func (p *payments) settle(ctx context.Context, id string) error {
	paid, err := p.find(id)
	if err != nil || paid.Status != "open" {
		return err
	}
	slug, err := p.pay(ctx, paid)
	switch {
	case err != nil:
		return err
	case slug == "":
		p.end(id, "paid", "")
		return nil
	}
	if err := p.provider.refund(id); err != nil {
		return err
	}
	p.end(id, "refunded", slug)
	return nil
}

// refunded are the problems after which an order will never take this payment.
var refunded = []string{
	"order-expired", "illegal-transition", "already-paid", "order-not-found", "order-archived",
}

// pay marks the order as paid. A slug says why it never will be paid. After an error the outcome is unknown.
func (p *payments) pay(ctx context.Context, paid payment) (slug string, err error) {
	var answer struct {
		Type   string `json:"type"`   // of a problem
		Status any    `json:"status"` // of the order, or a problem's number
	}
	status, err := p.call(ctx, paid.user, http.MethodPost, paid.OrderID+"/pay", map[string]string{"reference": paid.ID},
		&answer)
	switch slug = strings.TrimPrefix(answer.Type, "/problems/"); {
	case err != nil:
		return "", err
	case status == http.StatusOK && answer.Status == "paid":
		return "", nil
	case slices.Contains(refunded, slug):
		return slug, nil
	}
	return "", fmt.Errorf("the order cannot be paid yet: %d %s", status, slug)
}

// call makes a call of the API about an order, for its buyer.
func (p *payments) call(ctx context.Context, user, method, path string, body, into any) (status int, err error) {
	token, err := p.token(user)
	if err != nil {
		return 0, err
	}
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return 0, err
		}
		content = bytes.NewReader(text)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, p.api+"/v1/orders/"+path, content)
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer func() { _ = answer.Body.Close() }()
	if !strings.Contains(answer.Header.Get("Content-Type"), "json") {
		return 0, fmt.Errorf("HTTP %d from a proxy: the outcome is unknown", answer.StatusCode)
	}
	return answer.StatusCode, json.NewDecoder(answer.Body).Decode(into)
}
