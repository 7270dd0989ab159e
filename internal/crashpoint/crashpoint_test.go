package crashpoint_test

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
)

const passes = 4

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(pass)) }

// pass rejects an invalid setting as the program does, and passes the given point four times.
func pass() int {
	if err := crashpoint.Check(); err != nil {
		fmt.Println(err)
		return 1
	}
	// The kernel stops the main thread first, so the passes run on another one, as in the program.
	runtime.LockOSThread()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range passes {
			fmt.Println("before", i+1)
			crashpoint.Hit(os.Args[1])
		}
	}()
	<-done
	return 0
}

func TestHitKillsAtArmedPass(t *testing.T) {
	t.Parallel()
	for setting, survived := range map[string]int{
		"after-commit": 0, "after-commit:1": 0, "after-commit:3": 2,
		"after-commit:4": 3,
	} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			process := start(t, setting, crashpoint.AfterCommit)
			process.WaitKilled(10 * time.Second)
			require.Equal(t, survived+1, strings.Count(process.Output(), "before"))
		})
	}
}

func TestHitIgnoresOtherPoints(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]string{
		"disarmed": "", "another point": "before-ack",
		"later pass": "after-commit:5",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			process := start(t, setting, crashpoint.AfterCommit)
			require.Zero(t, process.Wait(10*time.Second).ExitCode())
			require.Equal(t, passes, strings.Count(process.Output(), "before"))
		})
	}
}

func TestCheckRejectsUnreachableSetting(t *testing.T) {
	t.Parallel()
	for setting, want := range map[string]string{
		"after-comit":     "the points are before-persist, after-commit, before-ack",
		":2":              "the points are",
		"after-commit:":   "a whole number from 1",
		"after-commit:0":  "a whole number from 1",
		"after-commit:-1": "a whole number from 1",
		"after-commit:x":  "a whole number from 1",
	} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			process := start(t, setting, crashpoint.AfterCommit)
			require.Equal(t, 1, process.Wait(10*time.Second).ExitCode())
			require.Contains(t, process.Output(), fmt.Sprintf("STAMPEDE_CRASH_AT=%q", setting))
			require.Contains(t, process.Output(), want)
		})
	}
}

func start(t *testing.T, setting, point string) *testkit.Cmd {
	t.Helper()
	process := testkit.Command(t, point)
	process.Setenv(crashpoint.Env, setting)
	process.Start()
	return process
}

func TestHitFreezesUntilContinued(t *testing.T) {
	t.Parallel()
	process := testkit.Command(t, crashpoint.AfterCommit)
	process.Setenv(crashpoint.FreezeEnv, "after-commit:2")
	process.Start()
	process.WaitOutput(10*time.Second, "frozen at after-commit")
	require.Equal(t, 2, strings.Count(process.Output(), "before"))
	testkit.Eventually(t, 30*time.Second, "the process continues", func() bool {
		process.Thaw()
		return strings.Count(process.Output(), "before") == passes
	})
	require.Zero(t, process.Wait(10*time.Second).ExitCode())
}
