package rebuild

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"

	"stampede/sql"
)

const (
	// noteAfter is how long a rebuild runs until it is noted: most are done before.
	noteAfter = 300 * time.Millisecond
	// noteInterval is the time between two notes, which are also the rebuild's heartbeat.
	noteInterval = time.Second
	// noteTimeout bounds a note. The last one, which the end of the rebuild waits for, takes no longer either.
	noteTimeout = 500 * time.Millisecond
)

// note writes the progress of the rebuild to the table rebuilds until stop is called, for who watches it. It uses a
// connection of the pool, never the session of the rebuild. A note that fails is left out: the row of a rebuild whose
// notes fail looks like that of a process that died.
func (b *build) note(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var noting sync.WaitGroup
	noting.Go(func() {
		id, noted := uuid.New(), false
		defer func() {
			if noted {
				b.forget(ctx, id)
			}
		}()
		due := time.NewTimer(noteAfter)
		defer due.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-due.C:
				noted = true // also if the answer is lost
				b.noteOnce(ctx, id)
				due.Reset(noteInterval)
			}
		}
	})
	return func() {
		cancel()
		noting.Wait()
	}
}

func (b *build) noteOnce(ctx context.Context, id uuid.UUID) {
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	var sale *uuid.UUID
	if b.of.Sale != uuid.Nil {
		sale = &b.of.Sale
	}
	current := b.step.Load()
	doing := current.doing
	if current.sale != uuid.Nil && current.sale != b.of.Sale {
		doing += ", sale " + current.sale.String()
	}
	_, err := b.config.Pool.Exec(ctx, sql.RebuildNoteProgress, id, b.partition, sale, b.of.Reason, thisProcess(),
		time.Since(b.began).Milliseconds(), doing, b.salesDone.Load(), b.salesTotal.Load())
	if err != nil && ctx.Err() == nil {
		b.log.Debug("cannot note the progress of the rebuild", "error", err)
	}
}

// forget removes the note of a rebuild that has ended.
func (b *build) forget(ctx context.Context, id uuid.UUID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteTimeout)
	defer cancel()
	if _, err := b.config.Pool.Exec(ctx, sql.RebuildEndProgress, id); err != nil {
		b.log.Debug("cannot remove the progress of the rebuild", "error", err)
	}
}

// thisProcess names the process that rebuilds, for operators.
var thisProcess = sync.OnceValue(func() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s, process %d", host, os.Getpid())
})
