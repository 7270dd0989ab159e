package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/google/uuid"

	"stampede/reservation"
	"stampede/upkeep/rebuild"
)

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
