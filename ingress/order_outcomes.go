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

	"stampede/reservation/order"
)

const (
	// outcomesBlock is how long a read of the stream blocks.
	outcomesBlock = time.Second
	// outcomesRetryPause is the pause before the stream is read again after an error.
	outcomesRetryPause = time.Second
)

// errNotAMessage: the subscriber stops at an entry that is not a Watermill message.
var errNotAMessage = errors.New("an entry of the stream of outcomes is not a message")

// followOutcomes passes the announcements of workers to the waiters until ctx ends. Waiters that miss one are
// looked up every second.
func (s *Server) followOutcomes(ctx context.Context) {
	for logged := false; ; {
		subscribed, err := s.readOutcomes(ctx)
		if ctx.Err() != nil {
			return
		}
		level := slog.LevelWarn
		if logged && !subscribed {
			level = slog.LevelDebug // still the same error
		}
		logged = true
		s.log.Log(ctx, level,
			"cannot read the stream of outcomes: the orders of waiting buyers are looked up every second", "error", err)
		select {
		case <-time.After(outcomesRetryPause):
		case <-ctx.Done():
			return
		}
	}
}

// readOutcomes reads the stream with a subscriber of its own, until that ends.
func (s *Server) readOutcomes(ctx context.Context) (subscribed bool, err error) {
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
		// Without a start id the subscriber would, until its first message, read from the end of the stream each
		// time, and miss messages between two reads.
		Client: client, FanOutOldestId: last, BlockTime: outcomesBlock, DisableIndefiniteInitialBlock: true,
	}, debugLog(s.log))
	if err != nil {
		_ = client.Close()
		return false, err
	}
	defer func() { _ = subscriber.Close() }() // closes the client as well
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

// handleOutcomes ignores messages while no request waits, or is about to.
func (s *Server) handleOutcomes(msg *message.Message) {
	s.metrics.outcomeMessages.Inc()
	if s.waitSlots.taken.Load() == 0 && s.waiters.isEmpty() {
		return
	}
	outcomes, err := order.DecodeOutcomes(msg.Payload)
	if err != nil {
		if s.badOutcomes.start(outageLogInterval) {
			s.log.Warn("skipped a message of the stream of outcomes", "error", err)
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

// debugLog lowers the levels of a subscriber, which logs every failed read as an error.
func debugLog(log *slog.Logger) watermill.LoggerAdapter {
	return watermill.NewSlogLoggerWithLevelMapping(log, map[slog.Level]slog.Level{
		slog.LevelInfo: slog.LevelDebug, slog.LevelError: slog.LevelDebug,
	})
}
