package ingress

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/draw"
	"stampede/ledger/draws"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

const (
	// defaultFreeze is the freeze of a draw that names none, in seconds.
	defaultFreeze = 60
	// readTurns and seedTurns are the turns of the two lines: together less than the connections of those who look at
	// orders, which they use. At most inLineMax calls wait in a line, for lineTimeout.
	readTurns   = 2
	seedTurns   = 1
	inLineMax   = 500
	lineTimeout = catalogTimeout
	// downloadsMax bounds the files at a time, and addressDownloads those of an address where streams are bounded.
	downloadsMax     = 8
	addressDownloads = 2
	// downloadRate is how many bytes a second a client has to read of a file from downloadGrace on, or is cut off.
	downloadRate  = 256 << 10
	downloadGrace = 30 * time.Second
)

var (
	problemDrawNotFound = fixed(problem{
		Kind: problems.DrawNotFound, detail: "The units of this sale are not drawn, or there is no such sale.",
	})
	problemDrawNotFrozen = fixed(problem{
		Kind:   problems.DrawNotFrozen,
		detail: "The list of the entries is not frozen yet. GET /v1/sales/{sale}/draw says how far the draw is.",
	})
	problemDrawVoid = fixed(problem{
		Kind: problems.DrawVoid, detail: "The draw is void: void_reason of GET /v1/sales/{sale}/draw says why.",
	})
	problemSeedOfParties = fixed(problem{
		Kind:   problems.InvalidBeacon,
		detail: "The seed of this draw is that of its parties, which reveal their secrets at POST …/draw/reveal.",
	})
	problemSeedOfRound = invalid("The seed of this draw is that of a round of drand: POST …/draw/beacon.")
	problemBeacon      = fixed(problem{
		Kind:   problems.InvalidBeacon,
		detail: "signature is not that of the round: want the 48 bytes of drand quicknet, in hexadecimal.",
	})
	problemEntryNotFound = fixed(problem{
		Kind:   problems.EntryNotFound,
		detail: "The order of the receipt is not in the list of the entries: it is of another sale, or was cancelled before.",
	})
	problemEntryReceipt = invalid(`receipt must be the complete "receipt" from the answer to the entry.`)
)

// publicForever are the headers of a list. They must not be changed.
var publicForever = http.Header{"Cache-Control": {"public, max-age=31536000, immutable"}}

// line runs a few calls at a time that cost more than a look. The others wait. They hold no slot of inFlight, so that a
// crowd of them keeps no one else out.
type line struct {
	callers slots
	turns   chan struct{}
}

func newLine(turns int) *line {
	return &line{slots{limit: int64(turns + inLineMax)}, make(chan struct{}, turns)}
}

func (l *line) run(ctx context.Context, do func() error) error {
	return l.callers.hold(func() error {
		limited, cancel := context.WithTimeout(ctx, lineTimeout)
		defer cancel()
		select {
		case l.turns <- struct{}{}:
			defer func() { <-l.turns }()
			return do()
		case <-limited.Done():
			return problemOverloaded
		}
	})
}

// drawService serves the calls on draws.
type drawService struct {
	*core
	sales *saleService
	feed  *feed
	// A proof hashes a part of the list, and a file may be long. Those who give the seed do not wait for them.
	reads, seeds *line
}

