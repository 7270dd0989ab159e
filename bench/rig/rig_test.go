package rig

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/connect"
	"stampede/upkeep/doctor"
)

func TestMain(m *testing.M) { Main(m, "rig") }

func TestRatiosAreTakenPerRound(t *testing.T) {
	t.Parallel()
	r := Results{rounds: []map[string]Values{
		{"a": {"rate": 10}, "b": {"rate": 5, "share": 1}},
		{"a": {"rate": 40}, "b": {"rate": 10}},
		{"a": {"rate": 90}, "b": {"rate": 30}},
	}}
	assert.Equal(t, Spread{N: 3, Median: 40, least: 10, greatest: 90}, r.Of("a", "rate"))
	assert.Equal(t, Spread{N: 3, Median: 3, least: 2, greatest: 4}, r.Ratio("a", "rate", "b", "rate"))
	assert.Equal(t, Spread{N: 1, Median: 10, least: 10, greatest: 10}, r.Ratio("a", "rate", "b", "share"))
	assert.Equal(t, Spread{}, r.Of("c", "rate"))
}

func TestOnlySelectsCandidates(t *testing.T) {
	t.Parallel()
	all := []Candidate{{Name: "Stampede, ingress alone"}, {Name: "Stampede"}, {Name: "postgres-row"}}
	for expression, want := range map[string][]string{
		"":                 {"Stampede, ingress alone", "Stampede", "postgres-row"},
		"^Stampede$|^post": {"Stampede", "postgres-row"},
	} {
		found, err := chosen(all, expression)
		require.NoError(t, err)
		var names []string
		for _, c := range found {
			names = append(names, c.Name)
		}
		assert.Equal(t, want, names, expression)
	}
	_, err := chosen(all, "redis")
	require.EqualError(t, err, "-only matches none of these: Stampede, ingress alone; Stampede; postgres-row")
	_, err = chosen(all, "(")
	require.ErrorContains(t, err, "-only")
	assert.Len(t, all, 3)
}

func TestSpreadFormat(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "–", Spread{}.Format(Count))
	assert.Equal(t, "1,235", Summarize([]float64{1234.6}).Format(Count))
	assert.Equal(t, "1.50 (0.12–123)", Summarize([]float64{1, 0.123, 2, 123.4}).Format(Ratio))
	assert.Equal(t, "2", Summarize([]float64{2, 2.1, 1.9}).Format(Count))
	assert.Equal(t, "12.3", Summarize([]float64{12.34}).FormatMedian(Ratio))
}

func TestPageKeepsLastRunOfEachTable(t *testing.T) {
	t.Parallel()
	var p page
	p.put(Table{Title: "A", Note: "Warm-up.", Head: []string{"x"}, Rows: [][]string{{"0"}}})
	p.put(Table{Title: "B", Note: "Other.", Head: []string{"x"}})
	p.put(Table{Title: "A", Note: "Note.", Head: []string{"x", "y"}, Rows: [][]string{{"1", "2"}}})
	assert.Equal(t, "### A\n\nNote.\n\n| x | y |\n| --- | --- |\n| 1 | 2 |\n\n"+
		"### B\n\nOther.\n\n| x |\n| --- |\n\n", p.markdown())
}

func TestBarsAreProportional(t *testing.T) {
	t.Parallel()
	var p page
	p.put(Table{Head: []string{"x", "ms", "y"}, Bars: 1, Rows: [][]string{
		{"a", "1,600 ms", "1"}, {"b", "450 ms (1–2)", "2"}, {"c", "0.10 ms", "3"}, {"d", none, "4"},
	}})
	assert.Contains(t, p.markdown(), "| x | ms |  | y |\n| --- | --- | --- | --- |\n"+
		"| a | 1,600 ms | ████████████ | 1 |\n| b | 450 ms (1–2) | ███▍ | 2 |\n"+
		"| c | 0.10 ms | ▏ | 3 |\n| d | – |  | 4 |\n")
}

