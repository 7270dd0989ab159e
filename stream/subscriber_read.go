package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/pace"
	"stampede/internal/retry"
	"stampede/lua"
	"stampede/reservation/order"
)

const (
	// readInterval is the shortest time between two reads of a stream to which orders come often, pacedOrders or more of
	// them in it: 500 a second.
	readInterval = 10 * time.Millisecond
	pacedOrders  = 5
)

// reader is the one goroutine of a subscription that takes entries from Redis: its own pending ones
// first, then orphans and new ones in turns. One goroutine reads both, because both need room in the
// same table and neither may starve the other.
type reader struct {
	*subscription
	outage retry.Outage

	// replayFrom is the last id of the own pending list that was read again, or "" after the last.
	replayFrom string
	// claimFrom is where the search for orphans continues, or "" between searches.
	claimFrom string
	claimDue  time.Time
	// grouped is false while the group may be missing.
	grouped bool
	// largest is the most orders that an entry of the last page held.
	largest int
	pace    pace.Pace
}

func (s *subscription) read() {
	r := &reader{
		subscription: s, largest: 1, outage: retry.Outage{Log: s.log, Doing: "read the stream"},
		pace: pace.Pace{Interval: readInterval, From: readInterval / pacedOrders},
	}
	r.startOver(nil)
	for {
		room := s.table.awaitRoom(s.stop)
		if s.stopping() {
			return
		}
		err := r.step(r.entriesFor(room))
		if err == nil {
			r.outage.Over()
			continue
		}
		r.startOver(err)
		if !retry.Pause(r.outage.Failed(err), s.stop) {
			return
		}
	}
}

// startOver restarts the replay after an error: the lost reply may have held entries that are now
// pending here, unknown to this process.
func (r *reader) startOver(after error) {
	r.replayFrom, r.claimFrom = "0", ""
	if isNoGroup(after) {
		r.grouped = false
	}
}

func (r *reader) step(room int) error {
	if !r.grouped {
		if err := r.createGroup(); err != nil {
			return err
		}
		r.grouped = true
	}
	if r.replayFrom != "" {
		return r.replay(room)
	}
	if r.claimFrom != "" || !time.Now().Before(r.claimDue) {
		if err := r.claim(room); err != nil {
			return err
		}
		orders := r.table.room()
		if orders < 1 || r.stopping() {
			return nil
		}
		room = r.entriesFor(orders)
	}
	return r.readNew(room)
}

// entriesFor returns how many entries to read where there is room for so many orders: as many as
// fit if they are like those of the last page, since Redis bounds a page by entries only.
func (r *reader) entriesFor(orders int) int {
	return min(max(orders/r.largest, 1), r.config.PageMax)
}

// createGroup creates the group if it is missing. It ignores that Redis is full: a full Redis refuses
// the command even if the group exists, and reading from the group makes room. If the group is
// missing, the next read reports that.
func (r *reader) createGroup() error {
	ctx, cancel := retry.ForCall(r.ctx)
	defer cancel()
	err := CreateGroup(ctx, r.config.Control, r.stream, r.config.Group)
	if redis.IsOOMError(err) {
		return nil
	}
	return err
}

// replay delivers a page of the entries that are pending for this consumer and not held here: those
// of an earlier process, or of a reply that never arrived.
func (r *reader) replay(room int) error {
	page, err := r.readGroup(r.replayFrom, room, 0)
	if err != nil {
		return err
	}
	if len(page) == 0 {
		r.replayFrom = ""
		return nil
	}
	held := r.table.hold(page)
	if err := r.countDeliveries(held); err != nil {
		r.forget(held)
		return err
	}
	r.replayFrom = page[len(page)-1].ID
	r.deliverPage(held)
	return nil
}

func (r *reader) readNew(room int) error {
	block := r.config.BlockTimeout
	if r.claimFrom != "" {
		block = 0 // orphans are waiting
	}
	page, err := r.readGroup(">", room, block)
	if err != nil {
		return err
	}
	held := r.table.hold(page)
	orders := 0
	for _, d := range held {
		orders += d.orders
	}
	pause := r.pace.Pause(orders, time.Now())
	r.deliverPage(held)
	if block > 0 && len(page) < room { // otherwise more are waiting
		retry.Pause(pause, r.stop)
	}
	return nil
}

// readOnce is an XREADGROUP that go-redis does not repeat when the connection breaks. A second try
// would read the following entries, and those of the first would stay unnoticed.
type readOnce struct{ *redis.XStreamSliceCmd }

func (readOnce) NoRetry() bool { return true }

