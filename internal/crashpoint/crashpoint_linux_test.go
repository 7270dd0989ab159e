package crashpoint_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
)

// The signal takes a moment to stop all threads; the thread that sent it must not continue meanwhile.
func TestFrozenProcessDoesNotPassHit(t *testing.T) {
	t.Parallel()
	for range 10 {
		process := testkit.Command(t, crashpoint.AfterCommit)
		process.Setenv(crashpoint.FreezeEnv, "after-commit:2")
		process.Start()
		testkit.Eventually(t, 30*time.Second, "the process is stopped", func() bool {
			return testkit.Stopped(t, process.Pid()) || strings.Count(process.Output(), "before") > 2
		})
		process.WaitOutput(10*time.Second, "frozen at after-commit")
		require.Equal(t, 2, strings.Count(process.Output(), "before"))
		process.Kill()
	}
}
