package lua_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
	"stampede/lua"
)

func (b *bench) serverKey() string { return strings.TrimSuffix(b.orders, "orders") + "server" }

// look returns the answer of look.lua, the server's ids and the epoch of the sale.
func (b *bench) look() (answer, runID, replicationID, epoch string) {
	b.t.Helper()
	values, err := lua.Look.Run(b.t.Context(), b.rdb, []string{b.serverKey(), b.saleKey}).StringSlice()
	require.NoError(b.t, err)
	require.Len(b.t, values, 7)
	now, err := strconv.ParseInt(values[4], 10, 64)
	require.NoError(b.t, err)
	require.WithinDuration(b.t, b.rdb.Time(b.t.Context()).Val(), time.UnixMilli(now), time.Minute)
	return b.collect("look", values[0]), values[1], values[2], values[3]
}

func (b *bench) verify(runID, replicationID string) string {
	b.t.Helper()
	return b.verifyAs(runID, replicationID, "-")
}

func (b *bench) verifyAs(runID, replicationID, token string) string {
	b.t.Helper()
	answer, err := lua.Verify.Run(b.t.Context(), b.rdb, []string{b.serverKey()}, runID, replicationID, token).Text()
	require.NoError(b.t, err)
	return b.collect("verify", answer)
}

func TestLookKnowsOnlyVerifiedServer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	answer, runID, replicationID, epoch := b.look()
	require.Equal(t, []string{"unrecorded", ""}, []string{answer, epoch})
	info := b.rdb.Info(t.Context(), "server", "replication").Val()
	require.Contains(t, info, "\nrun_id:"+runID+"\r\n")
	require.Contains(t, info, "\nmaster_replid:"+replicationID+"\r\n")

	other := strings.Repeat("0", 40)
	require.Equal(t, "changed", b.verify(other, replicationID))
	require.Equal(t, "changed", b.verify(runID, other))
	require.Equal(t, "changed", b.verify("", ""))
	require.Equal(t, "changed", b.verify(runID[:39], replicationID))
	require.Zero(t, b.rdb.Exists(t.Context(), b.serverKey()).Val())
	require.Equal(t, "verified", b.verify(runID, replicationID))

	b.open()
	answer, _, _, epoch = b.look()
	require.Equal(t, []string{"known", "1"}, []string{answer, epoch})

	require.NoError(t, b.rdb.HSet(t.Context(), b.serverKey(), "run_id", other).Err())
	answer, _, _, epoch = b.look()
	require.Equal(t, []string{"unverified", "1"}, []string{answer, epoch})
	require.NoError(t, b.rdb.HSet(t.Context(), b.serverKey(), "run_id", "-").Err())
	answer, _, _, _ = b.look()
	require.Equal(t, "distrusted", answer)
	b.requireAllAnswers("look")
	b.requireAllAnswers("verify")
}

// ours is the token of the rebuild that most of these tests run.
const ours = "ours"

// close closes the sale for our rebuild, and returns the last sequence and the epoch in Redis.
func (b *bench) close() []int64 {
	b.t.Helper()
	known := b.closeFor(ours, 0)
	return []int64{known[0].(int64), known[1].(int64)}
}

// closeFor closes the sale for the rebuild with this token, and returns the previous token as well.
func (b *bench) closeFor(token string, epoch int64) []any {
	b.t.Helper()
	known, err := lua.Close.Run(b.t.Context(), b.rdb, []string{b.saleKey}, token, epoch).Slice()
	require.NoError(b.t, err)
	require.Len(b.t, known, 3)
	return known
}