func TestReplaceWritesOnlyBetweenMarkers(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "figures.md")
	require.NoError(t, os.WriteFile(path, []byte("before\n"+figuresBegin+"old\n"+figuresEnd+"after\n"), 0o600))
	for range 2 {
		require.NoError(t, replaceFigures(path, "new\n\n"))
		written, err := os.ReadFile(path)
		require.NoError(t, err)
		assert.Equal(t, "before\n"+figuresBegin+"\nnew\n\n"+figuresEnd+"after\n", string(written))
	}

	require.NoError(t, os.WriteFile(path, []byte("nothing\n"), 0o600))
	require.ErrorContains(t, replaceFigures(path, "new"), "has no place for figures")
}

func TestProseIsWrapped(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("µ", 60)
	table := "\n\n| " + long + " | " + long + " |\n"
	assert.Equal(t, "### A\n\n"+long+"\n"+long+table, wrap("### A\n\n"+long+" "+long+table))
}

// A loop in the shell is work in user mode. Waiting for a child is not.
func TestCPUTimeIncludesChildren(t *testing.T) {
	t.Parallel()
	const loop = `i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done`
	for name, text := range map[string]string{
		"ended child":   `sh -c '` + loop + `'; echo at here; read never`,
		"running child": `sh -c '` + loop + `; echo at here; read never'; exit 0`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			script := exec.Command("sh", "-c", text)
			stdin, err := script.StdinPipe()
			require.NoError(t, err)
			defer func() { _ = stdin.Close() }()
			p := Run(t, "script", "at ", script)
			assert.Equal(t, "here", p.Addr)
			assert.Less(t, ProcessCPU(t, p.Pid()), 50*time.Millisecond)
			assert.Greater(t, treeCPU(t, p.Pid()), 50*time.Millisecond)
		})
	}
}

func TestPollIntervalShrinksWithRemainder(t *testing.T) {
	t.Parallel()
	assert.Equal(t, pollMin, nextPoll(0, 1000, time.Second))
	assert.Equal(t, 100*time.Millisecond, nextPoll(1000, 200, time.Second))
	assert.Equal(t, pollMin, nextPoll(1190, 10, time.Second))
	assert.Equal(t, pollMax, nextPoll(1, 1_000_000, time.Second))
}

// The conditions are those of the candidates, and not of the rig's own connections.
func TestShopHasItsConditions(t *testing.T) {
	const extra = 5.0 // ms
	ctx := t.Context()
	measure := func(s *Shop) (redis, postgres doctor.Speed) {
		rdb, err := connect.Control(s.RedisURL)
		require.NoError(t, err)
		defer rdb.Close()
		pool, err := connect.Postgres(ctx, s.DatabaseURL, 1)
		require.NoError(t, err)
		defer pool.Close()
		found := doctor.Speeds(ctx, rdb, pool)
		require.Len(t, found, 2)
		return *found[0].Speed, *found[1].Speed
	}

	restore := Under(Conditions{RoundTrip: extra * time.Millisecond})
	far := Open(t)
	restore()
	redis, postgres := measure(far)
	require.GreaterOrEqual(t, redis.RoundTrip, extra)
	require.GreaterOrEqual(t, postgres.RoundTrip, extra)
	began := time.Now()
	for range 20 {
		require.NoError(t, far.Redis.Ping(ctx).Err())
	}
	require.Less(t, time.Since(began), 20*5*time.Millisecond, "the rig's own connection is direct")
	require.Empty(t, far.Syncs())
	far.Close()

	if err := CanSlowSyncs(); err != nil {
		t.Logf("fsync is not slowed down: %v", err)
		return
	}
	restore = Under(Conditions{Sync: extra * time.Millisecond, CountSyncs: true})
	slow := Open(t)
	restore()
	before := slow.Syncs()
	redis, postgres = measure(slow)
	calls := slow.Syncs().Since(before)
	require.Less(t, redis.RoundTrip, extra)
	require.Less(t, postgres.RoundTrip, extra)
	require.GreaterOrEqual(t, redis.Sync, extra-1)
	require.GreaterOrEqual(t, postgres.Sync, extra-1)
	require.GreaterOrEqual(t, calls[Redis], int64(5))
	require.GreaterOrEqual(t, calls[Postgres], int64(5))
}
