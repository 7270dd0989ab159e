package designs

import (
	"testing"

	"stampede/bench/front"
	"stampede/internal/test/testkit"
)

// The test binary also runs as a front, for tests that kill it.
func TestMain(m *testing.M) {
	testkit.Main(m, testkit.WithCommand(func() int { return front.Main(Find) }))
}
