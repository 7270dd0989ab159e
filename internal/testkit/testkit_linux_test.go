package testkit_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/testkit"
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
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", echo.Pid()))
		require.NoError(t, err)
		var pid int
		var name, state string
		_, err = fmt.Sscan(string(stat), &pid, &name, &state)
		require.NoError(t, err)
		return state == "T"
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
