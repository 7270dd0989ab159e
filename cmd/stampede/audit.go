package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/internal/progress"
	"stampede/reservation"
	"stampede/sql"
	"stampede/upkeep/archive"
	"stampede/upkeep/audit"
)

type auditCmd struct {
	look
	storesFlags
	outputFlag
	operatorFlag
	Sale    uuid.UUID     `env:"STAMPEDE_AUDIT_SALE" placeholder:"ID" help:"Sale to audit (default: all)."`
	Archive []string      `env:"STAMPEDE_AUDIT_ARCHIVE" placeholder:"FILE" type:"existingfile" help:"Audit this file of an archived sale instead; may be repeated."`
	Wait    time.Duration `env:"STAMPEDE_AUDIT_WAIT" default:"0s" placeholder:"DURATION" help:"How long to wait until no order is in flight (${default})."`
}

func (c *auditCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	operator, err := c.name()
	if err != nil {
		return err
	}
	b, err := c.open(ctx, 2, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, stop := s.watch(ctx, "looking for sales")
	defer stop()
	if len(c.Archive) > 0 {
		return c.auditArchives(ctx, s.out, b)
	}
	report, err := lookAtPromises(ctx, b, c.Sale, c.Wait)
	if err != nil {
		return err
	}
	if c.Sale == uuid.Nil {
		// The verdict counts, and is printed, also if it cannot be stored.
		if err := recordAudit(ctx, b, report, operator); err != nil {
			logger.Warn("the verdict is not recorded, so that workers show an older one", "error", err)
		}
	}
	return c.printVerdict(s.out, report)
}

// auditArchives prints a report of each file and returns errBroken if a promise is broken in one of them.
func (c *auditCmd) auditArchives(ctx context.Context, w io.Writer, b *backend) error {
	if err := sql.Check(ctx, b.pool); err != nil {
		return unchecked(err)
	}
	reports, broken := []archive.Report{}, false
	for i, path := range c.Archive {
		progress.Step(ctx, "reading archives")
		progress.At(ctx, int64(i), int64(len(c.Archive)), "files")
		report, err := archive.Audit(ctx, b.pool, path)
		if errors.Is(err, archive.ErrDamagedFile) {
			return err
		} else if err != nil {
			return unchecked(err)
		}
		reports, broken = append(reports, report), broken || report.Found > 0
		if !c.json() {
			if err := report.WriteText(w); err != nil {
				return err
			}
		}
	}
	var err error
	if c.json() {
		err = writeJSON(w, reports)
	}
	return verdict(err, broken, false)
}

func lookAtPromises(ctx context.Context, b *backend, sale uuid.UUID, wait time.Duration) (audit.Report, error) {
	if err := sql.Check(ctx, b.pool); err != nil {
		return audit.Report{}, unchecked(err)
	}
	report, err := audit.Run(ctx, audit.Config{
		Pool: b.pool, Redis: b.redis, Keys: b.keys, Wait: wait, Sale: sale,
	})
	if err != nil && !errors.Is(err, reservation.ErrSaleNotFound) {
		err = unchecked(err)
	}
	return report, err
}

func recordAudit(ctx context.Context, b *backend, report audit.Report, operator string) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return audit.Record(ctx, b.pool, report, operator)
}

// printVerdict returns errBroken if a promise is broken.
func (f outputFlag) printVerdict(w io.Writer, report audit.Report) error {
	return verdict(f.write(w, report, report.WriteText), report.Broken(), report.Unchecked())
}
