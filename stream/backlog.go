package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"stampede/internal/retry"
	"stampede/internal/telemetry"
	"stampede/lua"
	"stampede/reservation/order"
)

// EntriesPerTrip is how many stream entries are read in one round trip to Redis: with the orders of
// full entries, some 6 MB.
const EntriesPerTrip = 250

// EntryAfter reports whether the entry with id x comes later in its stream than that with id y.
func EntryAfter(x, y string) bool {
	halves := func(id string) (ms, n uint64) {
		first, second, _ := strings.Cut(id, "-")
		ms, _ = strconv.ParseUint(first, 10, 64) // Redis wrote it
		n, _ = strconv.ParseUint(second, 10, 64)
		return ms, n
	}
	xms, xn := halves(x)
	yms, yn := halves(y)
	return xms > yms || xms == yms && xn > yn
}

// Backlog is how far a group is behind its stream.
type Backlog struct {
	// Length is how many entries the stream holds, handled ones that were not trimmed yet included.
	Length int64
	// Lag is how many entries were not delivered to the group yet. Few are counted. For more, Redis's own figure counts
	// if it can be right; else they are counted up to LagCountMax. It is valid only if LagKnown.
	Lag      int64
	LagKnown bool
	// Pending is how many entries were given to a consumer and are not acknowledged.
	Pending int64
	// OldestPendingAge is how long ago the oldest pending entry was appended; 0 if there is none.
	OldestPendingAge time.Duration
	// OldestWaitingAge is how long ago the oldest entry was appended that is not acknowledged; 0 if there is none.
	OldestWaitingAge time.Duration

	counted bool // entry by entry
}

// LagCountMax bounds the entries of a stream that are counted one by one. fewEntries are counted in any case.
const (
	LagCountMax = 1000
	fewEntries  = 16
)

// Waiting is how many entries are not acknowledged; known is false if Redis cannot report it.
func (b Backlog) Waiting() (entries int64, known bool) { return b.Lag + b.Pending, b.LagKnown }

// waitingOrders corrects an estimate of the orders that are not recorded. Rejected and voided orders
// are behind forever, and the latest may be missing; but each waiting entry has at least one order.
func (b Backlog) waitingOrders(estimate int64) int64 {
	least, known := b.Waiting()
	orders := max(estimate, least)
	if known {
		orders = min(orders, least*order.MaxPerMessage)
	}
	return orders
}

// Clock returns the time of the server that has a key, which the ids in its streams hold; 1970 if there is no such key.
func Clock(ctx context.Context, rdb redis.UniversalClient, key string) (time.Time, error) {
	ms, err := lua.Clock.Run(ctx, rdb, []string{key}).Int64()
	if err != nil {
		return time.Time{}, fmt.Errorf("read the clock of the server of %s: %w", key, err)
	}
	return time.UnixMilli(ms), nil
}

