package lua_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"stampede/lua"
)

// readable reservations have the forms that reserve.lua and a rebuild write.
var readable = []string{
	"order-ann 1 1 19c2d3e4f5a", "order-ann 1 1 19c2d3e4f5a:key-1", "order-ann 1 1 19c2d3e4f5a@12",
	"order-ann 1 1 19c2d3e4f5a:key-1@12",
	"AaH9eHpfdXukBQzkOOCaFQ 100 16777216 19c2d3e4f5a:_-aB0@2147483648",
}

// unreadable reservations have forms that no script writes.
var unreadable = []string{
	"", "?", "order-ann", "order-ann 1", "order-ann 1 1", "order-ann 1 1 ",
	"order-ann x 1 19c", "order-ann -1 1 19c", "order-ann 1 -1 19c", "order-ann 1 1f 19c", "order-ann 1 1 0x19c",
	"order-ann 1 1 19cg",
	"order-ann  1 1 19c", " order-ann 1 1 19c", "order-ann 1 1 19c ", "order-ann 1 1 19c\x00", "order-ann 1 1 19c\n",
	"order-ann 1 1 19c:", "order-ann 1 1 19c@", "order-ann 1 1 19c:key-1@", "order-ann 1 1 19c@x",
	"order-ann 1 1 19c@1:key-1", "order-ann 1 1 19c:a b",
	"order-ann 1 1 19c@1 2", "order-ann 1 1 19c@1@2", "order-ann 1 1 19c:a:b",
	"01a1fd78-7a5f-757b-a405-0ce438e09a15 1 7 1790000000000 -",
	"01a1fd78-7a5f-757b-a405-0ce438e09a15 1 7 1790000000000 key-1 1",
}

func (b *bench) hold(user, held string) {
	b.t.Helper()
	require.NoError(b.t, b.rdb.HSet(b.t.Context(), b.buyers, user, held).Err())
}

func TestReserveRejectsUnreadableReservation(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	for _, held := range readable {
		b.hold("ann", held)
		order, _, _ := strings.Cut(held, " ")
		quantity := strings.Fields(held)[1]
		sold, err := b.tryReserve(b.buy("ann"), request{"ann", order, "-", "7"})
		require.NoError(t, err)
		require.Equal(t, []string{"already-purchased " + held, "replayed " + held}, sold[3:])
		for _, key := range []string{"key-1", "_-aB0", "-", "12"} {
			sold, err := b.tryReserve(request{"ann", "order-ann-2", key, quantity})
			require.NoError(t, err)
			if key != "-" && strings.Contains(held, ":"+key) {
				require.Equal(t, "replayed "+held, sold[3])
			} else {
				require.Equal(t, "already-purchased "+held, sold[3], "with the key %s", key)
			}
		}
	}
	for _, held := range unreadable {
		b.hold("ann", held)
		before := b.state()
		require.Equal(t, []string{"damaged", "damaged"}, b.reserve(b.buy("ann"), request{"ann", "order-ann", "key-1", "1"}),
			held)
		require.Equal(t, before, b.state())
	}
	// Damage affects one buyer: the others of the batch are served.
	b.hold("ann", unreadable[1])
	require.Equal(t, []string{"reserved 1", "damaged", "reserved 2"},
		b.reserve(b.buy("first"), b.buy("ann"), b.buy("last")))
}

func TestAppendGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ask := func(pairs ...string) []string {
		args := []any{"\x81\xa5count"}
		for i := 0; i < len(pairs); i += 2 {
			args = append(args, pairs[i], pairs[i+1])
		}
		answers, err := lua.Append.Run(t.Context(), b.rdb, []string{b.buyers, b.orders}, args...).StringSlice()
		require.NoError(t, err)
		for _, a := range answers {
			b.collect("append", a)
		}
		return answers
	}
	b.hold("ann", "order-ann 1 16777216 1a0c2d3e4f5:key-1@2")
	b.hold("bob", "order-bob 1 2 19c")
	require.Equal(t, []string{"not-held", "appended", "appended", "not-held"},
		ask("ann", "order-bob", "ann", "order-ann", "bob", "order-bob", "cid", "order-cid"))
	entries, err := b.rdb.XRange(t.Context(), b.orders, "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, map[string]any{
		"_watermill_message_uuid": "order-ann", "metadata": "\x81\xa5count\xa12",
		"payload": "ann\norder-ann 1 16777216 1a0c2d3e4f5:key-1@2\nbob\norder-bob 1 2 19c",
	}, entries[0].Values, "as reserve.lua writes it")
	for _, held := range unreadable {
		b.hold("ann", held)
		require.Equal(t, []string{"damaged"}, ask("ann", "order-ann"), held)
	}
	for _, held := range []string{
		"order-ann b1a1 1 19c", "order-ann a0 1 19c", "order-ann a1b 1 19c", "order-ann 1a 1 19c",
	} {
		b.hold("ann", held)
		require.Equal(t, []string{"damaged"}, ask("ann", "order-ann"), held)
	}
	require.EqualValues(t, 1, b.events())
	b.hold("ann", "order-ann a2c1 1 19c")
	require.Equal(t, []string{"appended"}, ask("ann", "order-ann"))
	b.requireAllAnswers("append")
}

// A reservation that only some of the scripts can parse would be sold and never released.
func TestScriptsParseReservationsAlike(t *testing.T) {
	t.Parallel()
	pattern := regexp.MustCompile(`'(\^\(%S\+\) \(%[dw]\+\) %d\+ [^']*\$)'`)
	read := map[string]string{}
	for _, script := range scripts(t) {
		if m := pattern.FindStringSubmatch(readHeader(t, script).body); m != nil {
			read[script] = strings.NewReplacer("(", "", ")", "", "%w+", "%d+").Replace(m[1])
		}
	}
	require.Len(t, read, 3, "reserve, release and append")
	var patterns []string
	for _, p := range read {
		patterns = append(patterns, p)
	}
	slices.Sort(patterns)
	require.Len(t, slices.Compact(patterns), 1, read)
}
