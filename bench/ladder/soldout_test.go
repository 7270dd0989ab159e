package ladder

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/page"
	"stampede/bench/rig"
)

const (
	soldOut = "sold out/s"
	// soldOutGoal is the least share of Echo's rate.
	soldOutGoal = 0.95
)

// BenchmarkSoldOut compares the answer that most of a crowd gets with an Echo handler that does nothing
// but send the same bytes. Both are there all the time, and the one whose turn it is not has nothing
// to do.
func BenchmarkSoldOut(b *testing.B) {
	stampede := rig.Stampede{}.Start(b, 1)
	body := sellOut(b, stampede)
	echo := rig.StartDesign(b, nothingRaw, map[string]string{
		"status": strconv.Itoa(http.StatusConflict), "type": "application/problem+json", "body": body,
	}, 1)

	const echoName = "Echo, the same bytes"
	results := rig.Compare(b,
		rig.Candidate{Name: ours, Turn: refuse(stampede)},
		rig.Candidate{Name: echoName, Turn: refuse(echo)},
	)
	results.Report(b, ours, soldOut, "sold-out/s")
	results.Report(b, echoName, soldOut, "sold-out/s")
	ratio := results.Ratio(ours, soldOut, echoName, soldOut)
	t := page.Table{
		Title: "Answers “sold out” a second",
		Note: fmt.Sprintf("`stampede serve` beside an Echo handler that sends the same bytes and does nothing else, "+
			"without any middleware. Closed loop of %d connections, %d rounds of %v.", connections(b), b.N, turn(b)),
		Head: []string{"", "answers/s", "p50", "p99", "p99.9", "CPU of the front, each"},
	}
	for _, name := range []string{ours, echoName} {
		t.Rows = append(t.Rows, append(append(
			[]string{name, results.Of(name, soldOut).With(rig.Count)}, latencies(results, name, closedLoop)...),
			results.Of(name, cpu+rig.Front).With(rig.Ratio)+" µs"))
	}
	t.Rows = append(t.Rows, []string{
		"ratio (at least " + rig.Ratio(soldOutGoal) + ")", ratio.With(rig.Ratio), "", "", "",
		verdict(ratio.Median >= soldOutGoal),
	})
	rig.Put(t)
}

// sellOut buys the only unit, and returns what all others are told from then on.
func sellOut(b *testing.B, s *rig.System) (body string) {
	b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For, load.Most = 1, time.Minute, 2
	load.Heard = func(_ uint64, status int, text []byte) {
		if status == http.StatusConflict {
			body = string(text)
		}
	}
	answers := s.Measure(load)
	require.Equal(b, map[int]int64{http.StatusAccepted: 1, http.StatusConflict: 1}, answers.ByStatus)
	return body
}

// refuse measures how fast a crowd is told that nothing is left.
func refuse(s *rig.System) func(*testing.B, int) rig.Values {
	return func(b *testing.B, _ int) rig.Values {
		load := s.Crowd(1)
		load.Connections, load.For, load.Status = connections(b), turn(b), http.StatusConflict
		before := s.CPU()
		answers := s.Measure(load)
		require.Zero(b, answers.Others(), answers)
		v := rig.Values{
			soldOut:         answers.PerSecond(),
			cpu + rig.Front: s.CPU().Since(before).PerOrder(answers.Wanted)[rig.Front],
		}
		putLatencies(v, closedLoop, answers)
		return v
	}
}
