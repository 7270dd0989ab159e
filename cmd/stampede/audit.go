package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"stampede/internal/connect"
	"stampede/internal/format"
	"stampede/internal/progress"
	"stampede/reservation"
	"stampede/sql"
	"stampede/upkeep/archive"
	"stampede/upkeep/audit"
	"stampede/upkeep/doctor"
	"stampede/upkeep/projection"
	"stampede/upkeep/rebuild"
)

type auditCmd struct {
	readOnly
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
		Catalog: b.catalog, Wait: wait, Sale: sale,
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
		Catalog: b.catalog, Rebuilder: rebuilder,
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
		became := format.Count(r.Mended) + " mended"
		if report.DryRun {
			became = "nothing done"
		}
		if _, err = fmt.Fprintf(w, "%-12s %s found, %s: %s\n", r.Remedy, format.Count(r.Found), became, r.Says); err != nil {
			return err
		}
	}
	for _, failure := range report.Failures {
		if _, err = fmt.Fprintln(w, "failed:", printable(failure)); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "%s remain\n", format.Count(report.Remaining))
	return err
}

// salesOrAll says which sales a command is about.
func salesOrAll(sale uuid.UUID) string {
	if sale == uuid.Nil {
		return "all sales"
	}
	return "the sale " + sale.String()
}

type rebuildCmd struct {
	storesFlags
	outputFlag
	yesFlag
	Sale      uuid.UUID `env:"STAMPEDE_REBUILD_SALE" placeholder:"ID" help:"Sale to rebuild; the others continue. Without it and --partition, everything is rebuilt."`
	Shards    *int      `env:"STAMPEDE_REBUILD_SHARDS" placeholder:"N" help:"Raise the number of shards of the sale to N, at most the number of partitions at its creation. It is never lowered. Only with --sale."`
	Partition *int      `env:"STAMPEDE_REBUILD_PARTITION" placeholder:"N" help:"Rebuild the sales of this partition, and mark its Redis server as verified."`
}

// Validate is called by kong.
func (c *rebuildCmd) Validate() error {
	if err := c.keysFlags.Validate(); err != nil {
		return err
	}
	if c.Shards != nil {
		if c.Sale == uuid.Nil {
			return usagef("--shards needs --sale")
		}
		if err := checkFlag(*c.Shards >= 1 && *c.Shards <= reservation.MaxPartitions, "--shards", *c.Shards,
			fmt.Sprintf("1 to %d", reservation.MaxPartitions)); err != nil {
			return err
		}
	}
	if c.Partition == nil {
		return nil
	}
	if c.Sale != uuid.Nil {
		return usagef("--sale and --partition exclude each other")
	}
	return checkFlag(*c.Partition >= 0 && *c.Partition < reservation.MaxPartitions, "--partition", *c.Partition,
		fmt.Sprintf("0 to %d", reservation.MaxPartitions-1))
}

// Run rebuilds partitions at the same time and prints a report for each when it is done. An error in one partition
// stops no other. Sales with several shards that had to wait for another partition come last.
func (c *rebuildCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	if err := c.confirm(ctx, s, func() (string, error) { return c.question(), nil }); err != nil {
		return err
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
		return err
	}
	switch {
	case c.Shards != nil:
		report, err := rebuilder.RaiseShards(ctx, c.Sale, *c.Shards, rebuild.ReasonByHand)
		return c.print(s, report, err)
	case c.Sale != uuid.Nil:
		report, err := rebuilder.Sale(ctx, c.Sale, rebuild.ReasonByHand)
		return c.print(s, report, err)
	}
	first, end := 0, 0
	if c.Partition != nil {
		first, end = *c.Partition, *c.Partition+1
	} else if end, err = rebuilder.Partitions(ctx); err != nil {
		return err
	}
	failed := make([]error, end-first)
	var rebuilding sync.WaitGroup
	var printing sync.Mutex
	unfinished := map[uuid.UUID]bool{}
	rebuildPartition := func(p int) {
		report, err := rebuilder.Partition(ctx, p, rebuild.ReasonByHand)
		printing.Lock()
		defer printing.Unlock()
		for _, sale := range report.Unfinished {
			unfinished[sale] = true
		}
		failed[p-first] = c.print(s, report, err)
	}
	for p := first; p < end; p++ {
		rebuilding.Go(func() { rebuildPartition(p) })
	}
	rebuilding.Wait()
	for p := first; p < end; p++ {
		// The rebuilds of partitions that share a sale may have been in each other's way.
		if err := failed[p-first]; errors.Is(err, rebuild.ErrRunning) || errors.Is(err, reservation.ErrSaleNotClosed) {
			rebuildPartition(p)
		}
	}
	if c.Partition == nil {
		for sale := range unfinished {
			report, err := rebuilder.Finish(ctx, sale, rebuild.ReasonByHand)
			if err != nil || len(report.Sales) > 0 {
				failed = append(failed, c.print(s, report, err))
			}
		}
	}
	return errors.Join(failed...)
}

func (c *rebuildCmd) print(s *streams, report rebuild.Report, err error) error {
	if err != nil {
		return err
	}
	return c.write(s.out, report, report.WriteText)
}

func (c *rebuildCmd) question() string {
	what := salesOrAll(c.Sale)
	if c.Partition != nil {
		what = fmt.Sprintf("all sales of partition %d", *c.Partition)
	}
	if c.Shards != nil {
		what += fmt.Sprintf(", with %d shards from now on", *c.Shards)
	}
	return "The stock in Redis is rebuilt from Postgres: " + what + ". They are closed meanwhile, and orders that " +
		"neither Postgres nor the stream has are voided."
}

