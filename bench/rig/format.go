package rig

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"stampede/internal/figure"
)

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