// readGroup reads up to count entries after the id from this consumer's pending ones, or new ones
// if the id is ">". It waits for them up to block, or not at all. No entries are no error.
//
// Acks that wait are sent with a read of new entries, before it, so that Redis writes both to its disk at once.
func (r *reader) readGroup(after string, count int, block time.Duration) ([]redis.XMessage, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), block+retry.CallTimeout)
	defer cancel()
	args := []any{"xreadgroup", "group", r.config.Group, r.config.Consumer, "count", count}
	if block > 0 {
		args = append(args, "block", block.Milliseconds())
	}
	args = append(args, "streams", r.stream, after)
	cmd := readOnce{redis.NewXStreamSliceCmd(ctx, args...)}
	cmd.SetFirstKeyPos(int8(len(args) - 2))

	send := r.config.Client.Process
	if after == ">" {
		send = r.withAcks
	}
	err := send(ctx, cmd)
	switch {
	case errors.Is(err, redis.Nil):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read group %s of %s: %w", r.config.Group, r.stream, err)
	case len(cmd.Val()) == 0:
		return nil, nil
	}
	return cmd.Val()[0].Messages, nil
}

// withAcks sends the acks that wait and then the command, in one write. Acks that fail wait again.
func (r *reader) withAcks(ctx context.Context, cmd redis.Cmder) error {
	taken := r.acks.take(ackPage)
	if len(taken.ids) == 0 {
		return r.config.Client.Process(ctx, cmd)
	}
	var acked *redis.IntCmd
	_, _ = r.config.Client.Pipelined(ctx, func(p redis.Pipeliner) error { // each command's own error counts
		acked = p.XAck(ctx, r.stream, r.config.Group, taken.ids...)
		return p.Process(ctx, cmd)
	})
	if acked.Err() != nil {
		r.acks.putBack(taken)
	} else {
		r.noteSent(taken.ids)
		taken.tell(true)
	}
	return cmd.Err()
}

// countDeliveries reads how often entries were delivered that are not read for the first time.
func (r *reader) countDeliveries(held []*delivery) error {
	if len(held) == 0 {
		return nil
	}
	ctx, cancel := retry.ForCall(r.ctx)
	defer cancel()
	counts := make([]*redis.XPendingExtCmd, len(held))
	_, err := r.config.Control.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, d := range held {
			counts[i] = pipe.XPendingExt(ctx, &redis.XPendingExtArgs{
				Stream: r.stream, Group: r.config.Group, Start: d.id, End: d.id, Count: 1,
			})
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("count deliveries in %s: %w", r.stream, err)
	}
	for i, d := range held {
		if pending := counts[i].Val(); len(pending) == 1 {
			d.deliveries = pending[0].RetryCount
		}
	}
	return nil
}

// deliverPage delivers entries to the handlers, in their order. When draining has taken too long the
// rest stays pending.
func (r *reader) deliverPage(held []*delivery) {
	if len(held) == 0 {
		return
	}
	var lost []string
	var page atomic.Int64
	page.Store(int64(len(held)))
	r.largest = 1
	for i, d := range held {
		r.largest = max(r.largest, d.orders)
		if d.values == nil { // pending, and deleted from the stream
			lost = append(lost, d.id)
			page.Add(-1)
			continue
		}
		msg, err := DecodeEntry(d.id, d.values, d.deliveries)
		if err != nil {
			page.Add(-1)
			reason := fmt.Errorf("%w: %w", order.ErrUndecodable, err)
			r.following.Go(func() { r.deadLetter(d, reason) })
			continue
		}
		if !r.deliver(d, msg, &page) {
			r.forget(held[i:])
			break
		}
		r.following.Go(func() { r.follow(d) })
	}
	r.reportLost(lost)
	for _, id := range lost {
		r.acks.add(id, nil) // the content is lost
	}
}

func (r *reader) forget(held []*delivery) {
	for _, d := range held {
		r.table.release(d.id)
	}
}

// reportLost logs and counts entries whose content is gone: trimmed or deleted by a command that
// ignores pending entries.
func (s *subscription) reportLost(ids []string) {
	if len(ids) == 0 {
		return
	}
	s.metrics.lost.Add(float64(len(ids)))
	s.log.Error("entries were deleted from the stream before they were handled", slog.Int("entries", len(ids)),
		slog.Any("entry_ids", ids))
}

