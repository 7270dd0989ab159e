package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"stampede/fulfillment/archive"
	"stampede/fulfillment/audit"
	"stampede/reservation"
	"stampede/sql"
)

type auditCmd struct {
	redisFlag
	databaseFlag
	keysFlags
	outputFlag
	Sale    uuid.UUID     `env:"STAMPEDE_AUDIT_SALE" placeholder:"ID" help:"Sale to audit (default: all)."`
	Archive []string      `env:"STAMPEDE_AUDIT_ARCHIVE" placeholder:"FILE" type:"existingfile" help:"Audit this file of an archived sale instead; may be repeated."`
	Wait    time.Duration `env:"STAMPEDE_AUDIT_WAIT" default:"0s" placeholder:"DURATION" help:"How long to wait until no order is in flight (${default})."`
}

func (c *auditCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	b, err := openControl(ctx, c.RedisURL, c.DatabaseURL, c.keysFlags, 2, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	if len(c.Archive) > 0 {
		return auditArchives(ctx, s.out, b, c.Archive, c.json())
	}
	return runAudit(ctx, s.out, b, c.keysFlags, c.Sale, c.Wait, c.json())
}

// auditArchives prints a report of each file and returns errBroken if a promise is broken in one of them.
func auditArchives(ctx context.Context, w io.Writer, b *backend, paths []string, asJSON bool) error {
	if err := sql.Check(ctx, b.pool); err != nil {
		return unchecked(err)
	}
	reports, broken := []archive.Report{}, false
	for _, path := range paths {
		report, err := archive.Audit(ctx, b.pool, path)
		if errors.Is(err, archive.ErrDamagedFile) {
			return err
		} else if err != nil {
			return unchecked(err)
		}
		reports, broken = append(reports, report), broken || report.Found > 0
		if !asJSON {
			if err := report.WriteText(w); err != nil {
				return err
			}
		}
	}
	if asJSON {
		if err := writeJSON(w, reports); err != nil {
			return err
		}
	}
	if broken {
		return errBroken
	}
	return nil
}

// runAudit prints the report and returns errBroken if a promise is broken.
func runAudit(
	ctx context.Context, w io.Writer, b *backend, keys keysFlags, sale uuid.UUID, wait time.Duration, asJSON bool,
) error {
	if err := sql.Check(ctx, b.pool); err != nil {
		return unchecked(err)
	}
	report, err := audit.Run(ctx, audit.Config{
		Pool: b.pool, Redis: b.redis, Keys: keys.keys(), Wait: wait, Sale: sale,
	})
	if errors.Is(err, reservation.ErrSaleNotFound) {
		return err
	} else if err != nil {
		return unchecked(err)
	}
	if asJSON {
		err = writeJSON(w, report)
	} else {
		err = report.WriteText(w)
	}
	switch {
	case err == nil && report.Broken():
		return errBroken
	case err == nil && report.Unchecked():
		return errUnchecked
	}
	return err
}
