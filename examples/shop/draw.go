package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"time"
)

const (
	// entriesMax is more than anybody enters, of each size.
	entriesMax = 1_000_000
	// freezeSeconds is the least that a draw has. With parties the seed does not wait for it.
	freezeSeconds = 10
	// lookPause is between two looks at a draw.
	lookPause = time.Second
	// witnessTime is between the freeze and the seed, so that open pages, which look each second, keep what is public.
	witnessTime = 4 * time.Second
)

// drawn is a draw of shirts. Its seed is made by two parties, so that it needs no network. Both are this program here:
// in a real draw they are people who do not trust each other, or there are none, and drand gives the seed.
type drawn struct {
	*dev
	goods, entries string
	sizes          []size
	secrets        map[string]string // in hexadecimal, by party
}

// createDraw creates a sale of shirts that are drawn, in sizes if there are any. Each size is drawn for itself.
func (d *dev) createDraw(
	ctx context.Context, stock int, closesIn, window time.Duration, sizes ...size,
) (*drawn, error) {
	goods, err := d.createShirts(ctx, map[string]any{
		"name": "Tour shirt, signed", "per_order_limit": 1, "payment_window_seconds": int(window.Seconds()),
	}, stock, sizes)
	if err != nil {
		return nil, err
	}
	terms := map[string]any{
		"name": "Tour shirt, signed: entries", "per_order_limit": 1,
		"closes_at": time.Now().Add(closesIn).UTC().Format(time.RFC3339Nano),
	}
	if len(sizes) == 0 {
		terms["stock"] = entriesMax
	} else {
		items := slices.Clone(sizes)
		for i := range items {
			items[i].Stock, items[i].UnitPrice = entriesMax, 0
		}
		terms["items"] = items
	}
	entries, err := d.create(ctx, terms)
	if err != nil {
		return nil, err
	}
	made := &drawn{d, goods, entries, sizes, map[string]string{}}
	var parties []map[string]string
	for _, name := range []string{"the shop", "the band"} {
		secret := make([]byte, 32)
		_, _ = rand.Read(secret) // never fails
		hash := sha256.Sum256(secret)
		made.secrets[name] = hex.EncodeToString(secret)
		parties = append(parties, map[string]string{"name": name, "commitment": hex.EncodeToString(hash[:])})
	}
	terms = map[string]any{"entries_sale_id": entries, "freeze_seconds": freezeSeconds, "parties": parties}
	return made, d.ask(ctx, http.MethodPost, made.path(), d.admin, terms, nil)
}

func (d *drawn) path() string { return "/v1/sales/" + d.goods + "/draw" }

// enter has other people enter, for one size after the other. They pay nothing if they are offered a shirt.
func (d *drawn) enter(ctx context.Context, others int, token func(user string) (string, error)) error {
	for n := range others {
		bearer, err := token(fmt.Sprintf("fan-%d", n+1))
		if err != nil {
			return err
		}
		entry := map[string]any{}
		if len(d.sizes) > 0 {
			entry["items"] = map[string]int{d.sizes[n%len(d.sizes)].Code: 1}
		}
		if err := d.ask(ctx, http.MethodPost, "/v1/sales/"+d.entries+"/orders", bearer, entry, nil); err != nil {
			return err
		}
	}
	return nil
}

// reveal reveals the secrets of the parties once the list is frozen, and others have seen it: before that nobody may
// know them.
func (d *drawn) reveal(ctx context.Context) error {
	for {
		var now struct{ State string }
		if err := d.ask(ctx, http.MethodGet, d.path(), "", nil, &now); err != nil {
			return err
		}
		pause := lookPause
		if now.State == "frozen" {
			pause = witnessTime
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
		if now.State == "frozen" {
			break
		}
	}
	for party, secret := range d.secrets {
		body := map[string]string{"party": party, "secret": secret}
		if err := d.ask(ctx, http.MethodPost, d.path()+"/reveal", "", body, nil); err != nil {
			return err
		}
	}
	return nil
}
