package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/google/uuid"

	"stampede/fulfillment/rebuild"
	"stampede/internal/connect"
	"stampede/reservation"
)

type rebuildCmd struct {
	redisFlag
	databaseFlag
	keysFlags
	jsonFlag
	Sale      uuid.UUID `env:"STAMPEDE_REBUILD_SALE" placeholder:"ID" help:"Sale to rebuild; the others continue. Without it and --partition, everything is rebuilt."`
	Partition *int      `env:"STAMPEDE_REBUILD_PARTITION" placeholder:"N" help:"Rebuild the sales of this partition, and mark its Redis server as verified."`
}

// Validate is called by kong.
func (c *rebuildCmd) Validate() error {
	if err := c.keysFlags.Validate(); err != nil {
		return err
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

// Run prints a report for each partition. After an error the remaining partitions are still rebuilt.
func (c *rebuildCmd) Run(ctx context.Context, s *streams, logger *slog.Logger) error {
	b, err := openBackend(ctx, connect.Control, c.RedisURL, c.DatabaseURL, c.keysFlags, 3, logger)
	if err != nil {
		return err
	}
	defer b.Close()
	rebuilder, err := b.rebuilder(ctx, c.keys(), logger)
	if err != nil {
		return err
	}
	if c.Sale != uuid.Nil {
		return c.print(s, func() (rebuild.Report, error) {
			return rebuilder.Sale(ctx, c.Sale, rebuild.ReasonByHand)
		})
	}
	first, end := 0, 0
	if c.Partition != nil {
		first, end = *c.Partition, *c.Partition+1
	} else if end, err = rebuilder.Partitions(ctx); err != nil {
		return err
	}
	var failed []error
	for p := first; p < end && ctx.Err() == nil; p++ {
		failed = append(failed, c.print(s, func() (rebuild.Report, error) {
			return rebuilder.Partition(ctx, p, rebuild.ReasonByHand)
		}))
	}
	return errors.Join(failed...)
}

func (c *rebuildCmd) print(s *streams, do func() (rebuild.Report, error)) error {
	report, err := do()
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(s.out, report)
	}
	return report.WriteText(s.out)
}
