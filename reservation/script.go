package reservation

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/internal/tracing"
	"stampede/reservation/order"
)

// saleReply is the part of the reply of lua/reserve.lua about the sale.
type saleReply struct {
	generation int64
	sequence   int64 // the highest assigned, 0 if none
	staleEpoch bool
	rewound    bool
	lost       bool // Redis has no such sale
	// soldOut is true if nothing is left, of an item in a sale with items, and a request got that answer. In a closed or
	// paused sale with nothing left, requests get another answer.
	soldOut bool
}

// target is one shard of a sale in one epoch, as the script's arguments. It is safe for concurrent use.
type target struct {
	sale      uuid.UUID
	partition int
	epoch     int64
	codes     []string // of the sale's items
	// The arguments are strings.
	keys     [4]any
	epochArg any
	metadata any
	// seen is the highest sequence that this target got. A sale with a lower one was set back.
	seen atomic.Int64
}

func newTarget(k Keys, sale uuid.UUID, partition int, p address) *target {
	return &target{
		sale: sale, partition: partition, epoch: p.epoch, codes: p.codes,
		keys:     [4]any{k.Sale(partition, sale), k.Buyers(partition, sale), k.Orders(partition), k.Ended(partition, sale)},
		epochArg: strconv.FormatInt(p.epoch, 10),
		metadata: order.ReservedMetadataPrefix(sale, p.epoch, p.codes != nil),
	}
}

func (t *target) see(sequence int64) {
	for seen := t.seen.Load(); seen < sequence && !t.seen.CompareAndSwap(seen, sequence); seen = t.seen.Load() {
	}
}

// reserveScript calls lua/reserve.lua and reads its answers. It reuses its argument list, so it
// belongs to one goroutine.
type reserveScript struct {
	args []any
	seen string
}

// tries is how often a call is sent at most. The script recognizes a repeat, so a retry is safe.
const tries = 3

// run runs the script for all calls and sets their answers. Its error is for all of them, and wraps
// ErrUnavailable if certainly nothing was reserved, or else ErrOutcomeUnknown.
func (rs *reserveScript) run(
	ctx context.Context, s *Store, t *target, batch []*call,
) (sale saleReply, err error) {
	rs.seen = strconv.FormatInt(t.seen.Load(), 10)
	metadata := t.metadata
	if traced := traceCall(t, batch); traced != nil {
		metadata = order.ReservedMetadataPrefix(t.sale, t.epoch, t.codes != nil, traced.traces...)
		defer func() { traced.end(err) }()
	}
	rs.args = append(rs.args[:0], "evalsha", nil, len(t.keys), t.keys[0], t.keys[1], t.keys[2], t.keys[3], t.epochArg,
		&rs.seen, metadata)
	for _, c := range batch {
		c.answer = Answer{} // here, because the goroutine of the request should not write what this one writes next
		rs.args = append(rs.args, &c.request.User, &c.orderID, &c.key, &c.quantity)
	}
	defer clear(rs.args) // calls go back to their pool: do not keep them

	reply, maybeDone, err := s.callReserve(ctx, t.partition, rs.args, len(batch))
	if err != nil {
		return saleReply{}, err
	}
	sale, err = readAnswers(reply.answers, batch, t)
	t.see(sale.sequence)
	if !reply.replicated {
		for _, c := range batch {
			if c.answer.Reservation.OrderID != uuid.Nil {
				c.err = errNotReplicated
			}
		}
	}
	if err == nil && maybeDone && (sale.staleEpoch || sale.rewound || sale.lost) {
		err = errStockReplaced
	}
	return sale, err
}

// errStockReplaced: an earlier try got no answer, and a later answer is about another stock, so it
// does not show what the earlier try did.
var errStockReplaced = fmt.Errorf("%w: the stock of the sale was lost or rebuilt between two tries", ErrOutcomeUnknown)

// errNotReplicated: the replicas did not confirm the reservation in time, so a failover may lose it.
var errNotReplicated = fmt.Errorf("%w: the replicas did not confirm the reservation", ErrOutcomeUnknown)

// replicationWait is how long replicas may take to confirm a call. Redis counts them without a delay of its own.
const replicationWait = 50 * time.Millisecond

// reserveReply is a reply of lua/reserve.lua.
type reserveReply struct {
	answers []string
	// replicated is false if too few replicas confirmed that they have all writes up to this call.
	replicated bool
}

