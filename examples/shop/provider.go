package main

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	_ "embed" // for provider.html
	"encoding/hex"
	"errors"
	"html/template"
	"io"
	"log"
	mathrand "math/rand/v2"
	"net/http"
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

// charge is what the provider knows of a payment: open, captured, refunded.
type charge struct {
	ID, Order, Status string
	Euros             int
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
func (p *provider) open(order string, euros int) (id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id = "pay_" + strings.ToLower(rand.Text()[:16])
	p.payments[id] = &charge{ID: id, Order: order, Status: "open", Euros: euros}
	return id
}

func (p *provider) refund(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.payments[id]
	if c == nil || c.Status == "open" {
		return errors.New("there is nothing to refund")
	}
	c.Status = "refunded"
	return nil
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
		p.sending.Go(func() { p.deliver(id) })
	}
	p.mu.Unlock()
	if c == nil {
		http.NotFound(w, r)
		return
	}
	http.Redirect(w, r, "/?payment="+id, http.StatusSeeOther)
}

// deliver sends the webhook until the shop takes it.
func (p *provider) deliver(id string) {
	for pause := deliveryPauseMin; ; pause = min(2*pause, deliveryPauseMax) {
		err := p.send(id)
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

func (p *provider) send(id string) error {
	r, err := http.NewRequestWithContext(p.ctx, http.MethodPost, p.webhook, strings.NewReader(id))
	if err != nil {
		return err
	}
	r.Header.Set("Webhook-Signature", p.sign(id))
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

func (p *provider) sign(id string) string {
	mac := hmac.New(sha256.New, p.secret)
	_, _ = mac.Write([]byte(id)) // never fails
	return hex.EncodeToString(mac.Sum(nil))
}

// verify is the shop's check that a webhook is from the provider; it returns the payment.
func (p *provider) verify(r *http.Request) (id string, err error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return "", err
	}
	if id = string(body); !hmac.Equal([]byte(p.sign(id)), []byte(r.Header.Get("Webhook-Signature"))) {
		return "", errors.New("the signature is wrong")
	}
	return id, nil
}
