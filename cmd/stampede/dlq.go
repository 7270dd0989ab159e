package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/ledger/deadletter"
	"stampede/reservation/order"
)

type dlqCmd struct {
	List    dlqListCmd    `cmd:"" help:"List the dead letters, newest first."`
	Show    dlqShowCmd    `cmd:"" help:"Show a dead letter with all fields of its stream entry."`
	Replay  dlqReplayCmd  `cmd:"" help:"Append the entry to its stream again, for a worker that can process it by now. A second replay does nothing until a worker has parked the letter again."`
	Discard dlqDiscardCmd `cmd:"" help:"Discard a dead letter. Its order, if it names one, is rejected and the units go back to the sale. If it names no user, stampede reconcile records the order from its reservation."`
}

// dlqFlags are what every command on dead letters needs.
type dlqFlags struct {
	storesFlags
	outputFlag
}

func (f *dlqFlags) with(ctx context.Context, logger *slog.Logger, do func(*deadletter.Store) error) error {
	return f.storesFlags.with(ctx, 2, logger, func(b *backend) error {
		return do(deadletter.NewStore(b.pool, b.redis, b.store))
	})
}

func (f *dlqFlags) print(
	w io.Writer, letters []deadletter.Letter, text func(io.Writer, []deadletter.Letter) error,
) error {
	return writeAll(f.outputFlag, w, letters, letterJSON, text)
}

// letterArg names the dead letter that a command is about.
type letterArg struct {
	ID int64 `arg:"" help:"Id of the dead letter."`
}

type dlqListCmd struct {
	readOnly
	dlqFlags
	Status string `default:"parked" enum:"parked,replayed,discarded,all" env:"STAMPEDE_DLQ_STATUS" placeholder:"STATUS" help:"Status of the letters to list: parked, replayed, discarded or all (${default})."`
	Limit  int    `default:"50" env:"STAMPEDE_DLQ_LIMIT" placeholder:"N" help:"Most letters to list (${default})."`
}

func (c *dlqListCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--limit", c.Limit, 1); err != nil {
		return err
	}
	status := deadletter.Status(c.Status)
	if c.Status == "all" {
		status = ""
	}
	return c.with(ctx, logger, func(d *deadletter.Store) error {
		letters, err := d.List(ctx, status, c.Limit)
		if err != nil {
			return err
		}
		return c.print(s.out, letters, writeLetters)
	})
}

func writeLetters(w io.Writer, letters []deadletter.Letter) error {
	t := newTable(w, "ID", "STATUS", "PARKED", "DELIVERIES", "REPLAYS", "STREAM", "ENTRY", "ORDER", "REASON")
	for _, l := range letters {
		t.row(l.ID, l.Status, second(l.CreatedAt), l.Entry.Deliveries, l.Replays, printable(l.Entry.Stream),
			printable(l.Entry.ID), idOrDash(l.OrderID), printable(l.Reason))
	}
	return t.Flush()
}

type dlqShowCmd struct {
	readOnly
	dlqFlags
	letterArg
}

func (c *dlqShowCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.with(ctx, logger, func(d *deadletter.Store) error {
		l, err := d.Get(ctx, c.ID)
		if err != nil {
			return err
		}
		return c.print(s.out, []deadletter.Letter{l}, writeLetter)
	})
}

// writeLetter writes a letter with its fields.
func writeLetter(w io.Writer, one []deadletter.Letter) error {
	l := one[0]
	t := newTable(w)
	t.row("id", l.ID)
	t.row("status", l.Status)
	t.row("reason", printable(l.Reason))
	t.row("damage", printable(l.Damage))
	t.row("resolution", printable(l.Resolution))
	t.row("operator", orDash(l.Operator))
	t.row("parked", second(l.CreatedAt))
	t.row("changed", second(l.UpdatedAt))
	t.row("deliveries", l.Entry.Deliveries)
	t.row("replays", l.Replays)
	t.row("replayed as", printable(l.ReplayedAs))
	t.row("stream", printable(l.Entry.Stream))
	t.row("entry", printable(l.Entry.ID))
	t.row("order", idOrDash(l.OrderID))
	for _, f := range l.Entry.Fields {
		t.row("field "+printable(f.Name), printable(f.Value))
	}
	return t.Flush()
}