// ReadBacklog reads how far the group is behind. A missing stream has no backlog; a missing group
// has the whole stream before it.
func ReadBacklog(ctx context.Context, rdb redis.UniversalClient, stream, group string) (Backlog, error) {
	var (
		groups  *redis.XInfoGroupsCmd
		info    *redis.XInfoStreamCmd
		pending *redis.XPendingCmd
		clock   *redis.Cmd
	)
	_, _ = rdb.Pipelined(ctx, func(pipe redis.Pipeliner) error { // each command's own error counts
		groups = pipe.XInfoGroups(ctx, stream) // first, so that entries added meanwhile count as lag
		info = pipe.XInfoStream(ctx, stream)
		pending = pipe.XPending(ctx, stream, group)
		clock = lua.Clock.Eval(ctx, pipe, []string{stream}) // ids hold the server's clock, so ages use it too
		return nil
	})
	err := errors.Join(UnlessMissing(groups.Err()), UnlessMissing(info.Err()), UnlessMissing(pending.Err()))
	ms, clockErr := clock.Int64()
	if err = errors.Join(err, clockErr); err != nil {
		return Backlog{}, fmt.Errorf("read backlog of %s: %w", stream, err)
	}

	now := time.UnixMilli(ms)
	b := Backlog{LagKnown: true}
	if p := pending.Val(); p != nil && p.Count > 0 {
		b.Pending = p.Count
		b.OldestPendingAge = entryAge(p.Lower, now)
	}
	if s := info.Val(); s != nil && info.Err() == nil {
		b.Length = s.Length
		// The group may not exist yet: then no entry was delivered.
		reading := redis.XInfoGroup{LastDeliveredID: "0-0", Lag: s.Length}
		if i := slices.IndexFunc(groups.Val(), func(g redis.XInfoGroup) bool { return g.Name == group }); i >= 0 {
			reading = groups.Val()[i]
		}
		first, err := b.findLag(ctx, rdb, stream, reading, s)
		if err != nil {
			return Backlog{}, fmt.Errorf("read backlog of %s: %w", stream, err)
		}
		b.OldestWaitingAge = entryAge(first, now)
	}
	if b.Pending > 0 {
		// Entries are delivered in their order, unless the group was set back.
		b.OldestWaitingAge = max(b.OldestWaitingAge, b.OldestPendingAge)
	}
	return b, nil
}

// findLag finds how many entries follow the last one delivered to the group, and returns the id of the first of them.
//
// Redis 7.0 computes the lag from counters. The one of the entries that the group has read stays wrong after an
// undelivered entry was deleted, and after a restart from the AOF, which does not hold it.
func (b *Backlog) findLag(
	ctx context.Context, rdb redis.UniversalClient, stream string, g redis.XInfoGroup, s *redis.XInfoStream,
) (first string, err error) {
	switch {
	case !EntryAfter(s.LastGeneratedID, g.LastDeliveredID):
		return "", nil
	case EntryAfter(s.FirstEntry.ID, g.LastDeliveredID):
		b.Lag = s.Length
		return s.FirstEntry.ID, nil
	}
	after, count := g.LastDeliveredID, int64(fewEntries)
	for {
		page, err := rdb.XRangeN(ctx, stream, "("+after, "+", count).Result()
		if err != nil {
			return "", err
		}
		if len(page) > 0 && first == "" {
			first = page[0].ID
		}
		b.Lag += int64(len(page))
		switch {
		case b.Lag > LagCountMax:
			b.Lag, b.LagKnown = 0, false
			return first, nil
		case int64(len(page)) < count:
			return first, nil
		case !b.counted && s.MaxDeletedEntryID == "0-0" && g.Lag >= b.Lag && g.Lag <= s.Length-max(1, b.Pending):
			b.Lag = g.Lag
			return first, nil
		}
		after, count, b.counted = page[len(page)-1].ID, EntriesPerTrip, true
	}
}

// UnlessMissing returns nil for errors that report a missing stream or group.
func UnlessMissing(err error) error {
	if isNoGroup(err) || err != nil && strings.Contains(err.Error(), "no such key") {
		return nil
	}
	return err
}

// entryAge derives an age from an entry's id; 0 if the clock was set back since.
func entryAge(id string, now time.Time) time.Duration {
	at, ok := entryTime(id)
	if !ok {
		return 0
	}
	return max(0, now.Sub(at))
}

// BacklogCollector is a prometheus.Collector that reads the backlog of streams on a scrape. While
// Redis is away it reports only that, and a scrape takes at most its time-out.
type BacklogCollector struct {
	rdb     redis.UniversalClient
	group   string
	streams func() []string
	behind  func(stream string) (orders int64)
	timeout time.Duration
	log     *slog.Logger

	mu sync.Mutex
	// counted holds the backlogs that were costly to read, by stream.
	counted map[string]readBacklog

	reachable, length, lag, pending, waiting, oldestPending, oldestEntry *prometheus.Desc
}