// once is a command that go-redis does not retry. Only a caller that sees every try can distinguish a
// failure from an unknown outcome: a last try that could not connect says nothing about the first.
type once struct{ *redis.StringSliceCmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// callReserve sends the script's call until an answer comes back, at most tries times. maybeDone is
// true if a try got no answer and may have been executed.
func (s *Store) callReserve(
	ctx context.Context, partition int, args []any, requests int,
) (reply reserveReply, maybeDone bool, err error) {
	for try := range tries {
		if try > 0 && !retry.Pause(time.Duration(try)*20*time.Millisecond, ctx.Done()) {
			break
		}
		var sent bool
		began := time.Now()
		if reply, sent, err = s.sendReserve(ctx, partition, args); sent {
			s.options.Observer.Reserve(requests, time.Since(began))
		}
		if err == nil {
			return reply, maybeDone, nil
		}
		answered, temporary := refusal(err)
		if answered && !temporary || errors.Is(err, ErrUnverifiedServer) {
			break
		}
		if temporary {
			// A demoted server keeps its scripts and may become a primary again: verify it first.
			s.fences[partition].Store(nil)
		}
		maybeDone = maybeDone || sent && !answered && !neverSent(err)
	}
	if maybeDone {
		return reserveReply{}, maybeDone, fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	return reserveReply{}, maybeDone, fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// sendReserve sends the call once, through the fence of its partition. Sent is false if the fence
// stopped it.
func (s *Store) sendReserve(
	ctx context.Context, partition int, args []any,
) (reply reserveReply, sent bool, err error) {
	f := s.fences[partition].Load()
	if f != nil {
		args[1] = f.reserve
		if reply, err = s.processReserve(ctx, partition, args); !redis.HasErrorPrefix(err, "NOSCRIPT") {
			return reply, true, err
		}
	}
	if f, err = s.admit(ctx, partition); err != nil {
		return reserveReply{}, false, err
	}
	args[1] = f.reserve
	reply, err = s.processReserve(ctx, partition, args)
	return reply, true, err
}

// processReserve sends the command, and with ReplicaAcks waits for the replicas on the same connection.
func (s *Store) processReserve(ctx context.Context, partition int, args []any) (reserveReply, error) {
	cmd := once{redis.NewStringSliceCmd(ctx, args...)}
	if s.options.ReplicaAcks == 0 {
		err := s.Redis.Process(ctx, cmd)
		return reserveReply{cmd.Val(), true}, err
	}
	cluster, onCluster := s.Redis.(*redis.ClusterClient)
	pipe := s.Redis.Pipeline()
	if onCluster { // whose pipeline would send WAIT, which has no key, to any node
		master, err := cluster.MasterForKey(ctx, s.Keys.Server(partition))
		if err != nil {
			return reserveReply{}, err
		}
		pipe = master.Pipeline()
	}
	acks := redis.NewIntCmd(ctx, "wait", s.options.ReplicaAcks, replicationWait.Milliseconds())
	_ = pipe.Process(ctx, cmd)
	_ = pipe.Process(ctx, acks)
	_, _ = pipe.Exec(ctx) // each command's own error counts
	if onCluster && cmd.Err() != nil {
		cluster.ReloadState(ctx) // its master may be another one
	}
	return reserveReply{cmd.Val(), acks.Val() >= int64(s.options.ReplicaAcks)}, cmd.Err()
}

// refusal reports whether err is an answer of Redis, so that this try did nothing, and whether it is
// temporary.
func refusal(err error) (answered, temporary bool) {
	var answer redis.Error
	if !errors.As(err, &answer) {
		return false, false
	}
	if errors.Is(err, redis.TxFailedErr) { // the record of the server changed during the check of the fence
		return true, true
	}
	for _, prefix := range []string{
		"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOSCRIPT", "MOVED", "ASK",
	} {
		if redis.HasErrorPrefix(err, prefix) {
			return true, true
		}
	}
	return true, false
}

// neverSent is true if there was no connection to send the command on.
func neverSent(err error) bool {
	var op *net.OpError
	return errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) ||
		errors.Is(err, redis.ErrClosed) ||
		errors.As(err, &op) && op.Op == "dial"
}

// readAnswers reads the reply of lua/reserve.lua into the calls that it answers.
func readAnswers(reply []string, batch []*call, t *target) (saleReply, error) {
	const header = 3
	if len(reply) != header+len(batch) {
		return saleReply{}, fmt.Errorf("%w: the script returned %d values for %d requests", ErrOutcomeUnknown, len(reply),
			len(batch))
	}
	var numbers [header]int64
	var leftItems order.Items
	for i := range numbers {
		if left := reply[i]; i == 1 && t.codes != nil && left[0] > '9' {
			leftItems = order.Lines(left).Named(t.codes)
			continue
		}
		n, err := strconv.ParseInt(reply[i], 10, 64)
		if err != nil {
			return saleReply{}, fmt.Errorf("%w: read the script's answer: %w", ErrOutcomeUnknown, err)
		}
		numbers[i] = n
	}
	now := time.UnixMilli(numbers[0]).UTC()
	left, sale := numbers[1], saleReply{generation: numbers[2]}
	for i, c := range batch {
		var err error
		switch word, rest, _ := strings.Cut(reply[header+i], " "); word {
		case "stale-epoch":
			sale.staleEpoch = true
		case "rewound":
			sale.rewound = true
		case "unknown-sale":
			sale.lost, err = true, ErrLostSale
		case "damaged":
			err = ErrReservationDamaged
		case "wrong-items":
			err = errWrongItems
		default:
			err = c.readAnswer(word, rest, now)
			if r := &c.answer.Reservation; r.Epoch == 0 && r.OrderID != uuid.Nil {
				r.Epoch = t.epoch
			}
			if t.codes != nil && err == nil {
				sale.soldOut = c.nameItems(t.codes, order.Lines(rest), leftItems) || sale.soldOut
			}
			if c.answer.Verdict == Reserved {
				sale.sequence = max(sale.sequence, c.answer.Reservation.Sequence)
			}
			sale.soldOut = sale.soldOut || left == 0 && t.codes == nil && c.answer.Verdict == SoldOut
		}
		c.err = err
	}
	return sale, nil
}

func (c *call) readAnswer(word, rest string, now time.Time) (err error) {
	c.answer = Answer{Verdict: Verdict(word)}
	switch a := &c.answer; a.Verdict {
	case Reserved:
		a.Reservation = order.Reservation{
			OrderID: c.order, Quantity: c.request.Quantity, Lines: c.lines, ReservedAt: now,
		}
		a.Reservation.Sequence, err = strconv.ParseInt(rest, 10, 64)
	case Replayed, AlreadyPurchased:
		a.Reservation, _, err = order.ParseReservation(rest)
	case OrderEnded:
		var ended EndedOrder
		ended, err = ParseEnded(rest)
		a.Reservation = order.Reservation{OrderID: ended.OrderID, Quantity: ended.Quantity, Lines: ended.Lines}
		a.Status = ended.Status
	case NotOpen:
		var ms int64
		ms, err = strconv.ParseInt(rest, 10, 64)
		a.OpensAt = time.UnixMilli(ms).UTC()
	case OverLimit:
		a.Limit, _, err = order.ParseUnits(rest)
	case Withdrawn, KeyReused, Paused, OffersOnly, Ended, Retired, SoldOut:
	default:
		err = errors.New("unknown word")
	}
	if err != nil {
		c.answer = Answer{}
		return fmt.Errorf("%w: read the script's answer %q: %w", ErrOutcomeUnknown, word+" "+rest, err)
	}
	return nil
}

// tracedCall holds the spans of one call of the script, one for each traced purchase in it: each is in the trace of its
// purchase. The first one has links to the requests of the others, and the others have a link to it.
type tracedCall struct {
	spans  []tracing.Span
	traces []order.Trace
}

// traceCall starts the spans of a call. It returns nil if no purchase in it is traced, as nearly always.
func traceCall(t *target, batch []*call) *tracedCall {
	var traced []*call
	for _, c := range batch {
		if c.span.On() && len(traced) < order.MaxTraces {
			traced = append(traced, c)
		}
	}
	if traced == nil {
		return nil
	}
	others := make([]string, len(traced)-1)
	for i, c := range traced[1:] {
		others[i] = c.span.Parent()
	}
	made := &tracedCall{}
	for i, c := range traced {
		links := others
		if i > 0 {
			links = []string{made.traces[0].Parent}
		}
		span := c.span.Redis("reserve.lua", links...)
		span.Number("stampede.purchases", int64(len(batch)))
		span.Number("stampede.partition", int64(t.partition))
		made.spans = append(made.spans, span)
		made.traces = append(made.traces, order.Trace{Order: c.orderID, Parent: span.Parent()})
	}
	return made
}

func (t *tracedCall) end(err error) {
	for _, span := range t.spans {
		span.Fail(err)
		span.End()
	}
}
