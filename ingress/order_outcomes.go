package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"stampede/reservation"
)

const (
	// outcomesBlock is for how long a read of the stream waits for a message.
	outcomesBlock = time.Second
	// outcomesAgain is after what time the stream is read anew when that has failed.
	outcomesRetryPause = time.Second
)

// errNoMessage: the subscriber gave up, as it does over an entry that is no message.
var errNotAMessage = errors.New("an entry of the stream of outcomes is no message")

// hearOutcomes hands what the workers tell to the hub, until ctx ends. While it fails, and what it misses, the hub
// finds out by looking.
func (s *Server) followOutcomes(ctx context.Context) {
	for said := false; ; {
		began, err := s.readOutcomes(ctx)
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelWarn
		if said && !began {
			level = slog.LevelDebug // the same trouble as a second ago
		}
		said = true
		s.log.LogAttrs(ctx, level, "cannot hear what becomes of orders; buyers who wait are looked up each second", slog.Any("error", err))
		select {
		case <-time.After(outcomesRetryPause):
		case <-ctx.Done():
			return
		}
	}
}

// readOutcomes reads the stream with a subscriber of its own, until that ends. Began is true if it came to read.
func (s *Server) readOutcomes(ctx context.Context) (began bool, err error) {
	client, err := s.config.Outcomes()
	if err != nil {
		return false, err
	}
	last, err := lastEntry(ctx, client, s.config.OutcomesStream)
	if err != nil {
		_ = client.Close()
		return false, err
	}
	subscriber, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		// Without a place to begin it would begin anew with each read until the first message, and miss what
		// comes between two of them.
		Client: client, FanOutOldestId: last, BlockTime: outcomesBlock, DisableIndefiniteInitialBlock: true,
	}, quietLog(s.log))
	if err != nil {
		_ = client.Close()
		return false, err
	}
	defer func() { _ = subscriber.Close() }() // and the client with it
	messages, err := subscriber.Subscribe(ctx, s.config.OutcomesStream)
	if err != nil {
		return false, err
	}
	for msg := range messages {
		s.handleOutcomes(msg)
		msg.Ack()
	}
	return true, errNotAMessage
}

// takeOutcomes does nothing while nobody waits, or is about to.
func (s *Server) handleOutcomes(msg *message.Message) {
	s.metrics.outcomeMessages.Inc()
	if s.waitSlots.taken.Load() == 0 && s.waiters.isEmpty() {
		return
	}
	outcomes, err := reservation.DecodeOutcomes(msg.Payload)
	if err != nil {
		if s.badOutcomes.start(outageLogInterval) {
			s.log.Warn("a message of the stream of outcomes was passed over", "error", err)
		}
		return
	}
	s.waiters.notify(outcomes)
}

// lastEntry is the id of the last entry of a stream, or one before all ids if there is none.
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

// quietLog is the log of a subscriber, which tells every read that fails.
func quietLog(log *slog.Logger) watermill.LoggerAdapter {
	return watermill.NewSlogLoggerWithLevelMapping(log, map[slog.Level]slog.Level{
		slog.LevelInfo: slog.LevelDebug, slog.LevelError: slog.LevelDebug,
	})
}
