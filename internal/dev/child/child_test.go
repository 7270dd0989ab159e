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

	"stampede/internal/dev/child"
	"stampede/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, testkit.WithCommand(command)) }

// command runs as a parent that waits for its child, or as a child that writes the signal that it gets to a file.
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
		if err := replaceFile(os.Args[2], "ready"); err != nil {
			return fail(err)
		}
		if err := replaceFile(os.Args[2], (<-signals).String()); err != nil {
			return fail(err)
		}
		return 0
	}
	return fail(fmt.Errorf("unknown command %q", os.Args[1]))
}

// replaceFile is atomic: readers see the old text or the new one.
func replaceFile(path, text string) error {
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
	file := t.TempDir() + "/state"
	hasText := func(want string) func() bool {
		return func() bool {
			text, err := os.ReadFile(file)
			return err == nil && string(text) == want
		}
	}
	parent := testkit.Command(t, "parent", file)
	parent.Start()
	testkit.Eventually(t, 30*time.Second, "the child runs", hasText("ready"))
	parent.Kill()
	testkit.Eventually(t, 30*time.Second, "the child is signalled", hasText("interrupt"))
}

func TestChildHasOwnProcessGroup(t *testing.T) {
	t.Parallel()
	process := startEcho(t, "exec cat")
	group, err := syscall.Getpgid(process.Pid())
	require.NoError(t, err)
	require.Equal(t, process.Pid(), group)
}

func TestStopKillsChildThatIgnoresSignal(t *testing.T) {
	t.Parallel()
	ignoring := startEcho(t, "trap '' TERM; exec cat")
	ignoring.answers(t) // now the trap is set
	ignoring.Stop(syscall.SIGTERM, 10*time.Millisecond)
	require.ErrorContains(t, ignoring.Wait(), "signal: killed")
}

func TestStartErrorNamesProgram(t *testing.T) {
	t.Parallel()
	_, err := child.Start(exec.Command("/does/not/exist"), syscall.SIGKILL)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "/does/not/exist")
}

// echo is a child that copies its input to its output.
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
	_, err := e.in.WriteString("ping\n")
	require.NoError(t, err)
	require.NoError(t, e.out.SetReadDeadline(time.Now().Add(10*time.Second)))
	line, err := bufio.NewReader(e.out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ping\n", line)
}
