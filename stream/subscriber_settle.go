package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"stampede/internal/retry"
	"stampede/reservation/order"
)

// subscription is one stream being read, from Subscribe to the end of its channel.
type subscription struct {
	config  *Config
	stream  string
	log     *slog.Logger
	metrics *streamMetrics
	output  chan *message.Message
	table   *entryTable
	acks    *ackCollector

	// stop is closed when reading and delivering must end.
	stop chan struct{}
	// ctx is the parent of every message's context. It ends when draining has taken too long.
	ctx    context.Context
	expire context.CancelFunc
	// following counts the goroutines of delivered entries and of those being stored as dead
	// letters.
	following sync.WaitGroup

	// storingDeadLetter is held while a dead letter is stored, so that an unreachable store gets
	// one request at a time. It guards deadLetterOutage.
	storingDeadLetter sync.Mutex
	deadLetterOutage  retry.Outage
}

func newSubscription(ctx context.Context, config *Config, metrics *subscriberMetrics, stream string) *subscription {
	counters := metrics.of(stream)
	log := config.Logger.With(slog.String("stream", stream), slog.String("group", config.Group),
		slog.String("consumer", config.Consumer))
	s := &subscription{
		config: config, stream: stream, log: log, metrics: counters,
		output:           make(chan *message.Message),
		table:            newEntryTable(config.InFlightMax, counters.inFlight),
		acks:             newAckCollector(),
		stop:             make(chan struct{}),
		deadLetterOutage: retry.Outage{Log: log, Doing: "store dead letters"},
	}
	s.ctx, s.expire = context.WithCancel(context.WithoutCancel(ctx))
	return s
}

// run reads until one of the channels is closed, and then drains: delivered messages may be settled
// and their acks are sent, until DrainTimeout is over.
func (s *subscription) run(cancelled, closing <-chan struct{}) {
	defer s.expire()
	var reading, keeping, acking sync.WaitGroup
	settled := make(chan struct{})
	reading.Go(s.read)
	keeping.Go(func() { s.keepLeases(settled) })
	acking.Go(func() { s.acknowledge(settled) })

	select {
	case <-cancelled:
	case <-closing:
	}
	close(s.stop)
	deadline := time.AfterFunc(s.config.DrainTimeout, s.expire)
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

// deliver delivers a message of the entry. Page is nil if it is delivered alone. What has been read is
// delivered after a stop as well: left pending, it would wait until another consumer may claim it.
// It returns false if draining has taken too long.
func (s *subscription) deliver(d *delivery, msg *message.Message, page *atomic.Int64) bool {
	var ctx context.Context
	ctx, d.cancel = context.WithCancel(s.ctx)
	d.notes = notes{page: page}
	msg.SetContext(withNotes(ctx, &d.notes))
	d.msg = msg
	select {
	case s.output <- msg:
		return true
	case <-s.ctx.Done():
		d.cancel()
		return false
	}
}

// follow waits until one entry is settled.
func (s *subscription) follow(d *delivery) {
	for {
		select {
		case <-d.msg.Acked():
			d.cancel()
			s.acks.add(d.id, d.notes.acked)
			return
		case <-d.msg.Nacked():
			d.cancel()
			if !s.redeliver(d) {
				return
			}
		case <-s.ctx.Done():
			d.cancel()
			select {
			case <-d.msg.Acked(): // at the last moment
				s.acks.add(d.id, d.notes.acked)
			default:
			}
			return
		}
	}
}

// redeliver delivers a refused message again after a wait. It returns false if the subscription
// stops or loses the entry.
func (s *subscription) redeliver(d *delivery) bool {
	switch {
	case s.stopping(), errors.Is(d.notes.refusal, ErrStopping):
		return false
	case errors.Is(d.notes.refusal, ErrDeferred):
		s.table.release(d.id) // it stays pending, and its lease is not renewed
		return false
	}
	d.refusals++
	if d.deliveries >= s.config.MaxDeliveries {
		s.deadLetter(d, refusedTooOften(d))
		return false
	}
	if !retry.Pause(retry.Delay(d.refusals, s.config.RedeliveryDelay, s.config.RedeliveryDelayMax), s.stop) {
		return false
	}
	d.deliveries++
	// Record this delivery in Redis, so that the count survives a crash. While Redis is away the
	// next delivery records it.
	if answers, err := s.keep(d.id, d.deliveries); err == nil && answers[0] == leaseTaken {
		s.noteTaken(d.id)
		s.table.release(d.id)
		return false
	}
	// The handler may have changed the message: decode it again, which succeeded before.
	msg, err := DecodeEntry(d.id, d.values, d.deliveries)
	if err != nil {
		s.deadLetter(d, err)
		return false
	}
	if !s.deliver(d, msg, nil) {
		return false
	}
	s.metrics.redelivered.Inc()
	return true
}

func refusedTooOften(d *delivery) error {
	err := fmt.Errorf("refused by its handler, %d times in this process, after %d deliveries", d.refusals, d.deliveries)
	if d.notes.refusal != nil {
		err = fmt.Errorf("%w: %w", err, d.notes.refusal)
	}
	return err
}

// deadLetterTimeout bounds one try to store a dead letter.
const deadLetterTimeout = 10 * time.Second

// deadLetter stores the entry as a dead letter, and retries while the store is away. The entry is
// acknowledged when it is stored; it stays pending if the subscription ends before.
func (s *subscription) deadLetter(d *delivery, reason error) {
	s.table.park(d.id)
	for {
		delay, stored := s.tryDeadLetter(d, reason)
		if stored {
			s.acks.add(d.id, nil)
			return
		}
		if !retry.Pause(delay, s.stop) {
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
		slog.Any("order_ids", ordersOf(entry, reason)), slog.Any("reason", reason))
	return 0, true
}

// loggedMax bounds the ids in a line of the log.
const loggedMax = 10

// ordersOf returns the orders of an entry that could not be recorded, or the first of them, for the log. An entry that
// cannot be read may still name its first order.
func ordersOf(entry Entry, reason error) (ids []uuid.UUID) {
	var refused OrderErrors
	if errors.As(reason, &refused) {
		for _, of := range refused[:min(len(refused), loggedMax)] {
			ids = append(ids, of.OrderID)
		}
	} else if id, err := order.ParseCompactID(entry.Field(FieldUUID)); err == nil {
		ids = append(ids, id)
	}
	return ids
}

// acks are acknowledged entries.
type acks struct {
	ids  []string
	told []func(sent bool) // to call when they are sent, or given up
}

func (a acks) tell(sent bool) {
	for _, call := range a.told {
		call(sent)
	}
}

// ackCollector collects the acknowledged entries until they can be sent.
type ackCollector struct {
	// wake has a value while there may be ids.
	wake chan struct{}

	mu    sync.Mutex
	waits acks
}

func newAckCollector() *ackCollector { return &ackCollector{wake: make(chan struct{}, 1)} }

func (c *ackCollector) add(id string, told func(sent bool)) {
	c.mu.Lock()
	c.waits.ids = append(c.waits.ids, id)
	if told != nil {
		c.waits.told = append(c.waits.told, told)
	}
	first := len(c.waits.ids) == 1
	c.mu.Unlock()
	if first {
		c.signal()
	}
}

// putBack has acks wait again that were not sent.
func (c *ackCollector) putBack(a acks) {
	c.mu.Lock()
	c.waits = acks{append(a.ids, c.waits.ids...), append(a.told, c.waits.told...)}
	c.mu.Unlock()
	c.signal()
}

func (c *ackCollector) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// take returns all that wait, unless there are more than most.
func (c *ackCollector) take(most int) (taken acks) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.waits.ids) <= most {
		taken, c.waits = c.waits, acks{}
	}
	return taken
}

