package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/internal/format"
	"stampede/upkeep/archive"
)

type saleArchiveCmd struct {
	noServerFlag
	storesFlags
	outputFlag
	Sale uuid.UUID     `arg:"" optional:"" help:"Id of the sale (default: all that can be archived)."`
	Dir  string        `required:"" env:"STAMPEDE_SALE_DIR" placeholder:"DIR" type:"existingdir" help:"Where the files are written, one for each sale."`
	Keep time.Duration `default:"2160h" env:"STAMPEDE_SALE_KEEP" placeholder:"DURATION" help:"How long ago the end of a sale and the last change of its orders must be (${default})."`
}

// Validate is called by kong.
func (c *saleArchiveCmd) Validate() error {
	return cmp.Or(c.keysFlags.Validate(), c.validate("it moves orders from Postgres into files on this machine"))
}

// Run archives one sale, or all that can be archived. Of all sales, one that cannot be archived yet stops no other.
func (c *saleArchiveCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := wantAtLeast("--keep", c.Keep, 0); err != nil {
		return err
	}
	return c.with(ctx, 2, logger, func(b *backend) error { return c.archive(ctx, s, b, logger) })
}

func (c *saleArchiveCmd) archive(ctx context.Context, s *streams, b *backend, logger *slog.Logger) error {
	archiver, err := archive.New(ctx, archive.Config{
		Catalog: b.catalog, Dir: c.Dir, Keep: c.Keep, Logger: logger,
	})
	if err != nil {
		return err
	}
	defer archiver.Close()
	ctx, stop := s.watch(ctx, "looking for sales")
	defer stop()
	due := []uuid.UUID{c.Sale}
	if c.Sale == uuid.Nil {
		if due, err = archiver.Due(ctx); err != nil {
			return err
		}
	}
	var failed []error
	archived := []archive.Archived{}
	for _, sale := range due {
		done, err := archiver.Sale(ctx, sale)
		switch {
		case err == nil:
			archived = append(archived, done)
			if !c.json() {
				const line = "sale %s: %s orders with %s events are in %s (%s bytes), and were deleted, in %v\n"
				_, err = fmt.Fprintf(s.out, line, sale, format.Count(done.Orders), format.Count(done.Events), done.Path,
					format.Count(done.Bytes), done.Took.Round(time.Millisecond))
			}
		case errors.Is(err, archive.ErrRefused) && c.Sale == uuid.Nil:
			_, err = fmt.Fprintln(s.err, err)
		}
		failed = append(failed, err)
	}
	if c.json() {
		failed = append(failed, writeJSON(s.out, archived))
	}
	return errors.Join(failed...)
}
