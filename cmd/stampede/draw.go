package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"stampede/draw"
	"stampede/internal/apiclient"
	"stampede/internal/format"
	"stampede/ledger/draws"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

type drawCmd struct {
	Create  drawCreateCmd  `cmd:"" help:"Draw the units of a sale: from now on they are offered by rank to those who enter another sale. A repeat changes nothing."`
	Status  drawStatusCmd  `cmd:"" help:"Show how far a draw is, and save its public files. Exit status 1 if there is no draw."`
	Beacon  drawBeaconCmd  `cmd:"" help:"Give a draw the round of drand that makes its seed. Without --round it is read as drand answers it, in JSON."`
	Open    drawOpenCmd    `cmd:"" help:"Sell the units that a draw leaves to everybody, once each rank had its turn. A repeat changes nothing."`
	Reveal  drawRevealCmd  `cmd:"" help:"Give a draw the secret of one of the parties that make its seed."`
	Restore drawRestoreCmd `cmd:"" help:"After a restore of Postgres from a time before the freeze: take the list, the time and the round that were published, from what a receiver of the relay kept. Before workers run again."`
	Verify  drawVerifyCmd  `cmd:"" help:"Verify a draw from its two public files, without any server: the root of the list, the seed, the ranks, the units and every skip. Exit status 1 if a promise is broken, 3 if a file cannot be read, there is no seed, or units wait to be offered; 0 says that all else was kept but what is listed as taken on trust."`
}

// drawStore is where draws are: the databases, or an ingress in front of them.
type drawStore interface {
	CreateDraw(ctx context.Context, goods uuid.UUID, t catalog.DrawTerms) (draw.View, error)
	OpenDraw(ctx context.Context, goods uuid.UUID) (draw.View, error)
	Draw(ctx context.Context, goods uuid.UUID) (draw.View, error)
	Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (draw.View, error)
	Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (draw.View, error)
	Bundle(ctx context.Context, goods uuid.UUID, w io.Writer) error
	Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error
}

// storedDraws are the draws in the databases.
type storedDraws struct {
	catalog *catalog.Catalog
	draws   *draws.Store
}

func (s storedDraws) CreateDraw(ctx context.Context, goods uuid.UUID, t catalog.DrawTerms) (draw.View, error) {
	if _, err := s.catalog.CreateDraw(ctx, goods, t); err != nil {
		return draw.View{}, err
	}
	return s.Draw(ctx, goods)
}

func (s storedDraws) OpenDraw(ctx context.Context, goods uuid.UUID) (draw.View, error) {
	if err := s.catalog.OpenDraw(ctx, goods); err != nil {
		return draw.View{}, err
	}
	return s.Draw(ctx, goods)
}

func (s storedDraws) Draw(ctx context.Context, goods uuid.UUID) (draw.View, error) {
	d, err := s.draws.FindDraw(ctx, goods)
	return d.View(), err
}

func (s storedDraws) Beacon(ctx context.Context, goods uuid.UUID, round int64, signature []byte) (draw.View, error) {
	d, err := s.draws.Beacon(ctx, goods, round, signature)
	return d.View(), err
}

func (s storedDraws) Reveal(ctx context.Context, goods uuid.UUID, party string, secret []byte) (draw.View, error) {
	d, err := s.draws.Reveal(ctx, goods, party, secret)
	return d.View(), err
}

func (s storedDraws) Bundle(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	b, err := s.draws.Bundle(ctx, goods)
	if err != nil {
		return err
	}
	return writeJSON(w, b)
}

func (s storedDraws) Leaves(ctx context.Context, goods uuid.UUID, w io.Writer) error {
	return s.draws.Leaves(ctx, goods, w)
}

// drawFlags are what every command on a draw needs that is on a server.
type drawFlags struct {
	catalogFlags
	saleArg
}

// with opens the draws, and prints the one that do returns.
func (f *drawFlags) with(
	ctx context.Context, s *streams, logger *slog.Logger, do func(drawStore) (draw.View, error),
) error {
	var v draw.View
	show := func(on drawStore) (err error) {
		v, err = do(on)
		return err
	}
	err := f.reach(ctx, logger, func(c *apiclient.Client) error { return show(c) },
		func(b *backend) error { return show(storedDraws{b.catalog, draws.New(b.pool)}) })
	if err != nil {
		return err
	}
	return f.write(s.out, v, func(w io.Writer) error { return writeDraw(w, v) })
}