type projectionsCmd struct {
	Rebuild projectionsRebuildCmd `cmd:"" help:"Make the orders and the counters of sales those of the log of events, month by month. Sales continue."`
}

type projectionsRebuildCmd struct {
	databaseFlag
	outputFlag
	Archive string `env:"STAMPEDE_PROJECTIONS_ARCHIVE" placeholder:"FILE" type:"existingfile" help:"Bring the events of an archived sale back from this file, and make its orders from them. Others stay as they are."`
}

func (c *projectionsRebuildCmd) Run(ctx context.Context, s *streams) error {
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	ctx, stop := s.watch(ctx, "looking at the log")
	defer stop()
	if err := sql.Check(ctx, pool); err != nil {
		return err
	}
	if c.Archive != "" {
		return c.restore(ctx, s, pool)
	}
	report, damaged := projection.Rebuild(ctx, pool)
	if damaged != nil && !errors.Is(damaged, projection.ErrDamagedLog) {
		return damaged
	}
	if c.json() {
		return cmp.Or(writeJSON(s.out, report), damaged)
	}
	_, err = fmt.Fprintf(s.out,
		"%s orders compared with their events in %v; %s of them differed and were replaced\n",
		format.Count(report.Orders), report.Took.Round(time.Millisecond), format.Count(report.Replaced))
	for _, r := range report.Recounted {
		if err == nil {
			_, err = fmt.Fprintf(s.out, "sale %s: sold was %s and is %s, the last place was %s and is %s\n", r.Sale,
				format.Count(r.Was), format.Count(r.Is), format.Count(r.LastWas), format.Count(r.LastIs))
		}
	}
	return cmp.Or(err, damaged)
}

// restore brings an archived sale back.
func (c *projectionsRebuildCmd) restore(ctx context.Context, s *streams, pool *pgxpool.Pool) error {
	restored, err := archive.Restore(ctx, pool, c.Archive)
	if err != nil {
		return err
	}
	if c.json() {
		return writeJSON(s.out, restored)
	}
	_, err = fmt.Fprintf(s.out, "sale %s: %s orders with %s events are back in Postgres, in %v\n", restored.Sale,
		format.Count(restored.Orders), format.Count(restored.Events), restored.Took.Round(time.Millisecond))
	return err
}

type doctorCmd struct {
	readOnly
	redisFlag
	databaseFlag
	outputFlag
	JWKSURL string    `name:"jwks-url" env:"STAMPEDE_JWKS_URL" placeholder:"URL" help:"Key set for the buyers' tokens, to be checked as well."`
	Sale    uuid.UUID `env:"STAMPEDE_DOCTOR_SALE" placeholder:"ID" help:"Sale for whose orders Redis must have enough memory (default: all sales together)."`
}

func (c *doctorCmd) Run(ctx context.Context, s *streams) error {
	ctx, cancel := context.WithTimeout(ctx, 2*askTimeout)
	defer cancel()
	ctx, stop := s.watch(ctx, "asking Redis")
	defer stop()
	findings, servers, err := c.examine(ctx)
	if err != nil {
		return err
	}
	all := append([]doctor.Finding{}, findings...) // [] rather than null
	err = c.write(s.out, all, func(w io.Writer) error {
		_, _ = fmt.Fprintln(w, servers)
		return doctor.WriteText(w, findings)
	})
	return verdict(err, doctor.Any(findings, doctor.Unsafe), doctor.Any(findings, doctor.Away))
}

// examine checks both servers. A server that does not answer is a finding; the other one is still checked.
func (c *doctorCmd) examine(ctx context.Context) (findings []doctor.Finding, servers string, err error) {
	rdb, err := connect.Control(c.RedisURL)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = rdb.Close() }()
	pool, err := connect.Postgres(ctx, c.DatabaseURL, 1)
	if err != nil {
		return nil, "", err
	}
	defer pool.Close()

	var keys []doctor.Finding
	if c.JWKSURL != "" {
		progress.Step(ctx, "fetching the key set")
		keys = doctor.KeySet(ctx, c.JWKSURL)
		progress.Step(ctx, "asking Redis")
	}
	findings, err = doctor.Redis(ctx, rdb, reservation.OperatorRights)
	if err != nil {
		findings = append(findings, away("redis", "REDIS_URL", "nothing can be sold", err))
	}
	progress.Step(ctx, "asking Postgres")
	more, err := doctor.Postgres(ctx, pool)
	if err != nil {
		more = append(more, away("postgres", "DATABASE_URL", "accepted orders wait in Redis, unconfirmed", err))
	}
	findings = append(findings, more...)
	progress.Step(ctx, "comparing clocks")
	more, _ = doctor.Clocks(ctx, rdb, pool) // a server that does not answer is reported above
	findings = append(findings, more...)
	progress.Step(ctx, "counting the units on sale")
	more, err = doctor.Memory(ctx, rdb, pool, c.Sale)
	if errors.Is(err, reservation.ErrSaleNotFound) {
		return nil, "", err
	} // any other error is that of a server reported above, or a missing schema
	progress.Step(ctx, "measuring Redis and Postgres")
	speeds := doctor.Speeds(ctx, rdb, pool)
	return slices.Concat(findings, more, keys, speeds), doctor.Servers(ctx, rdb, pool), nil
}

func away(server, variable, why string, err error) doctor.Finding {
	text, _ := unreached(err)
	return doctor.Finding{Severity: doctor.Away, Server: server, What: text, Why: why, Mend: startOr(variable)}
}