func newDrawService(operate *operatorService, reads *line) *drawService {
	s := &drawService{core: operate.core, sales: operate.sales, reads: reads, seeds: newLine(seedTurns)}
	s.feed = startFeed(s.background, firstBatch, salesMax, s.findDraws)
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
		terms.Freeze = boundedSeconds(*body.FreezeSeconds)
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

func (s *drawService) findDraws(ctx context.Context, sales []uuid.UUID) (map[uuid.UUID]found, error) {
	all := make(map[uuid.UUID]found, len(sales))
	for _, goods := range sales {
		d, err := s.config.Draws.FindDraw(ctx, goods)
		switch {
		case errors.Is(err, draws.ErrNoDraw):
			all[goods] = found{}
		case err != nil:
			return nil, err
		default:
			all[goods] = found{draw: &d}
		}
	}
	return all, nil
}

// ask has do read or change the draw in the path of the request, in line. Its error is a problem if Postgres has
// answered.
func (s *drawService) ask(c echo.Context, in *line, do func(ctx context.Context, goods uuid.UUID) error) error {
	goods, ok := parseID(c.Param("sale"))
	if !ok {
		return problemDrawNotFound
	}
	var refused *problem
	err := in.run(c.Request().Context(), func() error {
		return s.orders.query(c.Request().Context(), catalogTimeout, func(ctx context.Context) error {
			err := do(ctx, goods)
			if refused = problemForDraw(err); refused != nil {
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

// problemForDraw returns the problem of an error that a client can act on, or nil.
func problemForDraw(err error) *problem {
	var (
		known *problem
		round *draws.WrongRoundError
	)
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &round):
		return &problem{Kind: problems.InvalidBeacon, detail: round.Error() + "."}
	case errors.Is(err, draw.ErrBeacon):
		return problemBeacon
	case errors.Is(err, draws.ErrNoDraw):
		return problemDrawNotFound
	case errors.Is(err, draws.ErrNotFrozen):
		return problemDrawNotFrozen
	case errors.Is(err, draws.ErrVoid):
		return problemDrawVoid
	case errors.Is(err, draws.ErrNoEntry):
		return problemEntryNotFound
	case errors.Is(err, draws.ErrNoParty):
		return invalid("party must be the name of a party of the draw.")
	case errors.Is(err, draw.ErrParties):
		return invalid("secret must be the 32 bytes whose SHA-256 the party committed to, in hexadecimal.")
	}
	return nil
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
	return s.answerChange(c, func(ctx context.Context, goods uuid.UUID) (d draws.Draw, err error) {
		if d, err = s.config.Draws.Beacon(ctx, goods, body.Round, signature); errors.Is(err, draws.ErrOtherSeed) {
			err = problemSeedOfParties
		}
		return d, err
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
		return problemForDraw(draw.ErrParties)
	}
	return s.answerChange(c, func(ctx context.Context, goods uuid.UUID) (d draws.Draw, err error) {
		if d, err = s.config.Draws.Reveal(ctx, goods, body.Party, secret); errors.Is(err, draws.ErrOtherSeed) {
			err = problemSeedOfRound
		}
		return d, err
	})
}

// answerChange changes the draw in the path of the request, and answers with it.
func (s *drawService) answerChange(c echo.Context, change func(context.Context, uuid.UUID) (draws.Draw, error)) error {
	var now draws.Draw
	err := s.ask(c, s.seeds, func(ctx context.Context, goods uuid.UUID) (err error) {
		now, err = change(ctx, goods)
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
// signed it: that may have been replaced since, and whoever knows the body of a receipt has the receipt.
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
	var p draws.Proof
	err = s.ask(c, s.reads, func(ctx context.Context, goods uuid.UUID) (err error) {
		p, err = s.config.Draws.Proof(ctx, goods, receipt)
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

// download wraps a handler that sends a file.
func (s *drawService) download(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		release, err := s.limits.openStream(&s.limits.downloads, c.Request(), "")
		if err != nil {
			return err
		}
		defer release()
		return h(c)
	}
}

// bundle serves GET /v1/sales/{sale}/draw/bundle.
func (s *drawService) bundle(c echo.Context) error {
	var body []byte
	err := s.ask(c, s.reads, func(ctx context.Context, goods uuid.UUID) error {
		b, err := s.config.Draws.Bundle(ctx, goods)
		if err == nil {
			body, err = marshalLine(b)
		}
		return err
	})
	if err != nil {
		return err
	}
	h := c.Response().Header()
	h["Content-Type"], h["Content-Length"] = jsonContent, []string{strconv.Itoa(len(body))}
	_, _ = newFileWriter(c).Write(body) // an error means that the client has left
	return nil
}

// leaves serves GET /v1/sales/{sale}/draw/leaves.
func (s *drawService) leaves(c echo.Context) error {
	var list *draws.FrozenList
	err := s.ask(c, s.reads, func(_ context.Context, goods uuid.UUID) (err error) {
		list, err = s.config.Draws.FrozenList(c.Request().Context(), goods) // it is read after the query
		return err
	})
	if err != nil {
		return err
	}
	// It never changes, and may be long: caches keep it, by its root, and a download that broke off goes on.
	etag := `"` + base64.RawURLEncoding.EncodeToString(list.Root) + `"`
	if isKnown, err := checkTag(c, publicForever, etag); err != nil || isKnown {
		return err
	}
	c.Response().Header()["Content-Type"] = []string{"application/octet-stream"}
	// An answer that breaks off is shorter than its Content-Length, and ends the connection.
	http.ServeContent(newFileWriter(c), c.Request(), "", time.Time{}, list)
	return nil
}

// fileWriter sends a file to a client that reads downloadRate.
type fileWriter struct {
	http.ResponseWriter
	began   time.Time
	written int64
}

func newFileWriter(c echo.Context) *fileWriter {
	return &fileWriter{ResponseWriter: c.Response(), began: time.Now()}
}

func (w *fileWriter) Write(part []byte) (int, error) {
	w.written += int64(len(part))
	due := w.began.Add(downloadGrace + time.Duration(w.written)*time.Second/downloadRate)
	// Replaces the server's accept.WriteTimeout. It fails if the connection has no deadlines.
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(due)
	return w.ResponseWriter.Write(part)
}