// writeDraw shows what is known of a draw.
func writeDraw(w io.Writer, v draw.View) error {
	t := newTable(w)
	row := func(name, text string) {
		if text != "" {
			t.row(name, printable(text))
		}
	}
	number := func(n int64) string {
		if n == 0 {
			return ""
		}
		return strconv.FormatInt(n, 10)
	}
	row("sale", v.SaleID.String())
	row("entries sale", v.EntriesSaleID.String())
	row("state", v.State)
	row("created", v.CreatedAt)
	row("entries close", v.ClosesAt)
	row("freeze", (time.Duration(v.FreezeSeconds) * time.Second).String())
	row("round", number(v.Round))
	row("round known", v.RoundAt)
	for _, p := range v.Parties {
		secret := "not revealed"
		if len(p.Secret) > 0 {
			secret = fmt.Sprintf("revealed %x", []byte(p.Secret))
		}
		row("party "+printable(p.Name), fmt.Sprintf("committed to %x, %s", []byte(p.Commitment), secret))
	}
	row("reveal by", v.RevealBy)
	if v.Entries != nil {
		row("entries", strconv.FormatInt(*v.Entries, 10))
	}
	row("root", hex.EncodeToString(v.Root))
	row("frozen", v.FrozenAt)
	row("seed", hex.EncodeToString(v.Seed))
	row("seeded", v.SeededAt)
	row("ranked", v.RankedAt)
	row("offered", strconv.FormatInt(v.Offered, 10))
	row("skipped", strconv.FormatInt(v.Skipped, 10))
	if v.LastRank != nil {
		row("last rank", strconv.FormatInt(*v.LastRank, 10))
	}
	if v.Opening && v.State != string(draws.Open) {
		row("what is left", "for everybody when each rank had its turn")
	}
	row("void", v.VoidReason)
	return t.Flush()
}

type drawCreateCmd struct {
	drawFlags
	operatorFlag
	Entries uuid.UUID     `required:"" env:"STAMPEDE_DRAW_ENTRIES" placeholder:"ID" help:"The sale in which people enter: with an end, one unit an order, and neither a price nor a payment window."`
	Freeze  time.Duration `default:"60s" env:"STAMPEDE_DRAW_FREEZE" placeholder:"DURATION" help:"From the end of the entries to the round of drand that makes the seed, in whole seconds: the list is frozen in this time (${default})."`
	Party   []drawParty   `sep:"none" env:"STAMPEDE_DRAW_PARTY" placeholder:"NAME:SHA256" help:"One of those who make the seed together, in place of drand: the name, and the SHA-256 of the secret in hexadecimal. Repeat it for each."`
}

func (c *drawCreateCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	terms := catalog.DrawTerms{Entries: c.Entries, Freeze: c.Freeze}
	for _, p := range c.Party {
		terms.Parties = append(terms.Parties, catalog.Party(p))
	}
	ctx = catalog.WithOperator(ctx, name)
	return c.with(ctx, s, logger, func(on drawStore) (draw.View, error) { return on.CreateDraw(ctx, c.Sale, terms) })
}

// drawParty is a party on the command line.
type drawParty catalog.Party

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *drawParty) UnmarshalText(text []byte) error {
	end := bytes.LastIndexByte(text, ':')
	if end < 0 {
		return fmt.Errorf("%q is not NAME:SHA256", text)
	}
	p.Name, p.Commitment = string(text[:end]), string(text[end+1:])
	return nil
}

type drawOpenCmd struct {
	drawFlags
	operatorFlag
	yesFlag
}

func (c *drawOpenCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	if err := c.askable(s); err != nil {
		return err
	}
	ctx = catalog.WithOperator(ctx, name)
	return c.with(ctx, s, logger, func(on drawStore) (draw.View, error) {
		err := c.confirm(ctx, s, func() (string, error) {
			v, err := on.Draw(ctx, c.Sale)
			of := "the entries are not known yet"
			if v.Entries != nil {
				of = fmt.Sprintf("%s of %s had theirs", format.Count(v.Offered+v.Skipped), format.Count(*v.Entries))
			}
			return "Everybody can buy what the draw leaves when each rank had its turn: " + of + ".", err
		})
		if err != nil {
			return draw.View{}, err
		}
		return on.OpenDraw(ctx, c.Sale)
	})
}

