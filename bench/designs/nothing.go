package designs

import (
	"context"
	"fmt"
	"net/http"
	"strconv"

	"github.com/google/uuid"

	"stampede/bench/front"
)

// nothing accepts every order and discards it: what Echo can answer on this machine with the usual
// middlewares, a bound body and an answer in JSON. No design behind this front can be faster.
type nothing struct{ idle }

func newNothing(context.Context, front.Backend) (front.Design, error) { return nothing{}, nil }

// Prepare implements front.Design.
func (nothing) Prepare(context.Context, uuid.UUID, int64) error { return nil }

// Buy implements front.Design.
func (nothing) Buy(context.Context, front.Order) (front.Verdict, error) { return front.Reserved, nil }

// nothingRaw sends prebuilt bytes: the cost of Echo's router and net/http alone.
type nothingRaw struct {
	nothing
	status      int
	contentType string
	body        []byte
}

// newNothingRaw sends the status, type and body of the options, or by default a receipt as `stampede
// serve` writes it.
func newNothingRaw(_ context.Context, b front.Backend) (front.Design, error) {
	if b.Options["body"] == "" {
		return nothingRaw{
			status: http.StatusAccepted, contentType: "application/json",
			body: []byte(`{"order_id":"019ab3c0-5b3c-7b3c-8b3c-0b3c5b3c7b3c","sale_id":"019ab3c0-5b3c-7b3c-8b3c-1b3c5b3c7b3c",` +
				`"status":"reserved","quantity":1,"reserved_at":"2026-11-21T12:00:00.000Z","receipt":"` +
				`AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}`),
		}, nil
	}
	status, err := strconv.Atoi(b.Options["status"])
	if err != nil {
		return nil, fmt.Errorf("option status: %w", err)
	}
	return nothingRaw{status: status, contentType: b.Options["type"], body: []byte(b.Options["body"])}, nil
}

// Answer makes the front send these bytes without calling Buy.
func (n nothingRaw) Answer() (int, string, []byte) { return n.status, n.contentType, n.body }
