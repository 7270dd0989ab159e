package testwork

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/ledger/deadletter"
	"stampede/lua"
	"stampede/reservation"
	"stampede/stream"
	"stampede/upkeep/audit"
	"stampede/upkeep/projection"
	"stampede/upkeep/rebuild"
)

func Audit(t testing.TB, s *testshop.Shop, sale uuid.UUID) audit.Report {
	t.Helper()
	report, err := audit.Run(t.Context(), audit.Config{Catalog: s.Catalog, Sale: sale})
	require.NoError(t, err)
	return report
}

// RequireUnbroken audits a sale, all for uuid.Nil, and requires that no promise is broken.
func RequireUnbroken(t testing.TB, s *testshop.Shop, sale uuid.UUID) audit.Report {
	t.Helper()
	report := Audit(t, s, sale)
	require.False(t, report.Broken(), Text(t, report))
	return report
}

// Broken returns the names of the broken promises.
func Broken(r audit.Report) (names string) {
	for _, p := range r.Promises {
		if !p.Kept() {
			names += p.Name + " "
		}
	}
	return strings.TrimSpace(names)
}

func Text(t testing.TB, r audit.Report) string {
	t.Helper()
	var text strings.Builder
	require.NoError(t, r.WriteText(&text))
	return text.String()
}

func ReconcileConfig(t testing.TB, s *testshop.Shop) audit.ReconcileConfig {
	t.Helper()
	return audit.ReconcileConfig{
		Catalog: s.Catalog, Rebuilder: Rebuilder(t, s),
		Pause: time.Millisecond, Logger: testkit.Logger(t),
	}
}

func Reconcile(t testing.TB, s *testshop.Shop) audit.ReconcileReport {
	t.Helper()
	report, err := audit.Reconcile(t.Context(), ReconcileConfig(t, s))
	require.NoError(t, err)
	return report
}

// Unmended names the remedies with remaining findings, separated by spaces.
func Unmended(r audit.ReconcileReport) string {
	var left []string
	for _, remedy := range r.Remedies {
		if remedy.Found > remedy.Mended {
			left = append(left, string(remedy.Remedy))
		}
	}
	return strings.Join(left, " ")
}

// ProcessWaiting records unread events and applies waiting releases, as a worker does.
func ProcessWaiting(t testing.TB, s *testshop.Shop) {
	t.Helper()
	for p := range s.Keys.Partitions {
		backlog, err := stream.ReadBacklog(t.Context(), s.Rdb, s.Keys.Orders(p), reservation.Group)
		require.NoError(t, err)
		if backlog.Lag > 0 {
			fulfilPartition(t, s, p)
		}
	}
	ReleaseUnits(t, s)
}

// RequireMended reconciles, first in a dry run, and requires that only the remedies in left remain: "" for none.
func RequireMended(t testing.TB, s *testshop.Shop, sale uuid.UUID, left string) {
	t.Helper()
	before := s.Everything(t)
	config := ReconcileConfig(t, s)
	config.DryRun, config.Sale = true, sale
	explained := 0
	config.Explain = func(f audit.Finding) error {
		explained++
		require.NotEmpty(t, f.What)
		require.NotEmpty(t, f.Remedy.Says())
		return nil
	}
	planned, err := audit.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, before, s.Everything(t), "a dry run changes nothing")
	require.Positive(t, explained)

	config.DryRun, config.Explain = false, nil
	report, err := audit.Reconcile(t.Context(), config)
	require.NoError(t, err)
	require.Equal(t, left, Unmended(report), "%+v", report)
	require.Len(t, report.Remedies, len(planned.Remedies), "the plan was carried out")
	require.Equal(t, slices.Contains([]string{"", "worker"}, left), report.Remaining == 0)
	if left == "projections" {
		RebuildProjections(t, s)
		report, err = audit.Reconcile(t.Context(), config)
		require.NoError(t, err)
		left = Unmended(report)
		require.Empty(t, left, "%+v", report)
	}
	if left != "" {
		return
	}
	require.Empty(t, report.Failures)
	ProcessWaiting(t, s)
	again := Reconcile(t, s)
	require.Empty(t, again.Remedies, "a second reconcile finds nothing")
	RequireUnbroken(t, s, uuid.Nil)
}

