// Package apiclient makes the calls of operators over HTTP, for commands that run far from the databases. Its errors
// are those of the packages that make the same changes on the databases, as far as the API tells them apart.
package apiclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"stampede/internal/retry"
)

var (
	// ErrURL is returned by New for a URL that is not that of an ingress.
	ErrURL = errors.New("want the URL of an ingress, such as https://shop.example:8080")
	// ErrToken is returned when the token is missing, wrong, or that of an operator with a lower role.
	ErrToken = errors.New("the server refuses the token (STAMPEDE_ADMIN_TOKEN)")
	// ErrUnknown is returned when no answer tells whether a change was made.
	ErrUnknown = errors.New("the outcome is unknown")
	// ErrInvalid is returned for a request that the server finds wrong.
	ErrInvalid = errors.New("the request is not valid")
	// ErrRefused is returned for a request that the server understands and refuses.
	ErrRefused = errors.New("the request was refused")
)

const (
	// callTimeout bounds a try. It is longer than an ingress takes for an operator's call.
	callTimeout = 15 * time.Second
	// tries bounds the tries of a call, and waitMax the pause between two of them.
	tries   = 4
	waitMax = 3 * time.Second
	// answerMax bounds an answer.
	answerMax = 8 << 20
)

// Client calls an ingress. It is safe for concurrent use.
type Client struct {
	base  *url.URL
	token string
	agent string
	http  *http.Client
}

// New returns a client of the ingress at a URL for the operator with a token. Agent is its User-Agent.
func New(base, token, agent string) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" ||
		u.Fragment != "" {
		return nil, ErrURL
	}
	return &Client{u, token, agent, &http.Client{
		Timeout: callTimeout,
		// A redirect would make a POST a GET, and is not what an ingress answers.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// call is one request, which may be repeated: it changes nothing, or takes effect once however often it arrives.
type call struct {
	method string
	path   []string
	query  url.Values
	key    string // Idempotency-Key
	body   any
	// what names the call in errors.
	what string
}

// do makes a call and decodes its answer. It repeats the call after an answer that says that a later try may succeed,
// after one that no ingress made, and after a lost connection.
func (c *Client) do(ctx context.Context, request call, answer any) error {
	var body []byte
	if request.body != nil {
		var err error
		if body, err = json.Marshal(request.body); err != nil {
			return err
		}
	}
	unknown := false // whether an earlier try may have made the change
	for try := 1; ; try++ {
		got, err := c.try(ctx, request, body)
		if err == nil && got.status/100 == 2 && got.isAnswerTo(request) && json.Unmarshal(got.body, answer) == nil {
			return nil
		}
		again, wait := try < tries && ctx.Err() == nil, time.Duration(try)*200*time.Millisecond
		if err == nil {
			err = got.failure()
			again = again && got.mayPass()
			wait = max(wait, got.retryAfter)
		}
		unknown = unknown || request.method != http.MethodGet && got.undecided() && !neverSent(err)
		if again && retry.Pause(min(wait, waitMax), ctx.Done()) {
			continue
		}
		if unknown && !errors.Is(err, ErrUnknown) && !got.decides() {
			err = fmt.Errorf("%w: %w", ErrUnknown, err)
		}
		return fmt.Errorf("%s: %w", request.what, err)
	}
}

// request makes the request of a call.
func (c *Client) request(ctx context.Context, request call, body []byte) (*http.Request, error) {
	target := c.base.JoinPath(request.path...)
	target.RawQuery = request.query.Encode()
	req, err := http.NewRequestWithContext(ctx, request.method, target.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json, application/problem+json")
	req.Header.Set("User-Agent", c.agent)
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if request.key != "" {
		req.Header.Set("Idempotency-Key", request.key)
	}
	if request.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

// try makes a call once.
func (c *Client) try(ctx context.Context, request call, body []byte) (reply, error) {
	req, err := c.request(ctx, request, body)
	if err != nil {
		return reply{}, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
	if err != nil {
		return reply{}, fmt.Errorf("the answer broke off: %w", err)
	}
	got := reply{status: resp.StatusCode, body: text}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		got.retryAfter = time.Duration(seconds) * time.Second
	}
	_ = json.Unmarshal(text, &got.problem) // another text is no problem of an ingress
	return got, nil
}
