package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"stampede/internal/pause"
	"stampede/internal/retry"
)

// subscription is one stream being read, from Subscribe to the end of its channel.
type subscription struct {
	config  *Config
	stream  string
	log     *slog.Logger
	metrics *streamMetrics
	output  chan *message.Message
	table   *entryTable
	Acks    *ackCollector

	// stop is closed when nothing is to be read or handed out any more.
	stop chan struct{}
	// ctx is the parent of every message's context. It ends when draining has taken too long, and
	// with it everything that waits for a message.
	ctx    context.Context
	Expire context.CancelFunc
	// following counts the goroutines of entries that were handed out or are being stored as dead letters.
	following sync.WaitGroup

	// storingDeadLetter is held while a dead letter is stored, so that a store that is away is asked by one
	// entry at a time, and burials is what is known of it.
	storingDeadLetter sync.Mutex
	deadLetterOutage  retry.Outage
}

func newSubscription(ctx context.Context, config *Config, metrics *subscriberMetrics, stream string) *subscription {
	ours := metrics.Of(stream)
	log := config.Logger.With(slog.String("stream", stream), slog.String("group", config.Group),
		slog.String("consumer", config.Consumer))
	s := &subscription{
		config: config, stream: stream, log: log, metrics: ours,
		output:           make(chan *message.Message),
		table:            newEntryTable(config.InFlightMax, ours.InFlight),
		Acks:             newAckCollector(),
		stop:             make(chan struct{}),
		deadLetterOutage: retry.Outage{Log: log, Doing: "store dead letters"},
	}
	s.ctx, s.Expire = context.WithCancel(context.WithoutCancel(ctx))
	return s
}

// run reads until one of the channels is closed, and then drains: what is out may be settled and its
// acks are sent, until DrainTimeout is over.
func (s *subscription) run(cancelled, closing <-chan struct{}) {
	defer s.Expire()
	var reading, keeping, acking sync.WaitGroup
	settled := make(chan struct{})
	reading.Go(s.read)
	keeping.Go(func() { s.keepLeases(settled) })
	acking.Go(func() { s.Acknowledge(settled) })

	select {
	case <-cancelled:
	case <-closing:
	}
	close(s.stop)
	deadline := time.AfterFunc(s.config.DrainTimeout, s.Expire)
	defer deadline.Stop()

	reading.Wait() // before following, to which it adds
	s.following.Wait()
	close(settled)
	keeping.Wait()
	acking.Wait()
	if left := s.table.clear(); left > 0 {
		s.log.Warn("entries stay pending: they were not settled in time", slog.Int("entries", left))
	}
}

func (s *subscription) stopping() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// deliver hands out a message of the entry. It is false if the subscription stopped before anybody took it.
func (s *subscription) deliver(d *delivery, msg *message.Message) bool {
	var ctx context.Context
	ctx, d.settled = context.WithCancel(s.ctx)
	d.refusal = refusal{}
	msg.SetContext(withRefusal(ctx, &d.refusal))
	d.msg = msg
	select {
	case s.output <- msg:
		return true
	case <-s.stop:
		d.settled()
		return false
	}
}

// follow waits for what becomes of an entry by itself.
func (s *subscription) follow(d *delivery) {
	for {
		select {
		case <-d.msg.Acked():
			d.settled()
			s.Acks.Add(d.id)
			return
		case <-d.msg.Nacked():
			d.settled()
			if !s.redeliver(d) {
				return
			}
		case <-s.ctx.Done():
			d.settled()
			select {
			case <-d.msg.Acked(): // in the last moment
				s.Acks.Add(d.id)
			default:
			}
			return
		}
	}
}

// redeliver hands out a refused message once more, after a while. It is false if that is not to be.
func (s *subscription) redeliver(d *delivery) bool {
	switch {
	case s.stopping(), errors.Is(d.refusal.err, ErrStopping):
		return false
	case errors.Is(d.refusal.err, ErrPutOff):
		s.table.release(d.id) // which leaves it pending, without anybody who renews its lease
		return false
	}
	d.refusals++
	if d.deliveries >= s.config.MaxDeliveries {
		s.deadLetter(d, refusedTooOften(d))
		return false
	}
	if !pause.For(retry.RetryDelay(d.refusals, s.config.RedeliveryDelay, s.config.RedeliveryDelayMax), s.stop) {
		return false
	}
	d.deliveries++
	// Redis is told of this delivery, so that a process that dies over an entry does not start to
	// count anew. While Redis is away the next one tells it.
	if answers, err := s.keep(d.id, d.deliveries); err == nil && answers[0] == leaseTaken {
		s.noteTaken(d.id)
		s.table.release(d.id)
		return false
	}
	// The handler may have changed the message: make it anew. It was decoded before.
	msg, err := DecodeEntry(d.id, d.values, d.deliveries)
	if err != nil {
		s.deadLetter(d, err)
		return false
	}
	if !s.deliver(d, msg) {
		return false
	}
	s.metrics.Redelivered.Inc()
	return true
}