const (
	// ackPage bounds one XACK.
	ackPage = 1000
	// ackWait is how long acks wait for a read that takes them along.
	ackWait = 25 * time.Millisecond
)

// acknowledge sends the acks that no read takes along; each call carries all that arrived before it. When settled
// is closed it sends the rest and returns.
func (s *subscription) acknowledge(settled <-chan struct{}) {
	outage := retry.Outage{Log: s.log, Doing: "acknowledge entries"}
	for last := false; !last; {
		select {
		case <-s.acks.wake:
			// The handlers of a committed batch are all about to ack: yield.
			runtime.Gosched()
			// A table that fills up waits for its acks, and so does the next read.
			if s.table.room() > s.config.InFlightMax/2 {
				retry.Pause(ackWait, settled)
			}
		case <-settled:
			last = true
		}
		taken := s.acks.take(math.MaxInt)
		sent := true
		for ids := range slices.Chunk(taken.ids, ackPage) {
			sent = s.sendAcks(ids, &outage) && sent
		}
		taken.tell(sent)
	}
}

// sendAcks sends one XACK, at least once, until it succeeds or draining has taken too long. Entries
// whose ack does not arrive are handled again, which has no effect.
func (s *subscription) sendAcks(ids []string, outage *retry.Outage) (sent bool) {
	for {
		ctx, cancel := retry.ForCall(s.ctx)
		err := s.config.Control.XAck(ctx, s.stream, s.config.Group, ids...).Err()
		cancel()
		if err == nil {
			outage.Over()
			s.noteSent(ids)
			return true
		}
		if !retry.Pause(outage.Failed(err), s.ctx.Done()) {
			return false
		}
	}
}

// noteSent makes room for other entries.
func (s *subscription) noteSent(ids []string) {
	s.metrics.acked.Add(float64(len(ids)))
	s.table.release(ids...)
}
