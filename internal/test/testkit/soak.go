package testkit

import (
	"flag"
	"os"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Soak returns how many random rounds a test plays: n, times STAMPEDE_TEST_SOAK, which task soak sets.
func Soak(n int) int {
	if factor, err := strconv.Atoi(os.Getenv("STAMPEDE_TEST_SOAK")); err == nil {
		return n * factor
	}
	return n
}

// PlaySales lets rapid play n sales.
func PlaySales(t *testing.T, n int, play func(*rapid.T)) {
	t.Helper()
	require.NoError(t, flag.Set("rapid.checks", strconv.Itoa(n)))
	require.NoError(t, flag.Set("rapid.nofailfile", "true"))
	rapid.Check(t, play)
}

// salesForRareSteps is how many sales take each step at least once, as in task soak.
const salesForRareSteps = 40

// EnoughForRareSteps reports whether so many sales were played that each step was taken. Few sales miss rare steps.
// rapid begins no further sale when the deadline of the tests is near, and does not fail then.
func EnoughForRareSteps(t testing.TB, played, planned int) bool {
	t.Helper()
	enough := played >= max(planned, salesForRareSteps)
	if !enough {
		t.Logf("%d of %d sales are too few to require each step", played, planned)
	}
	return enough
}
