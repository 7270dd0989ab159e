package offers_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/ledger/draws"
)

// A worker looks at a list when something has changed there, and until nothing is left to offer.
func TestIdleListsAreNotLookedAt(t *testing.T) {
	t.Parallel()
	s := testshop.OnOwnRedis(t, 1)
	l, idle := newList(t, s, "h1"), newList(t, s, "h1")
	l.join(t, "ann")
	idle.join(t, "bob")
	testwork.FulfilAll(t, s)
	o := offerer(t, s)
	due := func() []string { return testshop.Rows(t, s.Pool, "SELECT sale_id::text FROM offers_due") }
	require.Len(t, due(), 2, "new lists are looked at")
	l.requireNoTurn(t, o)
	require.Empty(t, due())

	l.expire(t, "h1")
	require.Equal(t, []string{l.sale.ID.String()}, due(), "a unit has returned")
	l.awaitTurns(t, o, "ann offered")
	l.requireNoTurn(t, o)
	require.Empty(t, due())

	// Units that nobody noted are found, too, by a worker that starts, or within a minute.
	require.NoError(t, s.Rdb.HSet(t.Context(), s.Keys.Sale(0, idle.sale.ID), "left", 1, "state", "offers",
		"open_state", "offers").Err())
	idle.requireNoTurn(t, o)
	idle.awaitTurns(t, offerer(t, s), "bob offered")
}

// BenchmarkIdleLists measures a look for units to offer beside 10,000 idle waiting lists: one that finds a unit and
// offers it, one that finds nothing, and the survey of all lists, which is made once a minute.
func BenchmarkIdleLists(b *testing.B) {
	s := testshop.OnOwnRedis(b, 1)
	l := newList(b, s, "user-0")
	for i := range b.N {
		l.join(b, fmt.Sprint("user-", i+1))
	}
	testwork.FulfilAll(b, s)
	l.addIdle(b, 10_000, draws.ByPlace)
	o := offerer(b, s)
	look := func() time.Duration {
		began := time.Now()
		_, err := o.OfferWaiting(b.Context())
		require.NoError(b, err)
		return time.Since(began)
	}
	survey := look()
	var offered, idle time.Duration
	b.ResetTimer()
	for i := range b.N {
		testwork.FulfilAll(b, s)
		testwork.EndWindow(b, s.Pool, l.orderOf(b, l.sale.ID, fmt.Sprint("user-", i)))
		require.Equal(b, 1, testwork.Expire(b, s))
		testwork.ReleaseUnits(b, s)
		for len(l.turns(b)) == i {
			offered += look()
		}
		look()
		idle += look()
	}
	b.ReportMetric(float64(survey.Milliseconds()), "survey-ms")
	b.ReportMetric(float64(offered.Microseconds())/float64(b.N), "offer-µs")
	b.ReportMetric(float64(idle.Microseconds())/float64(b.N), "idle-µs")
}

// addIdle adds so many waiting lists, or draws whose ranks are offered, of which no unit is left: copies of this list.
func (l *list) addIdle(b *testing.B, n int, kind draws.Kind) {
	b.Helper()
	ids := testshop.Rows(b, l.Pool, `WITH made AS MATERIALIZED (
			SELECT overlay(gen_random_uuid()::text PLACING left($1::uuid::text, 14) FROM 1)::uuid AS goods,
				overlay(gen_random_uuid()::text PLACING left($1::uuid::text, 14) FROM 1)::uuid AS entries
			FROM generate_series(1, $2::int) -- of the same month
		), sale AS (
			INSERT INTO sales SELECT (jsonb_populate_record(s, jsonb_build_object('id', one, 'name', 'idle'))).*
			FROM made, unnest(ARRAY[goods, entries]) AS one, sales AS s WHERE s.id = $1
		), drawn AS (
			INSERT INTO draws (sale_id, entries_id, kind, offers_epoch, entries, item_entries, root, frozen_at, seeded_at, ranked_at)
			SELECT goods, entries, $3, 1, 10, ARRAY[10], sha256('x'), now(), now() + interval '1 s', now() FROM made
		) SELECT unnest(ARRAY[goods, entries])::text FROM made`, l.sale.ID, n, string(kind))
	_, err := l.Rdb.Pipelined(b.Context(), func(p redis.Pipeliner) error {
		for _, id := range ids {
			p.Copy(b.Context(), l.Keys.Sale(0, l.sale.ID), l.Keys.Sale(0, uuid.MustParse(id)), 0, false)
			p.SAdd(b.Context(), l.Keys.Sales(0), id)
		}
		return nil
	})
	require.NoError(b, err)
}
