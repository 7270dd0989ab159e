package main

import (
	"bytes"
	"context"
	"crypto/rand"
	_ "embed" // for provider.html
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"log"
	mathrand "math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Pauses between the deliveries of a webhook.
const (
	deliveryPauseMin = 250 * time.Millisecond
	deliveryPauseMax = 5 * time.Second
)

// provider is a fake payment provider. It takes money from anybody at any time, as real ones do, and tells the shop by
// a webhook, again and again until the shop says that it has understood.
type provider struct {
	webhook string
	secret  []byte
	ctx     context.Context
	stop    context.CancelFunc
	sending sync.WaitGroup

	mu       sync.Mutex
	payments map[string]*charge
}

// charge is what the provider knows of a payment: it is open or captured.
type charge struct {
	ID, Order, Status string
	// Amount is in cents.
	Amount   int64
	Currency string
}

// Price is the amount for people.
func (c charge) Price() string {
	return fmt.Sprintf("%d.%02d %s", c.Amount/100, c.Amount%100, c.Currency)
}

// event is the body of a webhook.
type event struct {
	Type     string `json:"type"`
	Charge   string `json:"charge"`
	Order    string `json:"order"`
	Amount   int64  `json:"amount"`
	Currency string `json:"currency"`
}

func newProvider(webhook string) *provider {
	ctx, stop := context.WithCancel(context.Background())
	return &provider{
		webhook: webhook, secret: []byte(rand.Text()), ctx: ctx, stop: stop, payments: map[string]*charge{},
	}
}

// close ends the deliveries.
func (p *provider) close() {
	p.stop()
	p.sending.Wait()
}

// open begins a payment.
func (p *provider) open(order string, amount int64, currency string) (id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id = "pay_" + strings.ToLower(rand.Text()[:16])
	p.payments[id] = &charge{ID: id, Order: order, Status: "open", Amount: amount, Currency: currency}
	return id
}

func (p *provider) find(id string) (charge, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.payments[id]; c != nil {
		return *c, true
	}
	return charge{}, false
}

//go:embed provider.html
var providerHTML string

var providerPage = template.Must(template.New("provider").Parse(providerHTML))

// show serves the page on which a buyer pays.
func (p *provider) show(w http.ResponseWriter, r *http.Request) {
	c, ok := p.find(r.PathValue("payment"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_ = providerPage.Execute(w, c) // fails if the client has left
}

// capture takes the money and sends the buyer back to the shop. The webhook comes on its own.
func (p *provider) capture(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("payment")
	p.mu.Lock()
	c := p.payments[id]
	captured := c != nil && c.Status == "open"
	if captured {
		c.Status = "captured"
		body, _ := json.Marshal(event{"charge.captured", id, c.Order, c.Amount, c.Currency}) // cannot fail
		p.sending.Go(func() { p.deliver(id, body) })
	}
	p.mu.Unlock()
	if c == nil {
		http.NotFound(w, r)
		return
	}
	http.Redirect(w, r, "/?"+url.Values{"payment": {id}, "order": {c.Order}}.Encode(), http.StatusSeeOther)
}

// deliver sends the webhook until the shop takes it.
func (p *provider) deliver(id string, body []byte) {
	for pause := deliveryPauseMin; ; pause = min(2*pause, deliveryPauseMax) {
		err := p.send(body)
		if err == nil {
			return
		}
		log.Printf("webhook for %s: %v", id, err)
		select {
		case <-time.After(pause/2 + mathrand.N(pause)):
		case <-p.ctx.Done():
			return
		}
	}
}

func (p *provider) send(body []byte) error {
	r, err := http.NewRequestWithContext(p.ctx, http.MethodPost, p.webhook, bytes.NewReader(body))
	if err != nil {
		return err
	}
	at := strconv.FormatInt(time.Now().Unix(), 10)
	r.Header.Set("Piggy-Signature", "time="+at+"; sha256="+sign(at, body, p.secret))
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
	if answer.StatusCode/100 != 2 {
		return errors.New(answer.Status + ": " + strings.TrimSpace(string(text)))
	}
	return nil
}
