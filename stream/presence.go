package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
)

// presentSuffix marks the consumers of a group that show workers and never get entries.
const presentSuffix = ":present"

// Presence shows a worker to the other workers of a group, stream by stream.
//
// Each worker has a second consumer in the group, which only reads its own pending list. That list
// is always empty. Redis stores the time of such a read in memory and writes nothing to its log, and
// XINFO CONSUMERS returns how long ago it was, by the clock of the stream's own server.
type Presence struct {
	// Control makes the calls.
	Control redis.UniversalClient
	// Group is the consumer group, and Consumer the worker's name in it.
	Group, Consumer string
	// SilentMax is how long ago a present worker has announced itself at most.
	SilentMax time.Duration

	// announced is when Redis had answered the last Announce.
	announced time.Time
}

// clockRounding is by how much two measures of one time may differ.
const clockRounding = 20 * time.Millisecond

// Present is what was found in one stream.
type Present struct {
	// Others are the other workers that are present, and how long ago each announced itself.
	Others map[string]time.Duration
	// Twin is true if another process has announced itself under this worker's name since this one did. So it seems once
	// when the clock of Redis was set back.
	Twin bool
	// Err is not nil if Redis could not be asked for this stream. A missing group is no error.
	Err error
}

// Announce shows this worker in the streams, and returns who else is present in each of them. The
// streams may be on several servers: each has its own result.
func (p *Presence) Announce(ctx context.Context, streams []string) []Present {
	defer func() { p.announced = time.Now() }()
	return p.look(ctx, streams, true)
}

// Look returns who else is present in each of the streams.
func (p *Presence) Look(ctx context.Context, streams []string) []Present {
	return p.look(ctx, streams, false)
}

func (p *Presence) look(ctx context.Context, streams []string, announce bool) []Present {
	// A server that does not answer must not make this worker silent on the others.
	patience := min(retry.CallTimeout, max(p.SilentMax/2, time.Second))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	announced := make([]*redis.XStreamSliceCmd, len(streams))
	listed := make([]*redis.XInfoConsumersCmd, len(streams))
	alone := time.Since(p.announced) - clockRounding
	_, _ = p.Control.Pipelined(ctx, func(pipe redis.Pipeliner) error { // each command's own error counts
		for i, stream := range streams {
			listed[i] = pipe.XInfoConsumers(ctx, stream, p.Group)
			if announce {
				announced[i] = pipe.XReadGroup(ctx, &redis.XReadGroupArgs{
					Group: p.Group, Consumer: p.Consumer + presentSuffix, Streams: []string{stream, "0"}, Count: 1, Block: -1,
				})
			}
		}
		return nil
	})
	found := make([]Present, len(streams))
	for i, stream := range streams {
		err := UnlessMissing(listed[i].Err())
		if announce && !errors.Is(announced[i].Err(), redis.Nil) {
			err = errors.Join(err, UnlessMissing(announced[i].Err()))
		}
		if err != nil {
			found[i].Err = fmt.Errorf("look for the readers of %s: %w", stream, err)
			continue
		}
		found[i].Others = p.others(listed[i].Val())
		found[i].Twin = !p.announced.IsZero() && slices.ContainsFunc(listed[i].Val(), func(c redis.XInfoConsumer) bool {
			return c.Name == p.Consumer+presentSuffix && c.Idle < alone
		})
	}
	return found
}

func (p *Presence) others(consumers []redis.XInfoConsumer) map[string]time.Duration {
	others := make(map[string]time.Duration)
	for _, c := range consumers {
		name, isPresence := strings.CutSuffix(c.Name, presentSuffix)
		if isPresence && name != p.Consumer && c.Idle <= p.SilentMax {
			others[name] = c.Idle
		}
	}
	return others
}

// Withdraw ends the presence of this worker in the streams. Where that fails, the others notice its
// silence.
func (p *Presence) Withdraw(ctx context.Context, streams []string) {
	ctx, cancel := retry.ForCall(ctx)
	defer cancel()
	_, _ = p.Control.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, stream := range streams { // this consumer has no pending entries that could be lost
			pipe.XGroupDelConsumer(ctx, stream, p.Group, p.Consumer+presentSuffix)
		}
		return nil
	})
}

// First returns which of the workers has to read the stream: the one with the highest hash of both
// names (rendezvous hashing: Thaler and Ravishankar, 1998). When a worker comes or goes, only its
// own streams change their reader.
func First(stream string, workers []string) string {
	weight := func(worker string) []byte {
		sum := sha256.Sum256([]byte(worker + "\x00" + stream))
		return sum[:]
	}
	return slices.MaxFunc(workers, func(x, y string) int { return bytes.Compare(weight(x), weight(y)) })
}