// countedFor is how long a backlog whose entries were counted one by one is cached.
const countedFor = time.Second

type readBacklog struct {
	Backlog
	at time.Time
}

// NewBacklogCollector returns a collector for the group's backlog in the streams of that moment. An entry does not say
// how many orders it has before it is read, so behind returns an estimate: how far Postgres is behind
// the sequences that Redis has assigned in the sales of a stream. The time-out needs a client that
// honours contexts or has short time-outs of its own.
func NewBacklogCollector(
	rdb redis.UniversalClient, group string, streams func() []string, behind func(stream string) (orders int64),
	timeout time.Duration, log *slog.Logger,
) *BacklogCollector {
	desc := func(name, help string) *prometheus.Desc {
		if name != "stampede_stream_reachable" {
			help += " Use max by (stream)."
		}
		return prometheus.NewDesc(name, help, []string{"stream"}, prometheus.Labels{"group": group})
	}
	return &BacklogCollector{
		rdb: rdb, group: group, streams: streams, behind: behind, timeout: timeout, log: log,
		counted: map[string]readBacklog{},
		reachable: desc("stampede_stream_reachable",
			"1 if Redis answered this worker for the stream, else 0. To find an outage, use min by (stream)."),
		length: desc("stampede_stream_length_entries",
			"Entries in the stream, handled ones that were not trimmed yet included."),
		lag: desc("stampede_stream_lag_entries",
			"Entries not delivered to any consumer yet. Absent while Redis cannot report it."),
		pending: desc("stampede_stream_pending_entries", "Entries given to a consumer and not acknowledged."),
		waiting: desc("stampede_stream_waiting_orders",
			"Accepted orders that are not recorded in Postgres, about: some of the last second may be missing."),
		oldestPending: desc("stampede_stream_oldest_pending_age_seconds",
			"Time since the oldest pending entry was appended; 0 if there is none."),
		oldestEntry: desc("stampede_stream_oldest_entry_age_seconds",
			"Time since the oldest entry that is not acknowledged was appended; 0 if nothing waits."),
	}
}

// Describe implements prometheus.Collector.
func (c *BacklogCollector) Describe(out chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{
		c.reachable, c.length, c.lag, c.pending, c.waiting, c.oldestPending, c.oldestEntry,
	} {
		out <- desc
	}
}

// Collect implements prometheus.Collector.
func (c *BacklogCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	var streams sync.WaitGroup
	for _, stream := range c.streams() {
		streams.Go(func() { c.collect(ctx, out, stream) })
	}
	streams.Wait()
}

func (c *BacklogCollector) collect(ctx context.Context, out chan<- prometheus.Metric, stream string) {
	gauge := func(desc *prometheus.Desc, value float64) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, stream)
	}
	b, err := c.read(ctx, stream)
	if err != nil {
		c.log.Debug("cannot read the backlog", slog.Any("error", err))
		gauge(c.reachable, 0)
		return
	}
	gauge(c.reachable, 1)
	gauge(c.length, float64(b.Length))
	if b.LagKnown {
		gauge(c.lag, float64(b.Lag))
	}
	gauge(c.pending, float64(b.Pending))
	gauge(c.waiting, float64(b.waitingOrders(c.behind(stream))))
	gauge(c.oldestPending, b.OldestPendingAge.Seconds())
	gauge(c.oldestEntry, b.OldestWaitingAge.Seconds())
}

// read reads a backlog, at most once in countedFor if its entries have to be counted.
func (c *BacklogCollector) read(ctx context.Context, stream string) (Backlog, error) {
	c.mu.Lock()
	last, counted := c.counted[stream]
	c.mu.Unlock()
	if counted && time.Since(last.at) < countedFor {
		return last.Backlog, nil
	}
	b, err := ReadBacklog(ctx, c.rdb, stream, c.group)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.counted, stream)
	if err == nil && b.counted {
		c.counted[stream] = readBacklog{b, time.Now()}
	}
	return b, err
}

