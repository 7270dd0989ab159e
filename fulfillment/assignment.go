package fulfillment

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"stampede/fulfillment/metrics"
	"stampede/internal/retry"
	"stampede/reservation"
	"stampede/stream"
)

const (
	// looksPerIdle is how often a worker announces itself and looks for others within MinIdle.
	looksPerIdle = 8
	// A worker that has missed looksMissed looks is not present any more. So its partitions have
	// another reader within half of MinIdle.
	looksMissed = 3
	// twinLooks is how many looks more with a twin than without make it certain, and aloneLooks how many more without
	// it: a worker that looks a little more often than its twin finds it in half of its looks only.
	twinLooks, aloneLooks = 3, 12
)

var errTwin = errors.New("another process uses this worker's name: give each worker its own STAMPEDE_CONSUMER")

// assignment decides which partitions this worker reads: those in which it has the highest score of the workers that
// are present. Two readers of a partition are safe, because the consumer group gives each entry to one of them. A
// partition without a reader would be a fault. So a worker that sees no other reads everything, and a worker that
// cannot look keeps what it reads.
type assignment struct {
	*Worker
	presence stream.Presence
	interval time.Duration
	// others are the names of the other workers, as the last successful look at a partition found
	// them.
	others map[int][]string
	// readers are the partitions that are read, and those whose reader drains.
	readers map[int]*reader
	// twins counts the looks that found a process of this worker's name, less those that found none. Such processes
	// deliver each other's pending entries, and count as one reader.
	twins int
	twin  *metrics.Trouble
}

// reader reads one partition.
type reader struct {
	cancel   context.CancelFunc
	draining bool
	drained  chan struct{}
}

// drain lets the reader finish what it has read, and end.
func (r *reader) drain() {
	r.draining = true
	r.cancel()
}

func (r *reader) hasDrained() bool {
	select {
	case <-r.drained:
		return true
	default:
		return false
	}
}

// readAssigned reads this worker's share of the partitions until ctx is done, and then waits for the next readers.
func (w *Worker) readAssigned(ctx context.Context) error {
	interval := w.config.MinIdle / looksPerIdle
	s := &assignment{
		Worker: w, interval: interval,
		presence: stream.Presence{
			Control: w.config.Catalog.Store.Redis, Group: reservation.Group, Consumer: w.config.Consumer,
			SilentMax: looksMissed * interval,
		},
		others: make(map[int][]string), readers: make(map[int]*reader),
		twin: metrics.NewTrouble(w.config.Logger, w.metrics, metrics.StepName, "have the name of this worker alone"),
	}
	readers, reading := errgroup.WithContext(context.WithoutCancel(ctx)) // it continues during the hand-over
	ctx, end := context.WithCancel(ctx)
	defer end()
	defer context.AfterFunc(reading, end)() // when a reader fails
	looking := retry.Outage{Log: w.config.Logger, Doing: "look for the other workers"}
	for {
		// A worker without Postgres records nothing: others may read in its place.
		if !w.postgresAway.Load() {
			looking.Note(s.look(ctx))
		}
		s.assign(reading, readers)
		if !retry.Pause(retry.Delay(1, interval, interval), ctx.Done()) {
			break
		}
	}
	if reading.Err() == nil {
		s.handOver(ctx)
	}
	for _, r := range s.readers {
		r.drain()
	}
	return readers.Wait()
}

// look announces this worker in all partitions, and finds the others.
func (s *assignment) look(ctx context.Context) error {
	var failed []error
	twin := false
	for partition, found := range s.presence.Announce(ctx, s.streams()) {
		if failed = append(failed, found.Err); found.Err == nil {
			s.others[partition] = slices.Collect(maps.Keys(found.Others))
		}
		twin = twin || found.Twin
	}
	s.noteTwin(twin)
	err := retry.Join(failed...)
	if err == nil {
		alive := map[string]bool{s.config.Consumer: true}
		for _, names := range s.others {
			for _, name := range names {
				alive[name] = true
			}
		}
		s.survey.NoteWorkers(len(alive), s.interval)
	}
	return err
}

func (s *assignment) noteTwin(found bool) {
	if found {
		if s.twins++; s.twins >= twinLooks {
			s.twins = aloneLooks
		}
	} else {
		s.twins = max(s.twins-1, 0)
	}
	switch {
	case s.twins >= twinLooks:
		s.twin.Failed(errTwin)
	case s.twins == 0:
		s.twin.Over()
	}
}

// assign starts and drains readers.
func (s *assignment) assign(ctx context.Context, readers *errgroup.Group) {
	changed, more := false, false
	others := map[string]bool{} // that read
	for partition, key := range s.streams() {
		first := stream.First(key, append(s.others[partition], s.config.Consumer))
		mine := first == s.config.Consumer
		others[first] = true
		r := s.readers[partition]
		if r != nil && r.hasDrained() {
			delete(s.readers, partition)
			r = nil
		}
		switch {
		case mine && r == nil:
			// A former reader has drained: two would deliver the same pending entries.
			s.readers[partition] = s.start(ctx, readers, partition)
			s.reads[partition].Store(true)
			changed, more = true, true
		case !mine && r != nil && !r.draining:
			r.drain()
			s.reads[partition].Store(false)
			changed = true
		}
	}
	read, idle := len(s.read()), ""
	if read == 0 {
		idle = "others read all partitions: " + strings.Join(slices.Sorted(maps.Keys(others)), ", ")
	}
	s.metrics.Reads(read, idle)
	if more {
		select {
		case s.takenOver <- struct{}{}:
		default:
		}
	}
	if changed {
		s.config.Logger.Info("this worker's share of the partitions has changed", "reads", s.read(), "of", len(s.streams()))
	}
}

// start starts to read a partition.
func (s *assignment) start(ctx context.Context, readers *errgroup.Group, partition int) *reader {
	ctx, cancel := context.WithCancel(ctx)
	r := &reader{cancel: cancel, drained: make(chan struct{})}
	shown := s.metrics.Readers.WithLabelValues(s.config.Catalog.Store.Keys.Orders(partition))
	shown.Set(1)
	readers.Go(func() error {
		defer close(r.drained)
		defer shown.Set(0)
		defer cancel()
		return s.fulfil(ctx, partition)
	})
	return r
}

// read returns the partitions that this worker reads, in order.
func (s *assignment) read() (partitions []int) {
	for partition, r := range s.readers {
		if !r.draining {
			partitions = append(partitions, partition)
		}
	}
	slices.Sort(partitions)
	return partitions
}

// handOver ends the presence of this worker and returns when the next worker of each partition has
// looked since, and so reads it. Until then this worker reads on, so no order waits.
func (s *assignment) handOver(ctx context.Context) {
	streams := s.streams()
	s.presence.Withdraw(ctx, streams)
	withdrawn := time.Now()
	for {
		asked := time.Now()
		if s.isTakenOver(s.presence.Look(ctx, streams), asked.Sub(withdrawn)) {
			return
		}
		retry.Pause(s.interval/looksPerIdle, nil)
	}
}

// isTakenOver reports whether the next worker of each partition that is read here has announced itself
// within that time. A partition without another worker has no next one. It is also true if Redis
// cannot be asked.
func (s *assignment) isTakenOver(present []stream.Present, within time.Duration) bool {
	for _, partition := range s.read() {
		found := present[partition]
		if found.Err != nil || len(found.Others) == 0 {
			continue
		}
		next := stream.First(s.config.Catalog.Store.Keys.Orders(partition), slices.Collect(maps.Keys(found.Others)))
		if found.Others[next] >= within {
			return false
		}
	}
	return true
}
