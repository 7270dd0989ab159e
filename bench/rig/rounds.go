package rig

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"stampede/internal/figure"
)

// Candidate is one of the compared systems.
type Candidate struct {
	Name string
	// Turn measures one turn. Its setup and cleanup are not measured.
	Turn func(b *testing.B, round int) Values
}

// Values are the results of a turn by figure. A figure that could not be measured is left out.
type Values map[string]float64

// Results are the values of all rounds.
type Results struct {
	rounds []map[string]Values // by candidate
}

// Compare runs b.N rounds: in each of them every candidate that -only selects has a turn. The order
// changes from round to round, so that a machine that becomes slower affects all of them alike.
func Compare(b *testing.B, candidates ...Candidate) *Results {
	b.Helper()
	return CompareInTurns(b, 1, candidates...)
}

// CompareInTurns gives every candidate several turns in each round. The value of a round is the median
// of its turns.
func CompareInTurns(b *testing.B, turns int, candidates ...Candidate) *Results {
	b.Helper()
	candidates, err := chosen(candidates, *only)
	if err != nil {
		b.Fatal(err)
	}
	r := &Results{}
	for round := range b.N {
		found := make(map[string]map[string][]float64)
		for turn := range turns {
			for place := range candidates {
				c := candidates[(place+turn+round)%len(candidates)]
				if found[c.Name] == nil {
					found[c.Name] = make(map[string][]float64)
				}
				for figure, v := range c.Turn(b, round) {
					found[c.Name][figure] = append(found[c.Name][figure], v)
				}
			}
		}
		values := make(map[string]Values)
		for name, figures := range found {
			values[name] = Values{}
			for figure, all := range figures {
				values[name][figure] = Summarize(all).Median
			}
			b.Logf("round %d: %s: %v", round, name, values[name])
		}
		r.rounds = append(r.rounds, values)
	}
	b.ReportMetric(0, "ns/op") // a round has no meaning as an operation
	return r
}

// chosen returns the candidates whose names match the expression.
func chosen(candidates []Candidate, expression string) ([]Candidate, error) {
	names, err := regexp.Compile(expression)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	found := slices.DeleteFunc(slices.Clone(candidates), func(c Candidate) bool { return !names.MatchString(c.Name) })
	if len(found) == 0 {
		known := make([]string, len(candidates))
		for i, c := range candidates {
			known[i] = c.Name
		}
		return nil, fmt.Errorf("-only matches none of these: %s", strings.Join(known, "; "))
	}
	return found, nil
}

// Spread is the median and the range of the values of several rounds.
type Spread struct {
	N                       int // number of values; 0 means that nothing was measured
	Median, least, greatest float64
}

// Of is the spread of a candidate's figure.
func (r *Results) Of(candidate, figure string) Spread {
	var values []float64
	for _, round := range r.rounds {
		if v, found := round[candidate][figure]; found {
			values = append(values, v)
		}
	}
	return Summarize(values)
}

// Ratio is the spread of a figure of one candidate ÷ a figure of another, computed per round.
func (r *Results) Ratio(candidate, figure, other, otherFigure string) Spread {
	var ratios []float64
	for _, round := range r.rounds {
		v, found := round[candidate][figure]
		w, foundOther := round[other][otherFigure]
		if found && foundOther && w != 0 {
			ratios = append(ratios, v/w)
		}
	}
	return Summarize(ratios)
}

// Report adds the median of a figure to the benchmark's line of output.
func (r *Results) Report(b *testing.B, candidate, figure, unit string) {
	if s := r.Of(candidate, figure); s.N > 0 {
		b.ReportMetric(s.Median, strings.ReplaceAll(candidate, " ", "-")+"_"+unit)
	}
}

// Medians are the cells of a row: the medians of a candidate's figures, all in the same format.
func (r *Results) Medians(write func(float64) string, candidate string, figures ...string) []string {
	var cells []string
	for _, figure := range figures {
		cells = append(cells, r.Of(candidate, figure).FormatMedian(write))
	}
	return cells
}

// Ranges are the same cells with the range of each figure.
func (r *Results) Ranges(write func(float64) string, candidate string, figures ...string) []string {
	var cells []string
	for _, figure := range figures {
		cells = append(cells, r.Of(candidate, figure).Format(write))
	}
	return cells
}

// Summarize computes the spread of values.
func Summarize(values []float64) Spread {
	n := len(values)
	if n == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	return Spread{N: n, Median: (sorted[(n-1)/2] + sorted[n/2]) / 2, least: sorted[0], greatest: sorted[n-1]}
}

// Format writes the median, and the range if it reads differently.
func (s Spread) Format(write func(float64) string) string {
	if s.N == 0 {
		return none
	}
	median, least, greatest := write(s.Median), write(s.least), write(s.greatest)
	if least == greatest {
		return median
	}
	return fmt.Sprintf("%s (%s–%s)", median, least, greatest)
}

// FormatMedian writes the median only.
func (s Spread) FormatMedian(write func(float64) string) string {
	if s.N == 0 {
		return none
	}
	return write(s.Median)
}

// Count writes a whole number with thousands separators.
func Count(v float64) string { return figure.Count(int64(math.Round(v))) }

// Ratio writes a number with about three digits.
func Ratio(v float64) string {
	switch {
	case v < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case v < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return Count(v)
}

// InMillis converts a time to milliseconds.
func InMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