func Rebuilder(t testing.TB, s *testshop.Shop) *rebuild.Rebuilder {
	t.Helper()
	r, err := rebuild.New(rebuild.Config{Catalog: s.Catalog, Logger: testkit.Logger(t)})
	require.NoError(t, err)
	return r
}

// Rebuild rebuilds the only partition.
func Rebuild(t testing.TB, s *testshop.Shop) rebuild.Report {
	t.Helper()
	report, err := Rebuilder(t, s).Partition(t.Context(), 0, rebuild.ReasonByHand)
	require.NoError(t, err)
	return report
}

// Heal rebuilds what a worker with a full check would rebuild.
func Heal(t testing.TB, s *testshop.Shop, r *rebuild.Rebuilder, partitions int) error {
	t.Helper()
	required, err := r.Required(t.Context(), true)
	if err != nil {
		return err
	}
	failed := make([]error, partitions)
	var healing sync.WaitGroup
	for partition := range partitions {
		healing.Go(func() { _, failed[partition] = r.HealPartition(t.Context(), partition, required) })
	}
	healing.Wait()
	return errors.Join(failed...)
}

// HealAll rebuilds as workers do until nothing is left to rebuild. A sale in shards waits for all its servers.
func HealAll(t testing.TB, s *testshop.Shop) {
	t.Helper()
	r := Rebuilder(t, s)
	testkit.Eventually(t, 60*time.Second, "nothing is left to rebuild", func() bool {
		_ = Heal(t, s, r, s.Keys.Partitions) // Needs tells
		found, err := r.Needs(t.Context(), s.Keys.Partitions, true)
		return err == nil && len(found) == 0
	})
}

func RebuildProjections(t testing.TB, s *testshop.Shop) projection.Report {
	t.Helper()
	report, err := projection.Rebuild(t.Context(), s.Pool)
	require.NoError(t, err)
	return report
}

// GiveUnits moves half of the units of a shard towards another shard, which does not get them, as if the ingress had
// crashed.
func GiveUnits(t testing.TB, s *testshop.Shop, sale uuid.UUID, from, to int) {
	t.Helper()
	partition := s.Layout(t, sale).Partition(from)
	answer, err := s.Rdb.Eval(t.Context(), lua.FencedBy("test").Give.Source, []string{s.Keys.Sale(partition, sale)},
		s.Epoch(t, sale), to, 0, 2, "sold").Text()
	require.NoError(t, err)
	require.Contains(t, answer, "given ")
}

// AppendUnreadable appends an entry to the stream that is not an event, and returns it.
func AppendUnreadable(t testing.TB, s *testshop.Shop) stream.Entry {
	t.Helper()
	key := s.Keys.Orders(0)
	id, err := s.Rdb.XAdd(t.Context(), &redis.XAddArgs{
		Stream: key,
		Values: []any{"foo", "1", "foo", testshop.EveryByte, "bar", "é"},
	}).Result()
	require.NoError(t, err)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, id)
	require.NoError(t, err)
	entry.Deliveries = 3
	return entry
}

func OnlyLetter(t testing.TB, s *testshop.Shop, letters *deadletter.Store) deadletter.Letter {
	t.Helper()
	all, err := letters.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, all, 1)
	return all[0]
}

// TakeOut removes the only entry from the stream and returns it.
func TakeOut(t testing.TB, s *testshop.Shop) stream.Entry {
	t.Helper()
	key := s.Keys.Orders(0)
	entries := s.Entries(t, 0)
	require.Len(t, entries, 1)
	entry, err := stream.ReadEntry(t.Context(), s.Rdb, key, entries[0].ID)
	require.NoError(t, err)
	require.NoError(t, stream.CreateGroup(t.Context(), s.Rdb, key, reservation.Group))
	require.NoError(t, s.Rdb.Del(t.Context(), key).Err())
	return entry
}
