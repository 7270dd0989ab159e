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
	redisFlag
	databaseFlag
	keysFlags
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
	b, err := openControl(ctx, c.RedisURL, c.DatabaseURL, c.keysFlags, 2, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, stop := s.watch(ctx, "looking for sales")
	defer stop()
	if len(c.Archive) > 0 {
		return auditArchives(ctx, s.out, b, c.Archive, c.json())
	}
	report, err := lookAtPromises(ctx, b, c.keysFlags, c.Sale, c.Wait)
	if err != nil {
		return err
	}
	if c.Sale == uuid.Nil {
		// The verdict counts, and is printed, also if it cannot be stored.
		if err := recordAudit(ctx, b, report, operator); err != nil {
			logger.Warn("the verdict is not recorded, so that workers show an older one", "error", err)
		}
	}
	return printVerdict(s.out, report, c.json())
}

// auditArchives prints a report of each file and returns errBroken if a promise is broken in one of them.
func auditArchives(ctx context.Context, w io.Writer, b *backend, paths []string, asJSON bool) error {
	if err := sql.Check(ctx, b.pool); err != nil {
		return unchecked(err)
	}
	reports, broken := []archive.Report{}, false
	for i, path := range paths {
		progress.Step(ctx, "reading archives")
		progress.At(ctx, int64(i), int64(len(paths)), "files")
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

// runAudit prints the report of an audit and returns errBroken if a promise is broken.
func runAudit(
	ctx context.Context, w io.Writer, b *backend, keys keysFlags, sale uuid.UUID, wait time.Duration, asJSON bool,
) error {
	report, err := lookAtPromises(ctx, b, keys, sale, wait)
	if err != nil {
		return err
	}
	return printVerdict(w, report, asJSON)
}

func lookAtPromises(
	ctx context.Context, b *backend, keys keysFlags, sale uuid.UUID, wait time.Duration,
) (audit.Report, error) {
	if err := sql.Check(ctx, b.pool); err != nil {
		return audit.Report{}, unchecked(err)
	}
	report, err := audit.Run(ctx, audit.Config{
		Pool: b.pool, Redis: b.redis, Keys: keys.keys(), Wait: wait, Sale: sale,
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
func printVerdict(w io.Writer, report audit.Report, asJSON bool) error {
	var err error
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
