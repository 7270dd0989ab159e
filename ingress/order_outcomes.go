package ingress

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/redis/go-redis/v9"

	"stampede/reservation/order"
)

const (
	// outcomesBlock is how long a read of a stream blocks.
	outcomesBlock = time.Second
	// outcomesRetryPause is the pause before a stream is read again after an error.
	outcomesRetryPause = time.Second
)

// outcomeReader passes the announcements of workers to the waiters.
type outcomeReader struct {
	*core
	// malformed bounds the log lines about messages that cannot be decoded.
	malformed cooldown
}

// run passes the announcements of workers to the waiters until ctx is done. Waiters that miss one are
// looked up every second.
func (s *outcomeReader) run(ctx context.Context) {
	client, err := s.config.Outcomes()
	if err != nil {
		s.log.Error("cannot read the streams of outcomes: the orders of waiting buyers are looked up every second",
			"error", err)
		return
	}
	closed := make(chan struct{})
	context.AfterFunc(ctx, func() {
		defer close(closed)
		_ = client.Close() // ends reads that block
	})
	var following sync.WaitGroup
	for _, stream := range s.config.OutcomesStreams {
		following.Go(func() { s.follow(ctx, client, stream) })
	}
	following.Wait()
	<-closed
}

// follow reads one stream until ctx is done.
func (s *outcomeReader) follow(ctx context.Context, client redis.UniversalClient, stream string) {
	last, failing := "", false
	for {
		var err error
		if last == "" {
			last, err = lastEntry(ctx, client, stream)
		} else {
			last, err = s.read(ctx, client, stream, last)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && !failing {
			s.log.Warn("cannot read a stream of outcomes: the orders of waiting buyers are looked up every second",
				"stream", stream, "error", err)
		}
		if failing = err != nil; !failing {
			continue
		}
		select {
		case <-time.After(outcomesRetryPause):
		case <-ctx.Done():
			return
		}
	}
}

// read reads the messages after the entry last, and returns their last entry.
func (s *outcomeReader) read(
	ctx context.Context, client redis.UniversalClient, stream, last string,
) (string, error) {
	found, err := client.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, last}, Block: outcomesBlock}).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return last, nil
	case err != nil:
		return last, err
	}
	for _, entry := range found[0].Messages {
		s.handle(entry)
		last = entry.ID
	}
	return last, nil
}

// handle ignores messages while no request waits, or is about to.
func (s *outcomeReader) handle(entry redis.XMessage) {
	s.metrics.outcomeMessages.Inc()
	if s.waitSlots.taken.Load() == 0 && s.waiters.isEmpty() {
		return
	}
	var outcomes []order.OrderOutcome
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
	if err == nil {
		outcomes, err = order.DecodeOutcomes(msg.Payload)
	}
	if err != nil {
		if s.malformed.start(outageLogInterval) {
			s.log.Warn("skipped a message of a stream of outcomes", "entry", entry.ID, "error", err)
		}
		return
	}
	s.waiters.notify(outcomes)
}

// lastEntry returns the id of the stream's last entry, or the lowest id if there is none.
func lastEntry(ctx context.Context, client redis.UniversalClient, stream string) (string, error) {
	entries, err := client.XRevRangeN(ctx, stream, "+", "-", 1).Result()
	switch {
	case err != nil:
		return "", fmt.Errorf("find the end of %s: %w", stream, err)
	case len(entries) == 0:
		return "0-0", nil
	}
	return entries[0].ID, nil
}