func TestClosedSaleIsStaleInEveryScript(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	b.reserve(request{"ann", "order-ann", "-", "1"}, b.buy("bob"))
	b.set("epoch", "7")
	require.Equal(t, []int64{2, 7}, b.close())
	require.Equal(t, []int64{2, 7}, b.close(), "a repeat")
	before := b.state()
	require.Equal(t, []string{"stale-epoch"}, b.reserve(request{"ann", "order-ann", "-", "1"}))
	require.Equal(t, []string{"stale-epoch"}, b.release("ann", "order-ann"))
	require.Equal(t, "stale-epoch", b.open())
	require.Equal(t, "stale-epoch", b.change("change", lua.Change, 2, "pause"))
	require.Equal(t, "stale-epoch", b.change("change", lua.Change, 2, "end"))
	require.Equal(t, "stale-epoch", b.change("restock", lua.Restock, 2, 10, 0))
	require.Equal(t, before, b.state())
	// A caller that expects epoch 0 finds no stock either.
	b.epoch = "0"
	require.Equal(t, []string{"stale-epoch"}, b.reserve(b.buy("cid")))
	require.False(t, b.rdb.HExists(t.Context(), b.saleKey, "left").Val())
	require.Equal(t, before, b.state())
}

func TestCloseAcceptsAnyState(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(b *bench){
		"no sale":          func(*bench) {},
		"no epoch":         func(b *bench) { b.set("state", "open") },
		"epoch nan":        func(b *bench) { b.set("epoch", "nan") },
		"epoch 1e10":       func(b *bench) { b.set("epoch", "10000000000") },
		"sale is a string": func(b *bench) { b.rdb.Set(b.t.Context(), b.saleKey, "x", 0) },
		"sale is a list":   func(b *bench) { b.rdb.LPush(b.t.Context(), b.saleKey, "x") },
		"no sequence":      func(b *bench) { b.open(); b.rdb.HDel(b.t.Context(), b.saleKey, "sequence") },
		"sequence nan":     func(b *bench) { b.open(); b.set("sequence", "nan") },
		"sequence -1":      func(b *bench) { b.open(); b.set("sequence", "-1") },
		"sequence 2^53+1":  func(b *bench) { b.open(); b.set("sequence", "9007199254740993") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			prepare(b)
			known := b.close()
			require.Zero(t, known[0])
			require.LessOrEqual(t, known[1], int64(1))
			require.Equal(t, []string{"0", "0"}, []string{b.field("epoch"), b.field("sequence")})
			require.Equal(t, []string{"stale-epoch"}, b.reserve(b.buy("ann")))
		})
	}
}

// rebuilt runs the script with left units of the sale's stock and the given number of holders.
func (b *bench) rebuilt(epoch string, holders, left int64) string {
	b.t.Helper()
	return b.rebuiltBy(ours, epoch, holders, left)
}

func (b *bench) rebuiltBy(token, epoch string, holders, left int64) string {
	b.t.Helper()
	keys := []string{b.saleKey, b.buyers, b.buyers + ":" + epoch, b.sales, b.ended, b.ended + ":" + epoch}
	answer, err := lua.Rebuilt.Run(b.t.Context(), b.rdb, keys,
		b.sale.String(), epoch, holders, 7, b.stock, left, 40, b.perOrder, b.opensAt, b.closesAt, 60, "open", token,
		b.rdb.HLen(b.t.Context(), keys[5]).Val(), b.shard).Text()
	require.NoError(b.t, err)
	return b.collect("rebuilt", answer)
}

func (b *bench) stage(epoch string, pairs ...string) {
	b.t.Helper()
	require.NoError(b.t, b.rdb.HSet(b.t.Context(), b.buyers+":"+epoch, pairs).Err())
	require.NoError(b.t, b.rdb.Expire(b.t.Context(), b.buyers+":"+epoch, time.Hour).Err())
}

func TestRebuiltGivesEveryAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	b.reserve(request{"ann", "order-ann", "-", "1"}, request{"lost", "order-lost", "-", "1"})
	b.set("generation", 5)
	b.stage("2", "ann", "order-ann 1 1 19c:key-1@1", "bob", "order-bob 2 9 19c@1")
	before := b.state()
	require.Equal(t, "not-closed", b.rebuilt("2", 2, 7))
	require.Equal(t, before, b.state())

	b.close()
	require.NoError(t, b.rdb.Del(t.Context(), b.sales).Err())
	before = b.state()
	require.Equal(t, "wrong 2", b.rebuilt("2", 3, 7))
	require.Equal(t, "wrong 2", b.rebuilt("2", 1, 7))
	require.Equal(t, "wrong 0", b.rebuilt("3", 2, 7))
	require.Equal(t, before, b.state())

	require.Equal(t, "rebuilt", b.rebuilt("2", 2, 7))
	require.Equal(t, map[string]string{
		"epoch": "2", "revision": "7", "stock": "10", "left": "7", "sequence": "40", "per_order_limit": "2",
		"opens_at_ms":  "0",
		"closes_at_ms": "0", "payment_window_s": "60", "state": "open", "generation": "6",
	}, b.state()["sale"])
	require.Equal(t, map[string]string{"ann": "order-ann 1 1 19c:key-1@1", "bob": "order-bob 2 9 19c@1"},
		b.state()["buyers"])
	require.True(t, b.rdb.SIsMember(t.Context(), b.sales, b.sale.String()).Val())
	require.EqualValues(t, -1, b.rdb.TTL(t.Context(), b.buyers).Val(), "buyers do not expire")
	require.Zero(t, b.rdb.Exists(t.Context(), b.buyers+":2").Val())

	// Reservations of an earlier epoch carry it, and new sequences follow the last one.
	b.epoch = "2"
	sold, err := b.tryReserve(request{"ann", "order-new", "key-1", "1"}, request{"bob", "order-bob", "-", "2"},
		request{"cid", "order-cid", "-", "1"})
	require.NoError(t, err)
	require.Equal(t, []string{"replayed order-ann 1 1 19c:key-1@1", "replayed order-bob 2 9 19c@1", "reserved 41"},
		sold[3:])
	require.Equal(t, []string{"released"}, b.release("ann", "order-ann"))

	before = b.state()
	require.Equal(t, "unchanged", b.rebuilt("2", 2, 7), "a repeat changes nothing")
	require.Equal(t, before, b.state())
	b.requireAllAnswers("rebuilt")
}

func TestRebuiltOfSaleWithoutBuyersOrKeys(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	require.NoError(t, b.rdb.HSet(t.Context(), b.buyers, "ann", "order-ann 1 1 19c").Err())
	b.close() // there was no sale
	require.Equal(t, "rebuilt", b.rebuilt("2", 0, 10))
	require.Zero(t, b.rdb.Exists(t.Context(), b.buyers).Val(), "the old buyers are gone")
	require.Equal(t, "1", b.field("generation"))
	b.epoch = "2"
	require.Equal(t, []string{"reserved 41"}, b.reserve(request{"ann", "order-ann-2", "-", "1"}))
}

func TestRebuiltRejectsInvalidNumbers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.close()
	before := b.state()
	good := []any{b.sale.String(), "2", "0", "7", "10", "7", "40", "2", "0", "0", "60", "open", ours, "0", ""}
	bad := func(position int, value string) error {
		args := append([]any{}, good...)
		args[position] = value
		return lua.Rebuilt.Run(t.Context(), b.rdb, []string{
			b.saleKey, b.buyers, b.buyers + ":2", b.sales, b.ended,
			b.ended + ":2",
		}, args...).Err()
	}
	for _, position := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13} {
		for _, value := range []string{"", "-1", "1.5", "nan"} {
			require.ErrorContains(t, bad(position, value), "argument "+strconv.Itoa(position+1), "%q", value)
		}
	}
	require.ErrorContains(t, bad(5, "11"), "more is left")
	require.Equal(t, before, b.state())
}

