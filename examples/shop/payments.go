package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// This file is the shop's side of payments. The shop keeps nothing: the provider has the money, and Stampede knows what
// became of it.

var orderID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// callTimeout bounds one call of the API.
const callTimeout = 10 * time.Second

// signatureMaxAge is how old a webhook may be, so that nobody can replay one for ever.
const signatureMaxAge = 5 * time.Minute

// receiveWebhook reports money to Stampede. Its status says whether the provider must deliver the webhook again: not if
// Stampede has answered 200, whatever became of the money.
func (s *shop) receiveWebhook(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = verify(r.Header.Get("Piggy-Signature"), body, s.provider.secret, time.Now())
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	var news event
	if err := json.Unmarshal(body, &news); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if news.Type == "charge.captured" { // all others are no money
		err := s.call(r.Context(), http.MethodPost, "/v1/payments", map[string]any{
			"order_id": news.Order, "reference": news.Charge, "amount": news.Amount, "currency": news.Currency,
		}, nil)
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	w.WriteHeader(http.StatusOK)
}

// verify checks a signature of the provider: "time=UNIX; sha256=BASE64", an HMAC of the time, a line feed and the body.
// The body is that of the request, before anything has parsed it.
func verify(signature string, body, secret []byte, now time.Time) error {
	at, sent, _ := strings.Cut(strings.TrimPrefix(signature, "time="), "; sha256=")
	// The signature comes first: until it is right, nothing else is the provider's.
	if !hmac.Equal([]byte(sign(at, body, secret)), []byte(sent)) {
		return errors.New("the signature is wrong")
	}
	if seconds, err := strconv.ParseInt(at, 10, 64); err != nil || now.Sub(time.Unix(seconds, 0)).Abs() > signatureMaxAge {
		return errors.New("the signature is too old")
	}
	return nil
}

func sign(at string, body, secret []byte) string {
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write(append([]byte(at+"\n"), body...)) // never fails
	return base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// startPayment opens a charge at the provider, to whose page the browser goes.
func (s *shop) startPayment(w http.ResponseWriter, r *http.Request, user string) {
	order, ok := s.ownOrder(w, r, user)
	if !ok {
		return
	}
	if order.Currency == "" {
		http.Error(w, "the sale has no price", http.StatusConflict)
		return
	}
	id := s.provider.open(order.ID, order.Amount, order.Currency)
	writeJSON(w, http.StatusCreated, map[string]string{"pay_url": "/provider/payments/" + id})
}

// listPayments shows what became of the money for an order.
func (s *shop) listPayments(w http.ResponseWriter, r *http.Request, user string) {
	order, ok := s.ownOrder(w, r, user)
	if !ok {
		return
	}
	var found struct {
		Payments []struct {
			Reference string `json:"reference"`
			OrderID   string `json:"order_id"`
			State     string `json:"state"`
			Reason    string `json:"reason,omitempty"`
			Amount    int64  `json:"amount"`
			Currency  string `json:"currency"`
		} `json:"payments"`
	}
	err := s.call(r.Context(), http.MethodGet, "/v1/admin/payments?order="+order.ID, nil, &found)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	writeJSON(w, http.StatusOK, found)
}

// order is what the shop asks Stampede about an order.
type order struct {
	ID       string `json:"order_id"`
	User     string `json:"user_id"`
	Amount   int64  `json:"amount"`
	Currency string `json:"currency"`
}

// ownOrder returns the order of the request, or answers it if that is not the user's.
func (s *shop) ownOrder(w http.ResponseWriter, r *http.Request, user string) (o order, ok bool) {
	id := r.PathValue("order")
	if !orderID.MatchString(id) {
		http.NotFound(w, r)
		return o, false
	}
	if err := s.call(r.Context(), http.MethodGet, "/v1/admin/orders/"+id, nil, &o); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return o, false
	}
	if o.User != user {
		http.NotFound(w, r)
		return o, false
	}
	return o, true
}

// call makes a call of Stampede as the cashier. The error is nil for the answer 200 only.
func (s *shop) call(ctx context.Context, method, path string, body, into any) error {
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content = bytes.NewReader(text)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, s.config.API+path, content)
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+s.config.Cashier)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	said, err := io.ReadAll(io.LimitReader(answer.Body, answerMax))
	switch {
	case err != nil:
		return err
	case answer.StatusCode != http.StatusOK:
		return fmt.Errorf("stampede answers %s: %s", answer.Status, said)
	case into == nil:
		return nil
	}
	return json.Unmarshal(said, into)
}

// answerMax bounds an answer of Stampede.
const answerMax = 1 << 20