type dlqReplayCmd struct {
	dlqFlags
	operatorFlag
	letterArg
}

func (c *dlqReplayCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	name, err := c.name()
	if err != nil {
		return err
	}
	return c.with(ctx, logger, func(d *deadletter.Store) error {
		entry, appended, err := d.Replay(ctx, c.ID, name)
		if err != nil {
			return err
		}
		became := "dead letter %d is in its stream again, as entry %s\n"
		if !appended {
			became = "dead letter %d was replayed before as entry %s and is not parked again: nothing was done\n"
		}
		return c.outputFlag.print(s.out, replayed{c.ID, entry, appended}, became, c.ID, entry)
	})
}

// replayed is the result of a replay as JSON.
type replayed struct {
	ID      int64  `json:"id"`
	EntryID string `json:"entry_id"`
	// Appended is false if it was replayed before and is not parked again.
	Appended bool `json:"appended"`
}

type dlqDiscardCmd struct {
	dlqFlags
	yesFlag
	operatorFlag
	letterArg
	Reason string `required:"" env:"STAMPEDE_DLQ_REASON" placeholder:"TEXT" help:"Why the letter is discarded; stored with it."`
}

// Validate is called by kong.
func (c *dlqDiscardCmd) Validate() error {
	if err := order.ValidateReason(c.Reason); err != nil {
		return usagef("--%v", err)
	}
	return nil
}

func (c *dlqDiscardCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	name, err := c.name()
	if err == nil {
		err = c.askable(s)
	}
	if err != nil {
		return err
	}
	return c.with(ctx, logger, func(d *deadletter.Store) error {
		if err := c.confirm(ctx, s, func() (string, error) { return c.question(ctx, d) }); err != nil {
			return err
		}
		if err := d.Discard(ctx, c.ID, c.Reason, name); err != nil {
			return err
		}
		l, err := d.Get(ctx, c.ID)
		if err != nil {
			return err
		}
		return c.print(s.out, []deadletter.Letter{l}, func(w io.Writer, _ []deadletter.Letter) error {
			_, err := fmt.Fprintf(w, "dead letter %d is discarded: %s\n", c.ID, printable(l.Resolution))
			return err
		})
	})
}

func (c *dlqDiscardCmd) question(ctx context.Context, d *deadletter.Store) (string, error) {
	l, err := d.Get(ctx, c.ID)
	if err != nil {
		return "", err
	}
	becomes := "It names no order."
	if l.OrderID != uuid.Nil {
		becomes = "Its order " + l.OrderID.String() + " is rejected, and the units go back to the sale."
	}
	return fmt.Sprintf("Dead letter %d (%s) is discarded. %s", l.ID, printable(l.Reason), becomes), nil
}

// letterView is a dead letter as JSON. Bytes that are not UTF-8 are quoted by printable.
type letterView struct {
	ID         int64             `json:"id"`
	Status     deadletter.Status `json:"status"`
	Reason     string            `json:"reason"`
	Damage     string            `json:"damage,omitempty"`
	Resolution string            `json:"resolution,omitempty"`
	Operator   string            `json:"operator,omitempty"`
	Stream     string            `json:"stream"`
	EntryID    string            `json:"entry_id"`
	OrderID    uuid.UUID         `json:"order_id,omitzero"`
	Deliveries int64             `json:"deliveries"`
	Replays    int               `json:"replays"`
	ReplayedAs string            `json:"replayed_as,omitempty"`
	Fields     []fieldView       `json:"fields"`
	CreatedAt  time.Time         `json:"created_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
}

type fieldView struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func letterJSON(l deadletter.Letter) letterView {
	fields := make([]fieldView, 0, len(l.Entry.Fields))
	for _, f := range l.Entry.Fields {
		fields = append(fields, fieldView{printable(f.Name), printable(f.Value)})
	}
	return letterView{
		l.ID, l.Status, l.Reason, l.Damage, l.Resolution, l.Operator, l.Entry.Stream, l.Entry.ID, l.OrderID,
		l.Entry.Deliveries, l.Replays, l.ReplayedAs, fields, l.CreatedAt.UTC(), l.UpdatedAt.UTC(),
	}
}
