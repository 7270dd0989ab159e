package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"stampede/draw"
	"stampede/reservation/order"
)

type drawCmd struct {
	Verify drawVerifyCmd `cmd:"" help:"Verify a draw from its two public files, without any server: the root of the list, the seed, the ranks and every skip. Exit status 1 if a promise is broken, 3 if a file cannot be read or there is no seed yet."`
}

type drawVerifyCmd struct {
	outputFlag
	Bundle  string `required:"" env:"STAMPEDE_DRAW_BUNDLE" placeholder:"FILE" help:"The bundle of the draw, in JSON."`
	Leaves  string `required:"" env:"STAMPEDE_DRAW_LEAVES" placeholder:"FILE" help:"The list of its entries, one record of 33 bytes for each."`
	Receipt string `env:"STAMPEDE_DRAW_RECEIPT" placeholder:"TEXT" help:"Receipt of an entry, whose place and rank are shown; - for standard input, where other users of this machine do not see it."`
}

func (c *drawVerifyCmd) Run(ctx context.Context, s *streams) error {
	own, err := c.receipt(s)
	if err != nil {
		return err
	}
	ctx, stop := s.watch(ctx, "verifying the draw")
	defer stop()
	report, err := c.verify(ctx, own)
	switch {
	case errors.Is(err, draw.ErrBundle):
		return fmt.Errorf("%s: %w", c.Bundle, err)
	case err != nil:
		return unchecked(fmt.Errorf("the draw was not checked: %w", err))
	}
	err = c.write(s.out, report, func(w io.Writer) error {
		t := newTable(w)
		for _, check := range report {
			name := string(check.Verdict)
			if check.Verdict != draw.Kept {
				name = strings.ToUpper(name)
			}
			t.row(check.Name, name, printable(check.Text))
		}
		return t.Flush()
	})
	return verdict(err, report.Has(draw.Broken), report.Has(draw.Unknown))
}

func (c *drawVerifyCmd) verify(ctx context.Context, own *order.Receipt) (draw.Report, error) {
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
	return draw.Verify(ctx, bundle, leaves, info.Size(), own)
}

// receipt returns the receipt, or nil if there is none.
func (c *drawVerifyCmd) receipt(s *streams) (*order.Receipt, error) {
	text := c.Receipt
	if text == "-" {
		const bytesMax = 1 << 16
		read, err := io.ReadAll(io.LimitReader(s.in, bytesMax))
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
