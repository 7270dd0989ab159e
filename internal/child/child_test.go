package child_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/internal/child"
	"stampede/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

// command is a parent that waits for its child, or a child that tells in a file by which signal it ended.
func command() int {
	switch os.Args[1] {
	case "parent":
		self, err := os.Executable()
		if err != nil {
			return fail(err)
		}
		process, err := child.Start(exec.Command(self, "child", os.Args[2]), syscall.SIGINT)
		if err != nil {
			return fail(err)
		}
		if err := process.Wait(); err != nil {
			return fail(err)
		}
		return 0
	case "child":
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
		if err := tell(os.Args[2], "ready"); err != nil {
			return fail(err)
		}
		if err := tell(os.Args[2], (<-signals).String()); err != nil {
			return fail(err)
		}
		return 0
	}
	return fail(fmt.Errorf("unknown command %q", os.Args[1]))
}

// tell replaces the file in one step, so that a reader sees the old text or the new one.
func tell(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func TestChildIsSignalledWhenItsParentIsKilled(t *testing.T) {
	t.Parallel()
	told := t.TempDir() + "/told"
	saying := func(want string) func() bool {
		return func() bool {
			text, err := os.ReadFile(told)
			return err == nil && string(text) == want
		}
	}
	parent := testkit.Command(t, "parent", told)
	parent.Start()
	testkit.Eventually(t, 10*time.Second, "the child runs", saying("ready"))
	parent.Kill()
	testkit.Eventually(t, 10*time.Second, "the child is signalled", saying("interrupt"))
}

func TestChildHasAProcessGroupOfItsOwn(t *testing.T) {
	t.Parallel()
	echo := startEcho(t, "exec cat")
	group, err := syscall.Getpgid(echo.Pid())
	require.NoError(t, err)
	require.Equal(t, echo.Pid(), group)
}

func TestStopKillsAChildThatDoesNotListen(t *testing.T) {
	t.Parallel()
	deaf := startEcho(t, "trap '' TERM; exec cat")
	deaf.answers(t) // so the trap is set
	deaf.Stop(syscall.SIGTERM, 10*time.Millisecond)
	require.ErrorContains(t, deaf.Wait(), "signal: killed")
}

func TestStartSaysWhatCouldNotBeStarted(t *testing.T) {
	t.Parallel()
	_, err := child.Start(exec.Command("/does/not/exist"), syscall.SIGKILL)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "/does/not/exist")
}

// echo is a child that sends back what it is sent.
type echo struct {
	*child.Process
	in, out *os.File
}

func startEcho(t *testing.T, script string) echo {
	t.Helper()
	childIn, in, err := os.Pipe()
	require.NoError(t, err)
	out, childOut, err := os.Pipe()
	require.NoError(t, err)
	cmd := exec.Command("sh", "-c", script)
	cmd.Stdin, cmd.Stdout = childIn, childOut
	process, err := child.Start(cmd, syscall.SIGKILL)
	require.NoError(t, err)
	t.Cleanup(func() {
		process.Stop(syscall.SIGKILL, time.Second)
		for _, f := range []*os.File{childIn, in, out, childOut} {
			_ = f.Close()
		}
	})
	return echo{process, in, out}
}

func (e echo) answers(t *testing.T) {
	t.Helper()
	_, err := e.in.WriteString("still here\n")
	require.NoError(t, err)
	require.NoError(t, e.out.SetReadDeadline(time.Now().Add(10*time.Second)))
	line, err := bufio.NewReader(e.out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "still here\n", line)
}
