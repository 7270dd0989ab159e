package loadgen

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestBuyersArriveAsTheyShould(t *testing.T) {
	t.Parallel()
	recorded, err := ReadRecorded(strings.NewReader("# the drop of May\n1700000000 100\n\n1700000001,0\n1700000003\t300\n"))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		arrivals Arrivals
		// seconds of the first buyer, of those after a quarter, a half and three quarters, and of the last of 1,000
		want [5]float64
	}{
		"evenly":   {Evenly(8 * time.Second), [5]float64{0, 2, 4, 6, 8}},
		"flash":    {Flash(time.Second), [5]float64{0, 0.415, 1, 2, 10}},
		"recorded": {recorded, [5]float64{0, 3, 3.333, 3.667, 4}},
		"at once":  {Evenly(0), [5]float64{}},
	} {
		for i, buyer := range []int{0, 250, 500, 750, 999} {
			assert.InDelta(t, c.want[i], c.arrivals.due(buyer, 1000).Seconds(), 0.04, "%s, buyer %d", name, buyer)
		}
		assert.Equal(t, 1000, dueBy(c.arrivals, 1000, over(c.arrivals, 1000)), name)
	}
	assert.Equal(t, 501, dueBy(Flash(time.Second), 1000, time.Second))
	assert.Equal(t, 1, dueBy(Evenly(time.Hour), 1000, 0))
}

func TestRecordingsAreChecked(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                      "it has no buyers",
		"0 0":                   "it has no buyers",
		"5":                     `line 1, "5": 1 values; want a second and a number of buyers, as in "0 1200"`,
		"0 1\n1 -5":             `line 2, "1 -5": the number must be 0 to 20000000`,
		"0 1\n1 99999999":       "the number must be",
		"-1 5":                  "the second must be a whole number",
		"5 1\n5 1":              "seconds must grow",
		"0 1\n86400 1":          "a recording may last a day",
		"12:00 5":               "the second must be a whole number",
		"0 9223372036854775808": "the number must be",
	} {
		_, err := ReadRecorded(strings.NewReader(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestWantsAreJudged(t *testing.T) {
	t.Parallel()
	began := time.Unix(1_700_000_000, 0)
	r := Report{
		Began: began, Clicks: 1000, Accepted: 10, Failures: map[string]int{"HTTP 502": 1},
		Winners: Latencies{Count: 10, P50: time.Millisecond, P99: 41 * time.Millisecond, Max: time.Second},
		Durable: &Durable{Orders: 10, LastAt: began.Add(1400 * time.Millisecond)},
	}
	for text, want := range map[string]Judgement{
		"p99=41ms":  {"p99", true, true, "p99 of accepted orders 41ms, wanted 41ms"},
		"max=999ms": {"max", true, false, "max of accepted orders 1s, wanted 999ms"},
		"durable=1.4s": {
			"durable", true, true, "from the first click until the last order was in Postgres 1.4s, wanted 1.4s",
		},
		"failed=0.1%":     {"failed", true, true, "1 of 1,000 clicks failed, wanted at most 0.1%"},
		"failed=0":        {"failed", true, false, "1 of 1,000 clicks failed, wanted at most 0%"},
		"refused-p50=1ms": {"refused-p50", false, false, "p50 of refusals not measured, wanted 1ms"},
	} {
		var w Want
		require.NoError(t, w.UnmarshalText([]byte(text)))
		assert.Equal(t, []Judgement{want}, r.Judge([]Want{w}))
	}
	r.CPUMost = 0.97
	missed := r.Judge([]Want{{"max", float64(time.Millisecond)}, {"p99", float64(time.Second)}})
	assert.Equal(t, Judgement{"max", false, false, "max of accepted orders 1s, wanted 1ms; the load itself used 97 % of its " +
		"cores: send it from more or larger machines"}, missed[0])
	assert.True(t, missed[1].Met, "a load that is busy may still be good enough")
	r.Durable.Orders = 9 // one has not arrived
	assert.False(t, r.Judge([]Want{{"durable", float64(time.Hour)}})[0].Met)
	for _, text := range []string{
		"", "p99", "p99=", "p99=0s", "p99=5", "failed=1", "failed=-1", "failed=x", "p98=1s", "failed=NaN",
	} {
		require.Error(t, new(Want).UnmarshalText([]byte(text)), text)
	}
}