// Of two concurrent rebuilds only the one that closed the sale last opens it, once.
func TestRebuiltRequiresTokenOfLastClose(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.open()
	require.Equal(t, []any{int64(0), int64(1), ""}, b.closeFor(ours, 1))
	require.Equal(t, []any{int64(0), int64(1), ours}, b.closeFor("theirs", 1))
	closed := b.state()
	require.Equal(t, "not-closed", b.rebuilt("2", 0, 10))
	require.Equal(t, closed, b.state())
	require.Equal(t, "rebuilt", b.rebuiltBy("theirs", "2", 0, 10))
	require.Equal(t, "not-closed", b.rebuilt("3", 0, 10))
	require.Equal(t, "unchanged", b.rebuiltBy("theirs", "2", 0, 10))
	b.epoch = "2"
	b.reserve(b.buy("ann"))

	// Late copies of both calls close the sale, but do not open it without ann.
	require.Equal(t, []any{int64(41), int64(2), ""}, b.closeFor("theirs", 1))
	require.Equal(t, "not-closed", b.rebuiltBy("theirs", "2", 0, 10))
	require.Equal(t, []any{int64(41), int64(2), "theirs"}, b.closeFor(ours, 2))

	// Redis lost the sale meanwhile: a rebuild that read a later epoch in Postgres has closed that epoch.
	require.NoError(t, b.rdb.Del(t.Context(), b.saleKey).Err())
	require.Equal(t, []any{int64(0), int64(3), ""}, b.closeFor(ours, 3))
	b.closeFor("theirs", 1)
	require.Equal(t, "not-closed", b.rebuiltBy("theirs", "3", 0, 10))
	require.Equal(t, "rebuilt", b.rebuiltBy("theirs", "4", 0, 10))
}

// The token of a rebuild is gone if the server was emptied, or distrusted by another caller.
func TestVerifyRequiresTokenOfLastDistrust(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	_, runID, replicationID, _ := b.look()
	record := func(token string) {
		require.NoError(t, b.rdb.HSet(t.Context(), b.serverKey(), "run_id", "-", "replication_id", "-", "rebuild",
			token).Err())
	}
	refused := func() {
		t.Helper()
		require.Equal(t, "changed", b.verifyAs(runID, replicationID, ours))
		answer, _, _, _ := b.look()
		require.NotEqual(t, "known", answer)
	}
	refused() // there is no record
	record("theirs")
	refused()
	record("") // an ingress found that orders are lost
	refused()
	require.Equal(t, "changed", b.verify(runID, replicationID), "the partition was used before")
	record(ours)
	require.Equal(t, "verified", b.verifyAs(runID, replicationID, ours))
	require.Equal(t, "verified", b.verifyAs(runID, replicationID, ours), "a repeat")
	answer, _, _, _ := b.look()
	require.Equal(t, "known", answer)
	require.Equal(t, "changed", b.verifyAs(runID, replicationID, "theirs"))
	require.NoError(t, b.rdb.HDel(t.Context(), b.serverKey(), "rebuild").Err())
	require.Equal(t, "changed", b.verify(runID, replicationID))
}

