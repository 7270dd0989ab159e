package testkit

import (
	"os"
	"strconv"
)

// Soak returns how many random rounds a test plays: n, times STAMPEDE_TEST_SOAK, which task soak sets.
func Soak(n int) int {
	if factor, err := strconv.Atoi(os.Getenv("STAMPEDE_TEST_SOAK")); err == nil {
		return n * factor
	}
	return n
}
