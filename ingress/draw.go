package ingress

import (
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

// defaultFreeze is the freeze of a draw that names none, in seconds.
const defaultFreeze = 60

// lineTurns are the turns of each line, together less than the connections of those who look at orders, which they use.
const lineTurns = 1

var (
	problemDrawNotFound  = problemFor(draws.ErrNoDraw)
	problemDrawNotFrozen = problemFor(draws.ErrNotFrozen)
	problemDrawVoid      = problemFor(draws.ErrVoid)
	problemBeacon        = problemFor(draw.ErrBeacon)
	problemEntryNotFound = problemFor(draws.ErrNoEntry)

	problemSeedOfParties = fixed(problem{
		Kind:   problems.InvalidBeacon,
		detail: "The seed of this draw is that of its parties, which reveal their secrets at POST …/draw/reveal.",
	})
	problemSeedOfRound  = invalid("The seed of this draw is that of a round of drand: POST …/draw/beacon.")
	problemEntryReceipt = invalid(`receipt must be the complete "receipt" from the answer to the entry.`)
)

// publicForever are the headers of a list. They must not be changed. A list that a gateway compresses has no ranges.
var publicForever = http.Header{"Cache-Control": {"public, max-age=31536000, immutable, no-transform"}}

// drawService serves the calls on draws.
type drawService struct {
	*core
	sales *saleService
	feed  *feed
	files *files
	// direct are the downloads that are read from Postgres.
	direct slots
	// entrants ask for a proof with a receipt that this secret has signed, and seeds are for what makes the seed or a
	// part of it. All others are strangers.
	entrants, seeds, strangers *line
	verifier                   verifier
}

func newDrawService(c *core, sales *saleService) *drawService {
	s := &drawService{
		core: c, sales: sales, files: newFiles(c), direct: slots{limit: directMax},
		entrants: c.limits.newLine(), seeds: c.limits.newLine(), strangers: c.limits.newLine(),
	}
	s.verifier.line = c.limits.newLine()
	s.verifier.line.rests = verifyRests
	s.feed = startFeed(s.background, salesBatchMax, salesMax, s.findDraws)
	return s
}

// create serves POST /v1/sales/{sale}/draw.
func (s *drawService) create(c echo.Context, operator string) error {
	goods, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	body := struct {
		EntriesSaleID string          `json:"entries_sale_id"`
		FreezeSeconds *int64          `json:"freeze_seconds"`
		Parties       []catalog.Party `json:"parties"`
	}{}
	if err := readObject(c, &body); err != nil {
		return err
	}
	terms := catalog.DrawTerms{Freeze: defaultFreeze * time.Second, Parties: body.Parties}
	if body.FreezeSeconds != nil {
		terms.Freeze = reservation.Seconds(*body.FreezeSeconds)
	}
	if err := parseIDFilter("entries_sale_id", "a sale", body.EntriesSaleID, &terms.Entries); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(catalog.WithOperator(c.Request().Context(), operator), catalogTimeout)
	defer cancel()
	replayed, err := s.config.Sales.CreateDraw(ctx, goods, terms)
	s.sales.invalidate()
	s.feed.invalidate()
	if err != nil {
		return err
	}
	created, err := s.config.Draws.FindDraw(ctx, goods)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if !replayed {
		status = http.StatusCreated
		c.Response().Header()["Location"] = []string{"/v1/sales/" + goods.String() + "/draw"}
	}
	return writeJSON(c, status, created.View())
}

// open serves POST /v1/sales/{sale}/draw/open.
func (s *drawService) open(c echo.Context, operator string) error {
	goods, ok := parseID(c.Param("sale"))
	if !ok {
		return problemDrawNotFound
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(catalog.WithOperator(c.Request().Context(), operator), catalogTimeout)
	defer cancel()
	d, err := s.config.Draws.FindDraw(ctx, goods)
	if err == nil {
		err = s.config.Sales.OpenDraw(ctx, goods)
	}
	s.sales.invalidate()
	s.feed.invalidate()
	if err == nil {
		d, err = s.config.Draws.FindDraw(ctx, goods)
	}
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, d.View())
}

// show serves GET /v1/sales/{sale}/draw.
func (s *drawService) show(c echo.Context) error {
	goods, ok := parseID(c.Param("sale"))
	if !ok {
		return problemDrawNotFound
	}
	return answerFromFeed(c, s.feed, goods, 0, func(f found) (any, error) {
		if f.draw == nil {
			return nil, problemDrawNotFound
		}
		return f.draw.View(), nil
	})
}

// inLine has do read or change a draw in its turn. Its error is a problem if Postgres has answered.
func (s *drawService) inLine(c echo.Context, in *line, do func(ctx context.Context) error) error {
	var refused *problem
	err := in.run(c.Request(), func() error {
		return s.orders.query(c.Request().Context(), catalogTimeout, func(ctx context.Context) error {
			err := do(ctx)
			if refused = refusalOf(err); refused != nil {
				err = nil // Postgres has answered
			}
			return err
		})
	})
	if refused != nil {
		return refused
	}
	return err
}

// takeBeacon serves POST /v1/sales/{sale}/draw/beacon.
func (s *drawService) takeBeacon(c echo.Context) error {
	body := struct {
		Round     int64  `json:"round"`
		Signature string `json:"signature"`
		// Randomness is in what drand answers. It is the hash of the signature.
		Randomness string `json:"randomness"`
	}{}
	if err := readObject(c, &body); err != nil {
		return err
	}
	signature, err := hex.DecodeString(body.Signature)
	if err != nil {
		return problemBeacon
	}
	d, err := s.known(c)
	if err != nil {
		return err
	}
	known, err := d.TakesBeacon(body.Round, signature)
	if err == nil && !known {
		err = s.verifier.verify(c.Request(), body.Round, signature)
	}
	refusal := refusedSeed(err, problemSeedOfParties)
	return s.answerChange(c, d, known, refusal, func(ctx context.Context) (draws.Draw, error) {
		return s.config.Draws.Beacon(ctx, d.SaleID, body.Round, signature)
	})
}

// takeSecret serves POST /v1/sales/{sale}/draw/reveal.
func (s *drawService) takeSecret(c echo.Context) error {
	body := struct {
		Party  string `json:"party"`
		Secret string `json:"secret"`
	}{}
	if err := readObject(c, &body); err != nil {
		return err
	}
	secret, err := hex.DecodeString(body.Secret)
	if err != nil {
		return draw.ErrParties
	}
	d, err := s.known(c)
	if err != nil {
		return err
	}
	known, err := d.TakesSecret(body.Party, secret)
	if errors.Is(err, draws.ErrNotFrozen) {
		err = nil // it may be frozen by now
	}
	refusal := refusedSeed(err, problemSeedOfRound)
	return s.answerChange(c, d, known, refusal, func(ctx context.Context) (draws.Draw, error) {
		return s.config.Draws.Reveal(ctx, d.SaleID, body.Party, secret)
	})
}

// refusedSeed is the answer to an error, which is otherSeed for a draw with the other kind of seed.
func refusedSeed(err error, otherSeed *problem) error {
	if errors.Is(err, draws.ErrOtherSeed) {
		return otherSeed
	}
	return err
}

// answerChange changes a draw, and answers with it. What is refused or known from memory holds no place in the line of
// those who have proved that they have the seed or a part of it.
func (s *drawService) answerChange(
	c echo.Context, d *draws.Draw, known bool, refused error, change func(context.Context) (draws.Draw, error),
) error {
	switch {
	case refused != nil:
		return refused
	case known:
		return writeJSON(c, http.StatusOK, d.View())
	}
	var now draws.Draw
	err := s.inLine(c, s.seeds, func(ctx context.Context) (err error) {
		now, err = change(ctx)
		return err
	})
	if err != nil {
		return err
	}
	s.feed.invalidate()
	return writeJSON(c, http.StatusOK, now.View())
}

// proofView is a proof, in JSON.
type proofView struct {
	Place   int64      `json:"place"`
	Record  draw.Hex   `json:"record"`
	Leaf    draw.Hex   `json:"leaf"`
	Path    []draw.Hex `json:"path"`
	Entries int64      `json:"entries"`
	Root    draw.Hex   `json:"root"`
	Item    string     `json:"item,omitempty"`
	Rank    *int64     `json:"rank,omitempty"`
	// Outcome is waiting until the rank has had its turn.
	Outcome string      `json:"outcome"`
	Reason  draw.Reason `json:"reason,omitempty"`
	OrderID uuid.UUID   `json:"order_id,omitzero"`
}

// prove serves GET /v1/sales/{sale}/draw/proof. It holds the receipt against the list, not against the secret that has
// signed it: that may have been replaced since, and whoever knows the body of a receipt has the receipt. But who can
// have made it up waits in another line.
func (s *drawService) prove(c echo.Context) error {
	text := ""
	err := readQuery(c, map[string]func(string) error{"receipt": func(given string) error { text = given; return nil }})
	if err != nil {
		return err
	}
	receipt, err := order.ParseReceipt(text)
	if err != nil {
		return problemEntryReceipt
	}
	record, err := draw.NewRecord(receipt)
	if err != nil {
		return problemEntryReceipt
	}
	d, err := s.frozen(c)
	switch {
	case err != nil:
		return err
	case receipt.SaleID != d.EntriesID:
		return problemEntryNotFound
	}
	in := s.strangers
	if signer := s.receipts.signer.Load(); signer != nil {
		if _, err := signer.Verify(text); err == nil {
			in = s.entrants
		}
	}
	var p draws.Proof
	err = s.inLine(c, in, func(ctx context.Context) (err error) {
		p, err = s.config.Draws.Proof(ctx, d.SaleID, receipt)
		return err
	})
	switch {
	case err != nil:
		return err
	case p.Record != record:
		return problemEntryReceipt
	}
	leaf := record.Leaf()
	v := proofView{
		Place: p.Place, Record: record[:], Leaf: leaf[:], Path: []draw.Hex{}, Entries: p.Entries, Root: p.Root, Item: p.Item,
		Rank: p.Rank, Outcome: "waiting", Reason: p.Reason, OrderID: p.OrderID,
	}
	if p.Outcome != "" {
		v.Outcome = string(p.Outcome)
	}
	for _, hash := range p.Path {
		v.Path = append(v.Path, hash[:])
	}
	return writeJSON(c, http.StatusOK, v)
}
