package testkit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/test/testkit"
)

func TestFrozenCommandReadsInputAfterThaw(t *testing.T) {
	t.Parallel()
	echo := testkit.Command(t, "echo")
	echo.Input()
	echo.Start()
	echo.WriteLine("one")
	echo.WaitOutput(10*time.Second, "read one")

	echo.Freeze()
	testkit.Eventually(t, 30*time.Second, "the process is stopped", func() bool {
		return testkit.Stopped(t, echo.Pid())
	})
	echo.WriteLine("two")
	require.NotContains(t, echo.Output(), "two")
	echo.Thaw()
	echo.WaitOutput(10*time.Second, "read two")

	echo.Freeze()
	echo.Kill()
	echo.WaitKilled(time.Second)
}

func TestCommandWithoutInputReadsEOF(t *testing.T) {
	t.Parallel()
	silent := testkit.Command(t, "echo")
	silent.Start()
	require.Equal(t, 0, silent.Wait(10*time.Second).ExitCode())
}