func TestCloseAndRebuiltWorkAtMaxmemory(t *testing.T) {
	t.Parallel()
	b := newBenchOnOwnRedis(t)
	b.open()
	b.stage("2", "ann", "order-ann 1 1 19c@1")
	require.NoError(t, b.rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	_, runID, replicationID, _ := b.look()
	require.Equal(t, []int64{0, 1}, b.close())
	require.Equal(t, "rebuilt", b.rebuilt("2", 1, 9))
	require.Equal(t, "verified", b.verify(runID, replicationID))
	answer, _, _, _ := b.look()
	require.Equal(t, "known", answer)
}

// header is the first comment of a script.
type header struct {
	keys, args []string
	answers    []string // the words that the script can answer; none for a script that returns data
	hasAnswers bool
	body       string // the script without its comments
}

var (
	item    = regexp.MustCompile(`^  (\d+)  (\S+)`)
	outcome = regexp.MustCompile(`^  ([a-z][a-z-]*)( <\w+>)?  `)
	literal = regexp.MustCompile(`\b(KEYS|ARGV)\[(\d+)\]`)
	quoted  = regexp.MustCompile(`'([a-z][a-z-]*)[ %a-z]*'`)
)

func readHeader(t *testing.T, script string) header {
	t.Helper()
	source, err := os.ReadFile(script + ".lua")
	require.NoError(t, err)
	var h header
	var section string
	inHeader := true
	var body strings.Builder
	for line := range strings.Lines(string(source)) {
		line = strings.TrimRight(line, "\n")
		text, isComment := strings.CutPrefix(line, "--")
		if strings.HasPrefix(line, "#!") {
			continue
		}
		if !isComment {
			inHeader = false
			code, _, _ := strings.Cut(line, "-- ")
			body.WriteString(code + "\n")
			continue
		}
		if !inHeader {
			continue
		}
		text = strings.TrimPrefix(text, " ")
		switch trimmed := strings.TrimSpace(text); trimmed {
		case "KEYS", "ARGV", "Answers":
			section = trimmed
			h.hasAnswers = h.hasAnswers || trimmed == "Answers"
			continue
		}
		if m := item.FindStringSubmatch(text + "  "); m != nil && section != "Answers" {
			list := &h.keys
			if section == "ARGV" {
				list = &h.args
			}
			*list = append(*list, m[2])
			require.Equal(t, strconv.Itoa(len(*list)), m[1], "%s of %s is numbered from 1 without a gap", section, script)
		}
		// The pattern requires two blanks, also after an answer without a description.
		if m := outcome.FindStringSubmatch(text + "  "); m != nil && section == "Answers" {
			h.answers = append(h.answers, m[1])
		}
	}
	h.body = body.String()
	return h
}

func scripts(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for i, f := range files {
		files[i] = strings.TrimSuffix(f, ".lua")
	}
	return files
}

func TestHeadersMatchScripts(t *testing.T) {
	for _, script := range scripts(t) {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			h := readHeader(t, script)
			require.NotEmpty(t, h.keys, "the header has no KEYS")
			require.True(t, h.hasAnswers, "the header has no Answers")

			for _, m := range literal.FindAllStringSubmatch(h.body, -1) {
				n, err := strconv.Atoi(m[2])
				require.NoError(t, err)
				list := h.keys
				if m[1] == "ARGV" {
					list = h.args
				}
				require.LessOrEqual(t, n, len(list), "%s is used but not in the header", m[0])
			}
			for i := range h.keys {
				loops := strings.Contains(h.body, "ipairs(KEYS)") || strings.Contains(h.body, "#KEYS do")
				used := strings.Contains(h.body, "KEYS["+strconv.Itoa(i+1)+"]")
				require.True(t, loops || used, "key %d is in the header but never used", i+1)
			}

			var inScript []string
			for _, m := range quoted.FindAllStringSubmatch(h.body, -1) {
				inScript = append(inScript, m[1])
			}
			for _, word := range h.answers {
				require.Contains(t, inScript, word, "the header lists an answer that the script cannot give")
			}
			require.Equal(t, len(h.answers), len(slices.Compact(slices.Sorted(slices.Values(h.answers)))),
				"an answer is listed twice")
		})
	}
}

func TestClockIsThatOfServer(t *testing.T) {
	t.Parallel()
	rdb, key := testkit.Redis(t), testkit.Keys(t).Orders(0)
	ms, err := lua.Clock.Run(t.Context(), rdb, []string{key}).Int64()
	require.NoError(t, err)
	require.Zero(t, ms, "there is no stream")
	require.NoError(t, rdb.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"a", "b"}}).Err())
	before := rdb.Time(t.Context()).Val()
	ms, err = lua.Clock.Run(t.Context(), rdb, []string{key}).Int64()
	require.NoError(t, err)
	require.WithinRange(t, time.UnixMilli(ms), before.Add(-time.Millisecond), rdb.Time(t.Context()).Val())
}

// A server may lack newer commands and commands that an operator renamed. The others are still
// checked.
func TestRightsReportMissingCommand(t *testing.T) {
	t.Parallel()
	refused, err := lua.Rights.Run(t.Context(), testkit.Redis(t), []string{"key"}, "HSET key f v", "NOSUCHCOMMAND key",
		"PING").StringSlice()
	require.NoError(t, err)
	require.Equal(t, []string{"NOSUCHCOMMAND key"}, refused)
}
