package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"

	"stampede/internal/figure"
	"stampede/ledger/deadletter"
	"stampede/reservation/order"
	"stampede/sql"
)

type dlqCmd struct {
	List    dlqListCmd    `cmd:"" help:"List the dead letters, newest first."`
	Show    dlqShowCmd    `cmd:"" help:"Show a dead letter with all fields of its stream entry."`
	Replay  dlqReplayCmd  `cmd:"" help:"Append the entry to its stream again, for a worker that can process it by now. A second replay does nothing until a worker has parked the letter again."`
	Discard dlqDiscardCmd `cmd:"" help:"Discard a dead letter. Its order, if it names one, is rejected and the units go back to the sale. If it names no user, stampede reconcile records the order from its reservation."`
}

// dlqFlags are what every command on dead letters needs.
type dlqFlags struct {
	redisFlag
	databaseFlag
	keysFlags
}

func (f *dlqFlags) with(ctx context.Context, logger *slog.Logger, do func(*deadletter.Store) error) error {
	b, err := openControl(ctx, f.RedisURL, f.DatabaseURL, f.keysFlags, 2, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if err := sql.Check(ctx, b.pool); err != nil {
		return err
	}
	return do(deadletter.NewStore(b.pool, b.redis, b.store))
}

// letterArg names the dead letter that a command is about.
type letterArg struct {
	ID int64 `arg:"" help:"Id of the dead letter."`
}

type dlqListCmd struct {
	look
	dlqFlags
	outputFlag
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
		if c.json() {
			return writeLettersJSON(s.out, letters)
		}
		t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintln(t, "ID\tSTATUS\tPARKED\tDELIVERIES\tREPLAYS\tSTREAM\tENTRY\tORDER\tREASON") // Flush returns the error
		for _, l := range letters {
			_, _ = fmt.Fprintf(t, "%d\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\n", l.ID, l.Status, orDash(l.CreatedAt),
				l.Entry.Deliveries, l.Replays, printable(l.Entry.Stream), printable(l.Entry.ID), orderOf(l), printable(l.Reason))
		}
		return t.Flush()
	})
}

type dlqShowCmd struct {
	look
	dlqFlags
	outputFlag
	letterArg
}

func (c *dlqShowCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	return c.with(ctx, logger, func(d *deadletter.Store) error {
		l, err := d.Get(ctx, c.ID)
		if err != nil {
			return err
		}
		if c.json() {
			return writeLettersJSON(s.out, []deadletter.Letter{l})
		}
		t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
		for _, row := range [][2]string{
			{"id", fmt.Sprint(l.ID)},
			{"status", string(l.Status)},
			{"reason", printable(l.Reason)},
			{"damage", printable(l.Damage)},
			{"resolution", printable(l.Resolution)},
			{"operator", orNobody(l.Operator)},
			{"parked", orDash(l.CreatedAt)},
			{"changed", orDash(l.UpdatedAt)},
			{"deliveries", fmt.Sprint(l.Entry.Deliveries)},
			{"replays", fmt.Sprint(l.Replays)},
			{"replayed as", printable(l.ReplayedAs)},
			{"stream", printable(l.Entry.Stream)},
			{"entry", printable(l.Entry.ID)},
			{"order", orderOf(l)},
		} {
			_, _ = fmt.Fprintf(t, "%s\t%s\n", row[0], row[1])
		}
		for _, f := range l.Entry.Fields {
			_, _ = fmt.Fprintf(t, "field %s\t%s\n", printable(f.Name), printable(f.Value))
		}
		return t.Flush()
	})
}

type dlqReplayCmd struct {
	dlqFlags
	outputFlag
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
		return c.print(s.out, replayed{c.ID, entry, appended}, became, c.ID, entry)
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
	outputFlag
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
		if c.json() {
			return writeLettersJSON(s.out, []deadletter.Letter{l})
		}
		_, err = fmt.Fprintf(s.out, "dead letter %d is discarded: %s\n", c.ID, printable(l.Resolution))
		return err
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

// orderOf is the order of a letter, or "-" for a whole entry.
func orderOf(l deadletter.Letter) string {
	if l.OrderID == uuid.Nil {
		return "-"
	}
	return l.OrderID.String()
}

// writeLettersJSON writes one object per line. Bytes that are not UTF-8 are quoted by printable.
func writeLettersJSON(w io.Writer, letters []deadletter.Letter) error {
	type field struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	for _, l := range letters {
		fields := make([]field, 0, len(l.Entry.Fields))
		for _, f := range l.Entry.Fields {
			fields = append(fields, field{printable(f.Name), printable(f.Value)})
		}
		var orderID *uuid.UUID
		if l.OrderID != uuid.Nil {
			orderID = &l.OrderID
		}
		err := writeJSON(w, struct {
			ID         int64             `json:"id"`
			Status     deadletter.Status `json:"status"`
			Reason     string            `json:"reason"`
			Damage     string            `json:"damage,omitempty"`
			Resolution string            `json:"resolution,omitempty"`
			Operator   string            `json:"operator,omitempty"`
			Stream     string            `json:"stream"`
			EntryID    string            `json:"entry_id"`
			OrderID    *uuid.UUID        `json:"order_id,omitempty"`
			Deliveries int64             `json:"deliveries"`
			Replays    int               `json:"replays"`
			ReplayedAs string            `json:"replayed_as,omitempty"`
			Fields     []field           `json:"fields"`
			CreatedAt  time.Time         `json:"created_at"`
			UpdatedAt  time.Time         `json:"updated_at"`
		}{
			l.ID, l.Status, l.Reason, l.Damage, l.Resolution, l.Operator, l.Entry.Stream, l.Entry.ID, orderID,
			l.Entry.Deliveries, l.Replays, l.ReplayedAs, fields, l.CreatedAt.UTC(), l.UpdatedAt.UTC(),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// printable makes what others wrote safe for a terminal: it may have any bytes.
func printable(text string) string { return figure.Printable(text) }
