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
	soldOutRate = "sold out/s"
	// soldOutGoal is the least share of Echo's rate.
	soldOutGoal = 1.8
)

// BenchmarkSoldOut compares the answer that most of a crowd gets with an Echo handler that only sends
// the same bytes. Both run all the time, and are idle outside their turns.
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
	results.Report(b, ours, soldOutRate, "sold-out/s")
	results.Report(b, echoName, soldOutRate, "sold-out/s")
	ratio := results.Ratio(ours, soldOutRate, echoName, soldOutRate)
	t := page.Table{
		Title: "Answers “sold out” a second",
		Note: fmt.Sprintf("`stampede serve` beside an Echo handler that sends the same bytes and does nothing else, "+
			"without any middleware. Closed loop of %d connections, %d rounds of %v.", usualConnections(b), b.N, turnDuration(b)),
		Head: []string{"", "answers/s", "p50", "p99", "p99.9", "CPU of the front, each"},
	}
	for _, name := range []string{ours, echoName} {
		t.Rows = append(t.Rows, append(append(
			[]string{name, results.Of(name, soldOutRate).Format(rig.Count)}, latencies(results, name, closedLoop)...),
			results.Of(name, cpu+rig.Front).Format(rig.Ratio)+" µs"))
	}
	t.Rows = append(t.Rows, []string{
		"ratio (at least " + rig.Ratio(soldOutGoal) + ")", ratio.Format(rig.Ratio), "", "", "",
		verdict(ratio.Median >= soldOutGoal),
	})
	rig.Put(t)
}

// sellOut buys the only unit, and returns the body of all answers from then on.
func sellOut(b *testing.B, s *rig.System) (body string) {
	b.Helper()
	load := s.Crowd(1)
	load.Connections, load.For, load.Most = 1, time.Minute, 2
	load.OnAnswer = func(_ uint64, status int, text []byte) {
		if status == http.StatusConflict {
			body = string(text)
		}
	}
	answers := s.Measure(load)
	require.Equal(b, map[int]int64{http.StatusAccepted: 1, http.StatusConflict: 1}, answers.ByStatus)
	return body
}

// refuse measures the rate of "sold out" answers.
func refuse(s *rig.System) func(*testing.B, int) rig.Values {
	return func(b *testing.B, _ int) rig.Values {
		load := s.Crowd(1)
		load.Connections, load.For, load.Status = usualConnections(b), turnDuration(b), http.StatusConflict
		before := s.CPU()
		answers := s.Measure(load)
		require.Zero(b, answers.Others(), answers)
		v := rig.Values{
			soldOutRate:     answers.PerSecond(),
			cpu + rig.Front: s.CPU().Since(before).PerOrder(answers.Wanted)[rig.Front],
		}
		recordLatencies(v, closedLoop, answers)
		return v
	}
}