// claim takes over a page of entries that their consumers have not renewed for MinIdle. A round
// covers the whole pending list of the group: deleted entries count too, so an empty page may not
// be the last; only the cursor 0-0 is the end.
func (r *reader) claim(room int) error {
	ctx, cancel := retry.ForCall(r.ctx)
	defer cancel()
	if r.claimFrom == "" {
		r.claimFrom = "0-0"
		r.claimDue = time.Now().Add(r.config.ClaimInterval/2 + rand.N(r.config.ClaimInterval))
	}
	heldBefore := r.table.ids()
	page, next, deleted, err := r.config.Control.XAutoClaimWithDeleted(ctx, &redis.XAutoClaimArgs{
		Stream: r.stream, Group: r.config.Group, Consumer: r.config.Consumer,
		MinIdle: r.config.MinIdle, Start: r.claimFrom, Count: int64(room),
	}).Result()
	if err != nil {
		return fmt.Errorf("claim entries of %s: %w", r.stream, err)
	}
	held := r.table.hold(page)
	if err := r.countDeliveries(held); err != nil {
		r.forget(held)
		return err
	}
	if r.claimFrom = next; next == "0-0" {
		r.claimFrom = ""
		if err := r.reap(); err != nil {
			r.log.Warn("cannot delete silent consumers", slog.Any("error", err))
		}
	}
	if len(held) > 0 {
		r.metrics.claimed.Add(float64(len(held)))
		r.log.Info("claimed entries of silent consumers", slog.Int("entries", len(held)))
	}
	// Entries held here are not lost, or reported already: they were read before they were deleted. They
	// may be acknowledged and released while the answer is on its way, so those before the call count.
	r.reportLost(slices.DeleteFunc(deleted, func(id string) bool {
		_, held := heldBefore[id]
		return held
	}))
	r.deliverPage(held)
	return nil
}

// reap deletes consumers that have been silent for ConsumerIdleMax.
func (r *reader) reap() error {
	ctx, cancel := retry.ForCall(r.ctx)
	defer cancel()
	deleted, err := lua.Reap.Run(ctx, r.config.Control, []string{r.stream},
		r.config.Group, r.config.Consumer, r.config.ConsumerIdleMax.Milliseconds()).StringSlice()
	if err != nil {
		return fmt.Errorf("delete silent consumers of %s: %w", r.stream, err)
	}
	if len(deleted) > 0 {
		r.log.Info("deleted silent consumers", slog.Any("consumers", deleted))
	}
	return nil
}

// The answers of lua/keep.lua.
const (
	leaseKept  = "kept"
	leaseTaken = "taken"
	leaseGone  = "gone"
)

// keepPage is how many leases one script call renews.
const keepPage = 500

// keepLeases renews the leases of the entries held here until done is closed. Otherwise other
// consumers would claim them.
func (s *subscription) keepLeases(done <-chan struct{}) {
	outage := retry.Outage{Log: s.log, Doing: "renew the leases of entries"}
	interval := s.config.MinIdle / 4
	for retry.Pause(interval, done) {
		for ids := range slices.Chunk(s.table.due(time.Now().Add(-interval)), keepPage) {
			args := make([]any, 0, 2*len(ids))
			for _, id := range ids {
				args = append(args, id, 0)
			}
			now := time.Now()
			answers, err := s.keep(args...)
			if isNoGroup(err) {
				break // the reader is creating the group again
			}
			if err != nil {
				outage.Failed(err)
				break
			}
			outage.Over()
			s.noteLeases(ids, answers, now)
		}
	}
}

func (s *subscription) noteLeases(ids, answers []string, now time.Time) {
	for i, id := range ids {
		switch answers[i] {
		case leaseKept:
			s.table.renew(id, now)
		case leaseTaken:
			s.noteTaken(id)
		case leaseGone:
			s.table.endLease(id)
		}
	}
}

// noteTaken records that another consumer has the entry, because this process was too slow or had
// no connection to Redis for too long. That is harmless: handling an entry twice has one effect.
func (s *subscription) noteTaken(id string) {
	if s.table.endLease(id) {
		s.metrics.taken.Inc()
		s.log.Warn("another consumer took over an entry that is held here", slog.String("entry", id))
	}
}

// keep runs lua/keep.lua for pairs of an entry's id and its number of deliveries.
func (s *subscription) keep(pairs ...any) ([]string, error) {
	ctx, cancel := retry.ForCall(s.ctx)
	defer cancel()
	answers, err := lua.Keep.Run(ctx, s.config.Control, []string{s.stream},
		append([]any{s.config.Group, s.config.Consumer}, pairs...)...).StringSlice()
	if err != nil {
		return nil, fmt.Errorf("keep entries of %s: %w", s.stream, err)
	}
	if len(answers) != len(pairs)/2 {
		return nil, fmt.Errorf("keep entries of %s: %d answers for %d entries", s.stream, len(answers), len(pairs)/2)
	}
	return answers, nil
}
