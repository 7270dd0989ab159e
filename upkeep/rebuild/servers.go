package rebuild

import (
	"context"
	"fmt"

	"stampede/internal/retry"
	"stampede/ledger"
	"stampede/reservation"
	"stampede/sql"
)

// askServers returns ErrServerUnverified if a server of the layout does not answer or is not verified. It takes no
// lock, so a sale that has to wait for a server costs no session of Postgres.
func (r *Rebuilder) askServers(ctx context.Context, layout reservation.Layout) error {
	for shard := range layout.Shards {
		state, err := r.inspect(ctx, layout.Partition(shard))
		if err != nil {
			return fmt.Errorf("%w: %w", ErrServerUnverified, err)
		}
		if state.Recorded && !state.Known {
			return fmt.Errorf("partition %d: %w", layout.Partition(shard), ErrServerUnverified)
		}
	}
	return nil
}

// requireServers returns ErrServerUnverified unless the server of each shard is the verified one. The rebuild is the
// first user of a partition that no sale was published to.
func (b *build) requireServers(ctx context.Context, layout reservation.Layout) error {
	servers, err := b.verifiedServers(ctx)
	if err != nil {
		return err
	}
	for shard := range layout.Shards {
		p := layout.Partition(shard)
		state, err := b.inspect(ctx, p)
		if err == nil && !(state.Known && state.RunID == servers[p]) {
			err = b.useFirst(ctx, p, state)
		}
		if err != nil {
			return fmt.Errorf("partition %d: %w", p, err)
		}
	}
	return nil
}

// useFirst verifies the server of a partition that was never used, which cannot have lost anything. For any other
// partition it returns ErrServerUnverified.
func (b *build) useFirst(ctx context.Context, partition int, server reservation.ServerState) error {
	if server.Recorded {
		return ErrServerUnverified
	}
	used, err := b.usedPartitions(ctx)
	if err != nil {
		return err
	} else if used[partition] {
		return ErrServerUnverified
	}
	limited, cancel := context.WithTimeout(ctx, ledger.RecordTimeout)
	defer cancel()
	claimed, err := b.session.conn.Exec(limited, sql.CatalogClaimPartition, partition, server.RunID, server.ReplicationID)
	if err != nil {
		return err
	}
	limited, cancel = retry.ForCall(ctx)
	defer cancel()
	if claimed.RowsAffected() == 1 {
		return b.config.Store.MarkVerified(limited, partition, server, reservation.FirstUse)
	}
	// Another process is its first user.
	if server, err = b.config.Store.AwaitFirstUse(limited, partition); err == nil && !server.Known {
		err = ErrServerUnverified
	}
	return err
}
