package rig

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"stampede/bench/page"
	"stampede/internal/figure"
)

// With writes the median and, where there are several rounds, the least and the greatest value.
func (s Spread) With(write func(float64) string) string {
	switch s.N {
	case 0:
		return page.None
	case 1:
		return write(s.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", write(s.Median), write(s.Min), write(s.Max))
}

// Middle writes the median only.
func (s Spread) Middle(write func(float64) string) string {
	if s.N == 0 {
		return page.None
	}
	return write(s.Median)
}

// Count writes a whole number with its thousands apart.
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

// InMillis is a time in milliseconds, as a value.
func InMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Millis writes a time that is given in milliseconds.
func Millis(v float64) string { return Ratio(v) + " ms" }
