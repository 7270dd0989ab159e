package rig

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
