package apiclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/google/uuid"

	"stampede/draw"
	"stampede/reservation/catalog"
)

// CreateDraw offers the units of a sale by rank to those who enter another one. A repeat changes nothing.
func (c *Client) CreateDraw(ctx context.Context, goods uuid.UUID, t catalog.DrawTerms) (draw.View, error) {
	return c.draw(ctx, goods, http.MethodPost, "", "create", struct {
		EntriesSaleID uuid.UUID       `json:"entries_sale_id"`
		FreezeSeconds float64         `json:"freeze_seconds"` // a fraction is refused
		Parties       []catalog.Party `json:"parties,omitempty"`
	}{t.Entries, t.Freeze.Seconds(), t.Parties})
}

// OpenDraw has what a draw leaves sold to everybody when each rank had its turn. A repeat changes nothing.
func (c *Client) OpenDraw(ctx context.Context, goods uuid.UUID) (draw.View, error) {
	return c.draw(ctx, goods, http.MethodPost, "open", "open", struct{}{})
}

// Draw returns the draw of a sale.
func (c *Client) Draw(ctx context.Context, goods uuid.UUID) (draw.View, error) {
	return c.draw(ctx, goods, http.MethodGet, "", "show", nil)
}

// Beacon gives a draw the round of drand that makes its seed, with its signature. A repeat changes nothing.
func (c *Client) Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (draw.View, error) {
	return c.draw(ctx, goods, http.MethodPost, "beacon", "give a round to", struct {
		Round     int64    `json:"round"`
		Signature draw.Hex `json:"signature"`
	}{round, signature})
}

// Reveal gives a draw the secret of a party. A repeat changes nothing.
func (c *Client) Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (draw.View, error) {
	return c.draw(ctx, goods, http.MethodPost, "reveal", "give a secret to", struct {
		Party  string   `json:"party"`
		Secret draw.Hex `json:"secret"`
	}{party, secret})
}

func (c *Client) draw(
	ctx context.Context, goods uuid.UUID, method, action, doing string, body any,
) (v draw.View, err error) {
	err = c.do(ctx, call{
		method: method, path: []string{"v1", "sales", goods.String(), "draw", action}, body: body,
		what: doing + " the draw of sale " + goods.String(),
	}, &v)
	return v, err
}

// Bundle writes the bundle of a draw, in JSON.
func (c *Client) Bundle(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	return c.download(ctx, goods, "bundle", w)
}

// Leaves writes the list of the entries of a draw.
func (c *Client) Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	return c.download(ctx, goods, "leaves", w)
}

// download writes a file of a draw, once. Only its head must come within callTimeout.
func (c *Client) download(ctx context.Context, goods uuid.UUID, name string, w io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	slow := time.AfterFunc(callTimeout, cancel)
	request, err := c.request(ctx, call{
		method: http.MethodGet, path: []string{"v1", "sales", goods.String(), "draw", name},
	}, nil)
	if err == nil {
		err = c.copy(request, slow, w)
	}
	if err != nil {
		return fmt.Errorf("download the %s of the draw of sale %s: %w", name, goods, err)
	}
	return nil
}

func (c *Client) copy(request *http.Request, slow *time.Timer, w io.Writer) error {
	patient := *c.http
	patient.Timeout = 0
	resp, err := patient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK || resp.ContentLength < 0 {
		text, err := io.ReadAll(io.LimitReader(resp.Body, answerMax))
		got := reply{status: resp.StatusCode, body: text}
		_ = json.Unmarshal(text, &got.problem) // another text is no problem of an ingress
		return errors.Join(got.failure(), err)
	}
	slow.Stop()
	_, err = io.Copy(w, resp.Body) // an error if it is shorter than it says
	return err
}
