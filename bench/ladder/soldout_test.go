package ladder

import (
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/bench/rig"
)

const soldOutRate = "sold out/s"

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
	t := rig.Table{
		Title: "Answers “sold out” a second",
		Note: fmt.Sprintf("`stampede serve` beside an Echo handler that sends the same bytes and does nothing else, "+
			"without any middleware. Closed loop of %d connections, %d rounds of %v. The ratio is %s.",
			usualConnections(b), b.N, turnDuration(b), ratio.Format(rig.Ratio)),
		Head: []string{"", "answers/s", "p50, ms", "p99, ms", "CPU of the front, µs each"},
	}
	for _, name := range []string{ours, echoName} {
		row := append([]string{name, results.Of(name, soldOutRate).Format(rig.Count)},
			results.Medians(rig.Ratio, name, closedLoop+p50, closedLoop+p99)...)
		t.Rows = append(t.Rows, append(row, results.Of(name, cpu+rig.Front).Format(rig.Ratio)))
	}
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