func refusedTooOften(d *delivery) error {
	err := fmt.Errorf("refused by its handler, %d times in this process, after %d deliveries", d.refusals, d.deliveries)
	if d.refusal.err != nil {
		err = fmt.Errorf("%w: %w", err, d.refusal.err)
	}
	return err
}

// deadLetterTimeout bounds one try to store a dead letter.
const deadLetterTimeout = 10 * time.Second

// deadLetter stores the entry as a dead letter, however long the store of dead letters is away. The entry
// is acknowledged when it is stored; it stays pending if the subscription ends before.
func (s *subscription) deadLetter(d *delivery, reason error) {
	s.table.park(d.id)
	for {
		delay, stored := s.tryDeadLetter(d, reason)
		if stored {
			s.Acks.Add(d.id)
			return
		}
		if !pause.For(delay, s.stop) {
			return
		}
	}
}

func (s *subscription) tryDeadLetter(d *delivery, reason error) (delay time.Duration, stored bool) {
	s.storingDeadLetter.Lock()
	defer s.storingDeadLetter.Unlock()
	ctx, cancel := context.WithTimeout(s.ctx, deadLetterTimeout)
	defer cancel()
	entry, err := ReadEntry(ctx, s.config.Control, s.stream, d.id)
	if errors.Is(err, errEntryGone) {
		entry, err = Entry{Stream: s.stream, ID: d.id, Fields: FieldsOf(d.values)}, nil
	}
	if err == nil {
		entry.Deliveries = d.deliveries
		err = s.config.DeadLetter(ctx, entry, reason)
	}
	if err != nil {
		return s.deadLetterOutage.Failed(err), false
	}
	s.deadLetterOutage.Over()
	s.metrics.deadLettered.Inc()
	s.log.Warn("entry became a dead letter", slog.String("entry", d.id), slog.Int64("deliveries", d.deliveries),
		slog.Any("reason", reason))
	return 0, true
}

// ackCollector collects the ids of acknowledged entries until they can be sent.
type ackCollector struct {
	// Wake has a value while there may be ids.
	Wake chan struct{}

	mu  sync.Mutex
	ids []string
}

func newAckCollector() *ackCollector { return &ackCollector{Wake: make(chan struct{}, 1)} }

func (c *ackCollector) Add(id string) {
	c.mu.Lock()
	c.ids = append(c.ids, id)
	first := len(c.ids) == 1
	c.mu.Unlock()
	if first {
		select {
		case c.Wake <- struct{}{}:
		default:
		}
	}
}

func (c *ackCollector) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := c.ids
	c.ids = nil
	return ids
}

// ackPage bounds one XACK.
const ackPage = 1000

// Acknowledge sends acks: all those that came in while the last ones were under way. It ends when
// settled is closed, with the last of them.
func (s *subscription) Acknowledge(settled <-chan struct{}) {
	outage := retry.Outage{Log: s.log, Doing: "acknowledge entries"}
	for last := false; !last; {
		select {
		case <-s.Acks.Wake:
			// The handlers of a batch that was just committed are about to ack, all of them: let them.
			runtime.Gosched()
		case <-settled:
			last = true
		}
		for ids := range slices.Chunk(s.Acks.take(), ackPage) {
			s.sendAcks(ids, &outage)
		}
	}
}

// sendAcks sends one XACK until it has succeeded, or draining has taken too long; but once in any
// case. Entries whose ack does not arrive are handled once more by somebody, which has no effect.
func (s *subscription) sendAcks(ids []string, outage *retry.Outage) {
	for {
		ctx, cancel := retry.ForCall(s.ctx)
		err := s.config.Control.XAck(ctx, s.stream, s.config.Group, ids...).Err()
		cancel()
		if err == nil {
			outage.Over()
			s.metrics.acked.Add(float64(len(ids)))
			s.table.release(ids...)
			return
		}
		if !pause.For(outage.Failed(err), s.ctx.Done()) {
			return
		}
	}
}