type drawStatusCmd struct {
	readOnly
	drawFlags
	Bundle string `env:"STAMPEDE_DRAW_BUNDLE" placeholder:"FILE" help:"Save the bundle of the draw here, for draw verify."`
	Leaves string `env:"STAMPEDE_DRAW_LEAVES" placeholder:"FILE" help:"Save the list of its entries here, for draw verify."`
}

func (c *drawStatusCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.with(ctx, s, logger, func(on drawStore) (draw.View, error) {
		save := func(name string, download func(context.Context, uuid.UUID, io.Writer) error) error {
			if name == "" {
				return nil
			}
			return writeWhole(name, nil, func(w io.Writer) error { return download(ctx, c.Sale, w) })
		}
		v, err := on.Draw(ctx, c.Sale)
		if err == nil {
			err = cmp.Or(save(c.Bundle, on.Bundle), save(c.Leaves, on.Leaves))
		}
		return v, err
	})
}

type drawBeaconCmd struct {
	drawFlags
	Round     int64  `env:"STAMPEDE_DRAW_ROUND" placeholder:"N" help:"The round of drand quicknet: the one that draw status shows."`
	Signature string `env:"STAMPEDE_DRAW_SIGNATURE" placeholder:"HEX" help:"Its signature."`
	File      string `default:"-" env:"STAMPEDE_DRAW_FILE" placeholder:"FILE" help:"Where the answer of drand is if there is no --round; - for standard input (${default})."`
}

func (c *drawBeaconCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	answer := struct {
		Round     int64  `json:"round"`
		Signature string `json:"signature"`
	}{c.Round, c.Signature}
	if (c.Round == 0) != (c.Signature == "") {
		return usagef("--round and --signature go together")
	}
	if c.Round == 0 {
		text, err := readSmall(s, c.File)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, &answer); err != nil || answer.Round == 0 {
			return usagef("--file: want what drand answers, such as {\"round\":657413,\"signature\":\"b713…\"}")
		}
	}
	signature, err := hex.DecodeString(answer.Signature)
	if err != nil {
		return usagef("the signature is not hexadecimal: %w", err)
	}
	return c.with(ctx, s, logger, func(on drawStore) (draw.View, error) {
		return on.Beacon(ctx, c.Sale, answer.Round, signature)
	})
}

// readSmall reads a file of at most 64 KiB; - is standard input.
func readSmall(s *streams, name string) ([]byte, error) { return readAtMost(s, name, 1<<16) }

// witnessMax is how long a file of a witness can be.
const witnessMax = 16 << 20

func readAtMost(s *streams, name string, bytes int64) ([]byte, error) {
	from := s.in
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = file.Close() }() // it was only read
		from = file
	}
	text, err := io.ReadAll(io.LimitReader(from, bytes+1))
	if err == nil && int64(len(text)) > bytes {
		err = fmt.Errorf("%s is longer than %d bytes", name, bytes)
	}
	return text, err
}

type drawRevealCmd struct {
	drawFlags
	Party  string `required:"" env:"STAMPEDE_DRAW_PARTY" placeholder:"NAME" help:"The name of the party."`
	Secret string `required:"" env:"STAMPEDE_DRAW_SECRET" placeholder:"HEX" help:"Its secret, 32 bytes in hexadecimal; - for standard input, where other users of this machine do not see it."`
}

func (c *drawRevealCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	text := c.Secret
	if text == "-" {
		read, err := readSmall(s, "-")
		if err != nil {
			return err
		}
		text = strings.TrimSpace(string(read))
	}
	secret, err := hex.DecodeString(text)
	if err != nil {
		return usagef("--secret: it is not hexadecimal") // without the secret
	}
	return c.with(ctx, s, logger, func(on drawStore) (draw.View, error) {
		// A secret that comes too early is refused, but those who run the server have seen it.
		if v, err := on.Draw(ctx, c.Sale); err != nil || v.FrozenAt == "" && v.VoidReason == "" {
			return v, cmp.Or(err, fmt.Errorf("%w: the secret was not sent, reveal it when the root is public", draws.ErrNotFrozen))
		}
		return on.Reveal(ctx, c.Sale, c.Party, secret)
	})
}