// Unfinished returns a range of ids that includes all entries of a stream that its group has not read or not
// acknowledged; to is empty for an empty stream. Without the group nothing was read.
func Unfinished(ctx context.Context, rdb redis.UniversalClient, key, group string) (from, to string, err error) {
	last, err := rdb.XRevRangeN(ctx, key, "+", "-", 1).Result()
	if err != nil || len(last) == 0 {
		return "", "", err
	}
	groups, err := rdb.XInfoGroups(ctx, key).Result()
	if err != nil {
		return "", "", err
	}
	at := slices.IndexFunc(groups, func(g redis.XInfoGroup) bool { return g.Name == group })
	if at < 0 {
		return "-", last[0].ID, nil // no worker has read it, or the group is lost
	}
	delivered := groups[at].LastDeliveredID
	from = "(" + delivered
	if groups[at].Pending > 0 {
		pending, err := rdb.XPending(ctx, key, group).Result()
		if err != nil {
			return "", "", err
		}
		// A group that was set back has pending entries above its last delivered one.
		if pending.Count > 0 && !EntryAfter(pending.Lower, delivered) {
			from = pending.Lower
		}
	}
	return from, last[0].ID, nil
}

// TrimmerConfig configures a Trimmer. Control and Stream have no default.
type TrimmerConfig struct {
	Control redis.UniversalClient
	Stream  string
	// Interval is how often the stream is trimmed.
	Interval time.Duration
	Logger   *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

func (c *TrimmerConfig) setDefaults() {
	c.Interval = cmp.Or(c.Interval, 10*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
}

// Validate returns an error for an invalid config. It expects the defaults to be set.
func (c *TrimmerConfig) Validate() error {
	switch {
	case c.Control == nil:
		return errors.New("trimmer config: Control is missing")
	case c.Stream == "":
		return errors.New("trimmer config: Stream is missing")
	case c.Interval < 0:
		return errors.New("trimmer config: Interval must be positive")
	}
	return nil
}

// Trimmer frees the entries of a stream that all groups have acknowledged, and no others. Several
// may work on the same stream.
type Trimmer struct {
	config  TrimmerConfig
	trimmed prometheus.Counter
}

// NewTrimmer returns a Trimmer.
func NewTrimmer(config TrimmerConfig) (*Trimmer, error) {
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	trimmed, err := telemetry.RegisterOnce(config.Registerer, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "stampede_entries_trimmed_total", Help: "Stream entries freed after all groups acknowledged them.",
	}, []string{"stream"}))
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return &Trimmer{config: config, trimmed: trimmed.WithLabelValues(config.Stream)}, nil
}

// Run trims until ctx is cancelled. It continues while Redis is away.
func (t *Trimmer) Run(ctx context.Context) {
	outage := retry.Outage{Log: t.config.Logger, Doing: "trim " + t.config.Stream}
	for retry.Pause(t.config.Interval, ctx.Done()) {
		if err := t.trim(ctx); ctx.Err() == nil { // a stop is no failure
			outage.Note(err)
		}
	}
}

func (t *Trimmer) trim(ctx context.Context) error {
	for {
		removed, err := TrimOnce(ctx, t.config.Control, t.config.Stream)
		t.trimmed.Add(float64(removed))
		if err != nil || removed == 0 {
			return err
		}
	}
}

// TrimOnce frees at most one page of entries of a stream, and returns their number.
func TrimOnce(ctx context.Context, rdb redis.UniversalClient, stream string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, retry.CallTimeout)
	defer cancel()
	reply, err := lua.Trim.Run(ctx, rdb, []string{stream}).Slice()
	if err != nil {
		return 0, fmt.Errorf("trim %s: %w", stream, err)
	}
	if len(reply) == 2 {
		if removed, ok := reply[1].(int64); ok {
			return removed, nil
		}
	}
	return 0, fmt.Errorf("trim %s: unexpected reply %v", stream, reply)
}
