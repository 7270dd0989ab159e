package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/google/uuid"

	"stampede/internal/figure"
	"stampede/reservation"
	"stampede/upkeep/audit"
)

// errRemaining ends a command whose output already shows the remaining differences.
var errRemaining = errors.New("differences remain")

type reconcileCmd struct {
	storesFlags
	outputFlag
	yesFlag
	Sale    uuid.UUID `env:"STAMPEDE_RECONCILE_SALE" placeholder:"ID" help:"Sale to reconcile (default: all)."`
	DryRun  bool      `env:"STAMPEDE_RECONCILE_DRY_RUN" help:"Change nothing; only report what would be done."`
	Explain bool      `env:"STAMPEDE_RECONCILE_EXPLAIN" help:"List each difference with its order, the last event, and the remedy."`
}

func (c *reconcileCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if !c.DryRun {
		err := c.confirm(ctx, s, func() (string, error) {
			return "Differences between Redis and Postgres are repaired in " + salesOrAll(c.Sale) +
				"; stampede reconcile --dry-run --explain shows them first.", nil
		})
		if err != nil {
			return err
		}
	}
	b, err := c.open(ctx, 4, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	ctx, stop := s.watch(ctx, "looking for sales")
	defer stop()
	rebuilder, err := b.rebuilder(ctx, logger)
	if err != nil {
		return unchecked(err)
	}
	config := audit.ReconcileConfig{
		Pool: b.pool, Redis: b.redis, Keys: b.keys, Store: b.store, Catalog: b.catalog, Rebuilder: rebuilder,
		Sale: c.Sale, DryRun: c.DryRun, Logger: logger,
	}
	if c.Explain {
		config.Explain = func(f audit.Finding) error {
			if c.json() {
				return writeJSON(s.out, f)
			}
			_, err := fmt.Fprintf(s.out, "%s\n    → %s\n", printable(f.String()), f.Remedy.Says())
			return err
		}
	}
	report, err := audit.Reconcile(ctx, config)
	if errors.Is(err, reservation.ErrSaleNotFound) {
		return err
	} else if err != nil {
		return unchecked(err)
	}
	err = c.write(s.out, report, func(w io.Writer) error { return writeReconciled(w, report) })
	if err == nil && report.Remaining > 0 {
		return errRemaining
	}
	return verdict(err, false, len(report.Unchecked) > 0)
}

func writeReconciled(w io.Writer, report audit.ReconcileReport) (err error) {
	for _, why := range report.Unchecked {
		if _, err = fmt.Fprintln(w, "not checked:", printable(why)); err != nil {
			return err
		}
	}
	if len(report.Remedies) == 0 {
		found := "no difference between Redis and Postgres"
		if len(report.Unchecked) > 0 {
			found = "no difference in what could be checked"
		}
		_, err = fmt.Fprintln(w, found)
		return err
	}
	for _, r := range report.Remedies {
		became := figure.Count(r.Mended) + " mended"
		if report.DryRun {
			became = "nothing done"
		}
		if _, err = fmt.Fprintf(w, "%-12s %s found, %s: %s\n", r.Remedy, figure.Count(r.Found), became, r.Says); err != nil {
			return err
		}
	}
	for _, failure := range report.Failures {
		if _, err = fmt.Fprintln(w, "failed:", printable(failure)); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "%s remain\n", figure.Count(report.Remaining))
	return err
}

// salesOrAll says which sales a command is about.
func salesOrAll(sale uuid.UUID) string {
	if sale == uuid.Nil {
		return "all sales"
	}
	return "the sale " + sale.String()
}