type drawRestoreCmd struct {
	storesFlags
	outputFlag
	operatorFlag
	saleArg
	Frozen string `required:"" env:"STAMPEDE_DRAW_FROZEN" placeholder:"FILE" help:"The event stampede.draw.frozen as the relay sent it, or what the server answered for the draw before its seed; - for standard input."`
}

func (c *drawRestoreCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	text, err := readAtMost(s, c.Frozen, witnessMax)
	if err != nil {
		return err
	}
	kept, err := draw.ParseWitness(text)
	if err != nil {
		return fmt.Errorf("--frozen: %w", err)
	}
	return c.with(ctx, 3, logger, func(b *backend) error {
		d, err := draws.New(b.pool).Restore(ctx, c.Sale, kept.Frozen[0], name)
		if err != nil {
			return err
		}
		v := d.View()
		return c.write(s.out, v, func(w io.Writer) error { return writeDraw(w, v) })
	})
}

type drawVerifyCmd struct {
	outputFlag
	Bundle  string `required:"" env:"STAMPEDE_DRAW_BUNDLE" placeholder:"FILE" help:"The bundle of the draw, in JSON."`
	Leaves  string `required:"" env:"STAMPEDE_DRAW_LEAVES" placeholder:"FILE" help:"The list of its entries, one record of 33 bytes for each."`
	Frozen  string `env:"STAMPEDE_DRAW_FROZEN" placeholder:"FILE" help:"What somebody got of the draw before its seed existed, to compare: the event stampede.draw.frozen as the relay sent it, or what the server then answered for the draw; after it, as many later events of the draw and its stock as were kept. Without it the bundle's own root, times, parties and units are believed."`
	Receipt string `env:"STAMPEDE_DRAW_RECEIPT" placeholder:"TEXT" help:"Receipt of an entry, whose place and rank are shown; - for standard input, where other users of this machine do not see it."`
}

func (c *drawVerifyCmd) Run(ctx context.Context, s *streams) error {
	own, err := c.receipt(s)
	if err != nil {
		return err
	}
	ctx, stop := s.watch(ctx, "verifying the draw")
	defer stop()
	report, err := c.verify(ctx, s, own)
	if err != nil {
		return unchecked(fmt.Errorf("the draw was not checked: %w", err))
	}
	err = c.write(s.out, report, func(w io.Writer) error {
		t := newTable(w)
		for _, check := range report {
			name := string(check.Verdict)
			if check.Verdict == draw.Trusted {
				name = "taken on trust"
			} else if check.Verdict != draw.Kept {
				name = strings.ToUpper(name)
			}
			t.row(check.Name, name, printable(check.Text))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		_, err := fmt.Fprintln(w, report.Summary())
		return err
	})
	return verdict(err, report.Has(draw.Broken), report.Has(draw.Unknown))
}

func (c *drawVerifyCmd) verify(ctx context.Context, s *streams, own *order.Receipt) (draw.Report, error) {
	file, err := os.Open(c.Bundle)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	bundle, err := draw.ReadBundle(file)
	if err != nil {
		return nil, err
	}
	leaves, err := os.Open(c.Leaves)
	if err != nil {
		return nil, err
	}
	defer func() { _ = leaves.Close() }()
	info, err := leaves.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil, cmp.Or(err, fmt.Errorf("%s is not a regular file", c.Leaves))
	}
	var kept *draw.Witness
	if c.Frozen != "" {
		text, err := readAtMost(s, c.Frozen, witnessMax)
		if err == nil {
			kept, err = draw.ParseWitness(text)
		}
		if err != nil {
			return nil, err
		}
	}
	report, err := draw.Verify(ctx, bundle, leaves, info.Size(), own)
	return append(report, bundle.Compare(kept)...), err
}

// receipt returns the receipt, or nil if there is none.
func (c *drawVerifyCmd) receipt(s *streams) (*order.Receipt, error) {
	text := c.Receipt
	if text == "-" {
		read, err := readSmall(s, "-")
		if err != nil {
			return nil, unchecked(err)
		}
		text = strings.TrimSpace(string(read))
	}
	if text == "" && c.Receipt == "" {
		return nil, nil
	}
	own, err := order.ParseReceipt(text)
	if err != nil {
		return nil, usagef("--receipt: %w", err)
	}
	return &own, nil
}
