package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// devStartMax bounds the start of "stampede dev", which makes a database.
const devStartMax = time.Minute

// shirtCents is the price of a shirt of a sale without sizes.
const shirtCents = 4900

// size is an item of the sale.
type size struct {
	Code      string `json:"code"`
	Name      string `json:"name"`
	Stock     int    `json:"stock"`
	UnitPrice int    `json:"unit_price,omitempty"`
}

// newSizes are the sizes of the shirt, with as many shirts of each.
func newSizes(stock int) []size {
	return []size{{"s", "Small", stock, 3900}, {"m", "Medium", stock, 3900}, {"xl", "Extra large", stock, 4500}}
}

// dev is a running "stampede dev".
type dev struct {
	api, secret, admin, cashier string

	operators string // the file with the cashier
	process   *os.Process
	ended     chan struct{}
	err       error
}

// startDev runs "stampede dev" with secrets of its own. The pages of the origins, separated by commas, may call it. The
// caller stops it.
func startDev(ctx context.Context, program, origins string) (*dev, error) {
	d := &dev{
		secret: rand.Text() + rand.Text(), admin: rand.Text(), cashier: rand.Text(), ended: make(chan struct{}),
	}
	if err := d.writeOperators(); err != nil {
		return nil, err
	}
	//nolint:noctx // it is asked to stop, not killed
	cmd := exec.Command(program, "dev", "--http-addr=127.0.0.1:0", "--auth=jwt", "--cors-origins="+origins,
		"--operators-file="+d.operators)
	// Secrets are not arguments: those can be read by all users of the machine.
	cmd.Env = append(os.Environ(), "STAMPEDE_JWT_SECRET="+d.secret, "STAMPEDE_ADMIN_TOKEN="+d.admin)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = ownGroup()
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	d.process = cmd.Process
	address := make(chan string, 1)
	go func() {
		defer close(d.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); { // to the end, so that dev can always write
			if words := strings.Fields(lines.Text()); len(words) == 2 && words[0] == "ingress" {
				address <- words[1]
			}
		}
		d.err = cmd.Wait()
	}()
	select {
	case d.api = <-address:
	case <-d.ended:
		return nil, fmt.Errorf("stampede dev: %w", errors.Join(d.err, errors.New("it did not start")))
	case <-ctx.Done():
		d.stop()
		return nil, ctx.Err()
	case <-time.After(devStartMax):
		d.stop()
		return nil, fmt.Errorf("stampede dev did not start within %s", devStartMax)
	}
	return d, nil
}

// writeOperators writes the file of operators, which has the hash of the cashier's token.
func (d *dev) writeOperators() error {
	file, err := os.CreateTemp("", "shop-operators-")
	if err != nil {
		return err
	}
	d.operators = file.Name()
	_, err = fmt.Fprintf(file, "shop cashier %x\n", sha256.Sum256([]byte(d.cashier)))
	return errors.Join(err, file.Close())
}

// createSale creates a sale of shirts, in sizes if there are any, and returns its id. Sizes have a stock of their own.
func (d *dev) createSale(
	ctx context.Context, stock, pace int, opensIn, window time.Duration, sizes ...size,
) (id string, err error) {
	sale := map[string]any{
		"name": "Tour shirt", "per_order_limit": 2,
		"opens_at":               time.Now().Add(opensIn).UTC().Format(time.RFC3339Nano),
		"payment_window_seconds": int(window.Seconds()), "payments_per_second": pace,
	}
	return d.createShirts(ctx, sale, stock, sizes)
}

// createWaitlist is createSale of shirts that go to those who wait when they return.
func (d *dev) createWaitlist(
	ctx context.Context, stock int, window time.Duration, sizes ...size,
) (id string, err error) {
	return d.createShirts(ctx, map[string]any{
		"name": "Tour shirt", "per_order_limit": 2, "payment_window_seconds": int(window.Seconds()), "waitlist": true,
	}, stock, sizes)
}

// createShirts creates a sale that has no stock and no prices yet: of the sizes, or so many shirts if there are none.
func (d *dev) createShirts(ctx context.Context, sale map[string]any, stock int, sizes []size) (id string, err error) {
	sale["currency"] = "EUR"
	if len(sizes) > 0 {
		sale["items"] = sizes
	} else {
		sale["stock"], sale["unit_price"] = stock, shirtCents
	}
	return d.create(ctx, sale)
}

// create creates a sale, and returns its id.
func (d *dev) create(ctx context.Context, sale map[string]any) (id string, err error) {
	var made struct {
		ID string `json:"id"`
	}
	err = d.ask(ctx, http.MethodPost, "/v1/sales", d.admin, sale, &made)
	return made.ID, err
}

// ask makes a call of the API. A nil body sends none, and a nil answer ignores it.
func (d *dev) ask(ctx context.Context, method, path, bearer string, body, answer any) error {
	var sent bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&sent).Encode(body); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, d.api+path, &sent)
	if err != nil {
		return err
	}
	if bearer != "" {
		r.Header.Set("Authorization", "Bearer "+bearer)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = got.Body.Close() }()
	var raw json.RawMessage
	if err := json.NewDecoder(got.Body).Decode(&raw); err != nil {
		return fmt.Errorf("%s %s: %s: %w", method, path, got.Status, err)
	}
	if got.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("%s %s: %s", method, path, raw)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(raw, answer)
}

// stop asks dev to stop, and waits until it has deleted its data.
func (d *dev) stop() {
	_ = d.process.Signal(syscall.SIGINT)
	<-d.ended
	_ = os.Remove(d.operators)
}

// wait returns when dev has ended.
func (d *dev) wait() error {
	<-d.ended
	return d.err
}

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
