package stream

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/lua"
)

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
